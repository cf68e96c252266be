"""The reference cache: what is found again, what is scored anew, what is noticed."""

import logging

import numpy as np
import pytest
import torch

from sdpo_scale.data.pairs import PairDataset, PairWriter
from sdpo_scale.data.reference import NonFiniteError, ReferenceCache, ReferenceLogprobs
from sdpo_scale.data.tokenization import TokenizedRow
from sdpo_scale.record import Ranks
from sdpo_scale.scoring import _window_ends, score_pairs
from tests.helpers.pairs import random_pairs
from tests.helpers.threads import run_ranks

PARTS = {"model": "m", "dtype": "float32", "tokenizer": "t", "template": "c", "max_length": "64"}


def as_row(pair):
    prompt, chosen, rejected = (part.tolist() for part in pair.tokens)
    return TokenizedRow(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        conversational=False,
        repaired=False,
        writes_end=True,
    )


def dataset_of(pairs, folder) -> PairDataset:
    with PairWriter(folder) as writer:
        for pair in pairs:
            writer.add(pair.pair_id, as_row(pair))
        return PairDataset(writer.commit())


class Scorer:
    """A model whose log-probability of a token is minus its id; counts what it is asked for."""

    def __init__(self):
        self.num_pairs = self.num_calls = 0

    def __call__(self, layout):
        self.num_calls += 1
        self.num_pairs += layout.num_pairs
        return -layout.target_ids_R.float()


@pytest.fixture
def pairs():
    return random_pairs(12, seed=4)


def score(dataset, cache, forward, *, max_tokens=120, ranks=None, on_progress=None):
    score_pairs(
        dataset,
        cache,
        forward=forward,
        indices=np.arange(len(dataset)),
        max_tokens=max_tokens,
        hidden_size=16,
        ranks=ranks or Ranks(),
        on_progress=on_progress or (lambda done, total: None),
    )


def fill(pairs, folder, *, parts=PARTS, forward=None, max_tokens=120):
    scorer = forward or Scorer()
    dataset = dataset_of(pairs, folder / "tokens")
    cache = ReferenceCache(folder / "reference", parts)
    score(dataset, cache, scorer, max_tokens=max_tokens)
    return ReferenceLogprobs(cache, dataset.content_hashes), scorer, dataset


def assert_right(reference, dataset):
    for index in range(len(dataset)):
        chosen, rejected = reference[index]
        np.testing.assert_array_equal(chosen, -dataset[index].chosen_ids.astype(np.float32))
        np.testing.assert_array_equal(rejected, -dataset[index].rejected_ids.astype(np.float32))


def test_values_are_per_token_and_in_the_order_of_the_data_set(pairs, tmp_path):
    reference, scorer, dataset = fill(pairs, tmp_path)
    assert scorer.num_pairs == len(reference) == 12
    assert_right(reference, dataset)


def test_case_ref_01_the_same_run_reuses_everything_whatever_the_packs(pairs, tmp_path):
    fill(pairs, tmp_path, max_tokens=120)
    reference, scorer, dataset = fill(pairs, tmp_path, max_tokens=500)
    assert scorer.num_pairs == 0
    assert_right(reference, dataset)


@pytest.mark.parametrize("part", PARTS)
def test_case_ref_01_each_changed_part_rebuilds_and_is_named(part, pairs, tmp_path, caplog):
    fill(pairs, tmp_path)
    with caplog.at_level(logging.INFO, logger="sdpo_scale"):
        _, scorer, _ = fill(pairs, tmp_path, parts={**PARTS, part: "other"})
    assert scorer.num_pairs == len(pairs)
    assert f"changed: {part}" in caplog.text


def test_case_ref_01_reordered_rows_are_found_by_content(pairs, tmp_path):
    fill(pairs, tmp_path)
    reference, scorer, dataset = fill(pairs[::-1], tmp_path)
    assert scorer.num_pairs == 0
    assert_right(reference, dataset)


