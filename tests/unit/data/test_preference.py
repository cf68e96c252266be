"""From rows to the Arrow file: order, identity, options and report."""

import hashlib
import json
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest

from sdpo_scale.data.preference import PairDataset, Preparation, prepare_pairs
from sdpo_scale.data.sources import DataError
from sdpo_scale.packing.layout import build_layout
from tests.helpers.toy_tokenizers import build


def numbered(count: int) -> list[dict]:
    return [
        {"prompt": f"q{i} ", "chosen": "y" * (i % 7), "rejected": f"n{i}"} for i in range(count)
    ]


def prepare(rows, folder: Path, **options):
    return prepare_pairs(rows, build("plain"), options=Preparation(**options), cache_dir=folder)


def test_pairs_keep_order_and_identity_over_chunks_and_batches(tmp_path):
    rows = numbered(2100)
    bad = {3, 511, 512, 999, 1000, 2099}
    rows = [{**row, "chosen": None} if i in bad else row for i, row in enumerate(rows)]
    dataset, report = prepare(rows, tmp_path, on_bad_row="skip")
    tokenizer = build("plain")
    kept = [i for i in range(2100) if i not in bad]
    assert len(dataset) == report.kept == len(kept)
    assert dataset.pair_ids.tolist() == kept
    for index in (0, 1, 3, 998, 999, 1000, 1999, 2000, len(kept) - 1):
        pair = dataset[index]
        row = rows[pair.pair_id]
        assert [tokenizer.decode(ids) for ids in pair.tokens] == [
            row["prompt"],
            row["chosen"] + "</s>",
            row["rejected"] + "</s>",
        ]
        assert dataset.lengths[index].tolist() == [len(ids) for ids in pair.tokens]
        assert dataset.content_hashes[index] == pair.content_hash
        assert all(ids.dtype == np.int32 for ids in pair.tokens)
    assert dataset.lengths.dtype == np.int64
    assert dataset[-1].pair_id == kept[-1]
    for index in (len(kept), -len(kept) - 1):
        with pytest.raises(IndexError, match=f"pair {index} of {len(kept)}"):
            dataset[index]


