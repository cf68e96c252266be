"""The cache's files and index: few bytes per pair, few mapped files, shared with other processes.

What it is keyed by, and how damage is found, is in tests/unit/test_scoring.py.
"""

import os
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sdpo_scale.data import reference
from sdpo_scale.data.reference import ReferenceCache, ResponseLogprobs

PARTS = {"model": "m"}


def hash_of(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(8)  # trailing zeros, which text would lose


def logprobs_of(number: int) -> ResponseLogprobs:
    return np.full(1 + number % 3, -number, np.float32), np.full(number % 2, number, np.float32)


def append(cache: ReferenceCache, numbers: range) -> None:
    cache.append([hash_of(n) for n in numbers], [logprobs_of(n) for n in numbers])


def assert_holds(cache: ReferenceCache, numbers: Sequence[int]) -> None:
    for number in np.random.default_rng(0).permutation(numbers).tolist():
        for found, expected in zip(cache.read(hash_of(number)), logprobs_of(number), strict=True):
            np.testing.assert_array_equal(found, expected)


def mapped_files(folder: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if str(folder) in line}


@pytest.fixture
def cache(tmp_path: Path) -> ReferenceCache:
    """Ten pairs in each of five files, and one of them twice."""
    cache = ReferenceCache(tmp_path, PARTS)
    for start in range(0, 50, 10):
        append(cache, range(start, start + 10))
    append(cache, range(20, 21))
    return cache


def test_pairs_are_found_in_all_files_and_once(cache: ReferenceCache, tmp_path: Path):
    for each in (cache, ReferenceCache(tmp_path, PARTS), pickle.loads(pickle.dumps(cache))):
        assert len(each) == 50
        assert_holds(each, range(50))
        asked = np.array([hash_of(n) for n in (49, 7, 50, 0, 1 << 60)], "S16")
        assert (each.rows(asked) >= 0).tolist() == [True, True, False, True, False]
        with pytest.raises(AssertionError, match="has not been scored"):
            each.read(hash_of(50))


def test_an_empty_cache_has_no_pair(tmp_path: Path):
    cache = ReferenceCache(tmp_path, PARTS)
    assert len(cache) == 0
    assert cache.rows(np.array([hash_of(1)], "S16")).tolist() == [-1]


def test_what_others_append_is_found_while_this_one_reads(cache: ReferenceCache, tmp_path: Path):
    other = ReferenceCache(tmp_path, PARTS)
    held = cache.read(hash_of(3))
    append(other, range(50, 60))
    append(other, range(45, 70))  # overlaps with both
    assert len(cache) == 50
    cache.refresh()
    assert len(cache) == len(other) == 70
    assert_holds(cache, range(70))
    np.testing.assert_array_equal(held[0], logprobs_of(3)[0])


APPENDS = """
import sys
from pathlib import Path
from sdpo_scale.data.reference import ReferenceCache
from tests.unit.data.test_reference import PARTS, append
cache = ReferenceCache(Path(sys.argv[1]), PARTS)
for start in range(50, 250, 5):
    append(cache, range(start, start + 5))
"""


def test_another_process_may_append_at_any_moment(cache: ReferenceCache, tmp_path: Path):
    root = Path(__file__).resolve().parents[3]
    writer = subprocess.Popen([sys.executable, "-c", APPENDS, str(tmp_path)], cwd=root)
    seen = [len(cache)]
    while writer.poll() is None or len(cache) < 250:
        cache.refresh()
        rows = cache.rows(np.array([hash_of(n) for n in range(250)], "S16"))
        assert_holds(cache, np.flatnonzero(rows >= 0).tolist())
        seen.append(len(cache))
        assert writer.poll() in (None, 0)
    assert seen == sorted(seen)
    assert seen[-1] == len(ReferenceCache(tmp_path, PARTS)) == 250


@pytest.mark.parametrize(
    ("limit", "value", "most"), [("_MOST_MAPPED_FILES", 2, 2), ("MOST_TOUCHED_BYTES", 1, 1)]
)
def test_few_files_stay_mapped_and_none_open(
    limit: str,
    value: int,
    most: int,
    cache: ReferenceCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    assert mapped_files(tmp_path) == set()
    assert_holds(
        pickle.loads(pickle.dumps(cache)), range(50)
    )  # a copy, which is gone with its maps
    assert mapped_files(tmp_path) == set()
    monkeypatch.setattr(reference, limit, value)
    num_open = len(os.listdir("/proc/self/fd"))
    for number in (5, 15, 25, 35, 45, 6, 16):
        kept = cache.read(hash_of(number))
        assert len(mapped_files(tmp_path)) <= most
    assert len(os.listdir("/proc/self/fd")) == num_open
    np.testing.assert_array_equal(kept[0], logprobs_of(16)[0])


def test_a_pair_takes_24_bytes_of_memory(tmp_path: Path):
    """Values stay on disk, and a hash is no object of its own."""
    count = 20_000
    append(ReferenceCache(tmp_path, PARTS), range(count))
    tracemalloc.start()
    cache = ReferenceCache(tmp_path, PARTS)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(cache) == count
    assert held < 24 * count + 50_000
    assert peak < 120 * count + 50_000