def test_case_ref_01_more_or_edited_rows_are_scored_and_only_those(pairs, tmp_path):
    fill(pairs[:5], tmp_path)
    edited = random_pairs(1, seed=99)[0]
    reference, scorer, dataset = fill([edited, *pairs], tmp_path)
    assert scorer.num_pairs == 1 + 7
    assert_right(reference, dataset)


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_case_ref_08_a_damaged_file_is_noticed_and_scored_anew(damage, pairs, tmp_path, caplog):
    fill(pairs, tmp_path)
    (shard,) = (tmp_path / "reference").glob("*/shard-*.arrow")
    contents = bytearray(shard.read_bytes())
    if damage == "cut":
        contents = contents[: len(contents) // 2]
    else:
        contents[len(contents) // 2] ^= 1
    shard.write_bytes(contents)
    reference, scorer, dataset = fill(pairs, tmp_path)
    assert "damaged" in caplog.text
    assert scorer.num_pairs == len(pairs)
    assert_right(reference, dataset)


def test_a_killed_run_continues_from_its_complete_shards(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr("sdpo_scale.scoring._PAIRS_PER_WINDOW", 5)

    class Killed(Scorer):
        def __call__(self, layout):
            if self.num_pairs + layout.num_pairs > 7:
                raise KeyboardInterrupt
            return super().__call__(layout)

    with pytest.raises(KeyboardInterrupt):
        fill(pairs, tmp_path, forward=Killed())
    reference, scorer, dataset = fill(pairs, tmp_path)
    assert scorer.num_pairs == 7
    assert_right(reference, dataset)


def test_case_ref_02_a_hole_or_nan_is_never_stored(pairs, tmp_path):
    def broken(layout):
        values = -layout.target_ids_R.float()
        values[0] = torch.nan
        return values

    with pytest.raises(NonFiniteError, match="reference log-probability is not finite") as caught:
        fill(pairs, tmp_path, forward=broken)
    assert set(caught.value.pair_ids) <= {pair.pair_id for pair in pairs}
    assert not list((tmp_path / "reference").glob("*/shard-*.arrow"))


def test_progress_is_reported_pair_by_pair(pairs, tmp_path):
    seen = []
    dataset = dataset_of(pairs, tmp_path / "tokens")
    cache = ReferenceCache(tmp_path / "reference", PARTS)
    score(dataset, cache, Scorer(), on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (12, 12)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_the_error_keeps_its_pairs_when_pickled_and_shortens_long_lists():
    import pickle

    error = pickle.loads(pickle.dumps(NonFiniteError("the loss", list(range(12)))))
    assert error.pair_ids == tuple(range(12))
    assert str(error).endswith("8, 9 and 2 more")


@pytest.mark.parametrize("shares_folder", [True, False], ids=["one folder", "a folder per node"])
@pytest.mark.parametrize("num_known", [0, 5])
def test_case_ref_02_each_pair_is_scored_once_by_some_rank_and_known_to_all(
    shares_folder, num_known, pairs, tmp_path
):
    """Three ranks, of which the last two stand for nodes of their own; more ranks than packs."""
    dataset = dataset_of(pairs, tmp_path / "tokens")
    folders = [tmp_path / ("0" if shares_folder else str(rank)) for rank in range(3)]
    if num_known:  # on the first node only
        score(
            dataset_of(pairs[:num_known], tmp_path / "few"),
            ReferenceCache(folders[0], PARTS),
            Scorer(),
        )
    scorers = [Scorer() for _ in range(3)]

    def run(ranks):
        cache = ReferenceCache(folders[ranks.rank], PARTS)
        score(dataset, cache, scorers[ranks.rank], ranks=ranks, max_tokens=500)
        return ReferenceLogprobs(cache, dataset.content_hashes)

    for reference in run_ranks(3, run):
        assert_right(reference, dataset)
    idle = sum(scorer.num_pairs == 0 for scorer in scorers)
    missing = len(pairs) - num_known if shares_folder else len(pairs)
    assert sum(scorer.num_pairs for scorer in scorers) >= missing
    assert idle == 0, "a rank without pairs runs the smallest pack, for the others' collectives"
    assert {scorer.num_calls for scorer in scorers} == {scorers[0].num_calls}


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("tokens", [1, 80, 4000])
def test_many_pairs_lie_in_few_files_and_little_work_is_lost(tokens, world_size):
    ends = np.array(_window_ends(np.full(240_000, tokens), world_size=world_size))
    sizes = np.diff(ends, prepend=0)
    assert ends[-1] == sizes.sum() == 240_000
    least = 256 * world_size
    assert (sizes <= np.maximum(least, (ends - sizes) // 8)).all()
    assert (sizes * tokens <= max(least * tokens, 1 << 22)).all()
    num_files = len(sizes)
    assert num_files <= max(90, 240_000 * tokens / (1 << 22) + 90)
    assert (sizes[:-1] >= least).all()


def test_nothing_missing_needs_no_window():
    assert _window_ends(np.empty(0, int), world_size=2) == []