def test_a_pair_is_read_from_disk_only_by_who_lays_it_out(tmp_path):
    dataset, _ = prepare(numbered(1), tmp_path)
    assert not any(ids.flags.owndata for ids in dataset[0].tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout = build_layout([dataset[0].tokens])
    assert layout.input_ids_T.tolist() == np.concatenate(dataset[0].tokens).tolist()


def test_a_last_batch_that_is_full(tmp_path):
    dataset, _ = prepare(numbered(1000), tmp_path)
    assert dataset[-1].pair_id == 999


def test_a_pickled_dataset_is_its_path(tmp_path):
    dataset, _ = prepare(numbered(50), tmp_path)
    data = pickle.dumps(dataset)
    assert len(data) < 500
    copy = pickle.loads(data)
    assert isinstance(copy, PairDataset)
    assert copy.path == dataset.path
    assert copy[17].chosen_ids.tolist() == dataset[17].chosen_ids.tolist()
    assert copy.content_hashes == dataset.content_hashes


def test_content_hash_depends_on_ids_and_border_only(tmp_path):
    rows = [
        {"prompt": "q", "chosen": "xy", "rejected": "n"},
        {"prompt": "qx", "chosen": "y", "rejected": "n"},
        {"prompt": "q", "chosen": "xy", "rejected": "n", "id": 5},
    ]
    dataset, _ = prepare(rows, tmp_path)
    first, second, third = dataset.content_hashes
    assert first == third != second
    pair = dataset[0]
    parts = [len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes() for ids in pair.tokens]
    assert first == hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def test_the_file_is_named_by_its_contents_and_nothing_else_is_left(tmp_path):
    first, _ = prepare(numbered(20), tmp_path)
    again, _ = prepare(numbered(20), tmp_path)
    other, _ = prepare(numbered(21), tmp_path)
    assert first.path == again.path != other.path
    assert sorted(tmp_path.iterdir()) == sorted([first.path, other.path])
    assert first.path.name.startswith("tokens-")
    with pytest.raises(DataError):
        prepare([*numbered(1500), {}], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_bad_rows_are_collected_up_to_ten(tmp_path):
    rows = [{}] * 3 + numbered(600) + [{"prompt": "q", "chosen": 1, "rejected": "n"}]
    with pytest.raises(DataError) as caught:
        prepare(rows, tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "<memory> row 0, column chosen: missing"
    assert lines[3].startswith("<memory> row 603, column chosen: neither text")
    assert lines[4:] == ["set on_bad_row: skip to leave such rows out"]
    with pytest.raises(DataError) as caught:
        prepare([{}] * 30, tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 12
    assert lines[10] == "(the first 10 bad rows; there may be more)"


def test_nothing_left_is_an_error_with_reasons(tmp_path):
    rows = [{}, {"chosen": "a", "rejected": None}, {}]
    with pytest.raises(
        ValueError, match="no pair left of 3 rows: 2 with chosen: missing; 1 with rej"
    ):
        prepare(rows, tmp_path, on_bad_row="skip")
    with pytest.raises(ValueError, match="no pair left of 0 rows: nothing given"):
        prepare([], tmp_path)
    row = numbered(1)
    part = next(p for p in ("train", "eval") if not _kept(row, tmp_path, p))
    with pytest.raises(
        ValueError, match="no pair left of 1 rows: 1 in the other part of the holdout"
    ):
        prepare(row, tmp_path, holdout=2, holdout_part=part)


def _kept(rows, folder, part) -> bool:
    try:
        return prepare(rows, folder, holdout=2, holdout_part=part)[1].kept == 1
    except ValueError:
        return False


def test_holdout_parts_are_disjoint_complete_and_follow_the_prompt(tmp_path):
    rows = [row for row in numbered(300) for _ in range(2)]
    parts = {
        part: prepare(rows, tmp_path, holdout=5, holdout_part=part) for part in ("train", "eval")
    }
    ids = {part: dataset.pair_ids.tolist() for part, (dataset, _) in parts.items()}
    assert sorted(ids["train"] + ids["eval"]) == list(range(600))
    assert parts["train"][1].held_out == len(ids["eval"])
    wanted = [
        i
        for i, row in enumerate(rows)
        if int(hashlib.sha256(row["prompt"].encode()).hexdigest(), 16) % 5 == 0
    ]
    assert ids["eval"] == wanted
    assert 60 < len(wanted) < 180
    assert "in the other part of the holdout" in parts["train"][1].describe()[0]


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": [{"role": "user", "content": "é"}]}, '[{"content":"é","role":"user"}]'),
        ({"prompt": "é"}, "é"),
    ],
    ids=["messages", "text"],
)
def test_holdout_key_of_conversations(tmp_path, row, key):
    turn = {"role": "assistant"}
    row = {**row, "chosen": [{**turn, "content": "a"}], "rejected": [{**turn, "content": "b"}]}
    divisible = int(hashlib.sha256(key.encode()).hexdigest(), 16) % 2 == 0
    options = Preparation(holdout=2, holdout_part="eval" if divisible else "train")
    _, report = prepare_pairs([row], build("bos"), options=options, cache_dir=tmp_path)
    assert report.kept == 1


def test_max_samples_counts_kept_rows(tmp_path):
    rows = [{}, *numbered(1000)]
    dataset, report = prepare(rows, tmp_path, max_samples=3, on_bad_row="skip")
    assert dataset.pair_ids.tolist() == [1, 2, 3]
    assert (report.rows, report.kept, len(report.skipped_rows)) == (4, 3, 1)
    # Bad rows behind the last one wanted do no harm.
    assert len(prepare([*numbered(3), {}], tmp_path, max_samples=3)[0]) == 3


def test_report_holds_plain_values_and_lists_every_bad_row(tmp_path):
    _, report = prepare([{}] * 15 + numbered(40), tmp_path, on_bad_row="skip", max_length=6)
    values = json.loads(json.dumps(report.to_dict()))
    assert len(values["skipped_rows"]) == len(report.skipped_rows)
    assert values["skipped_rows"][0] == "<memory> row 0, column chosen: missing"
    assert values["kept"] == report.kept
    lines = report.describe()
    assert f"skipped {len(report.skipped_rows) - 10} more rows" in lines
    assert "skipped 15 for chosen: missing" in lines
    assert values["total_tokens"] > 0


def test_boundary_repairs_are_described(tmp_path):
    _, report = prepare([{"prompt": "a: ", "chosen": "$5", "rejected": "no"}], tmp_path)
    assert report.boundary_repairs == 1
    assert "prompt alone differs from prompt before a response: 1 pairs" in report.describe()


def test_warnings_are_described(tmp_path):
    row = {
        "prompt": [{"role": "user", "content": "q"}],
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
    }
    tokenizer = build("no_eos_template")
    _, report = prepare_pairs([row], tokenizer, options=Preparation(), cache_dir=tmp_path)
    assert report.describe()[-1].startswith("warning: the chat template of the tokenizer at toy/")


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 1},
        {"truncation_mode": "keep_middle"},
        {"on_bad_row": "warn"},
        {"max_samples": 0},
        {"holdout": 1, "holdout_part": "train"},
        {"holdout": 5},
        {"holdout_part": "train"},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options):
    name = list(options)[0 if len(options) > 1 else -1]
    with pytest.raises(ValueError, match=f"{name}"):
        Preparation(**options)
