"""Mixtures of weighted sources, CSV, template options: exact counts, errors that name places."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from sdpo_scale.data.files import READERS
from sdpo_scale.data.loader import StepBatches
from sdpo_scale.data.preference import Preparation, prepare_pairs
from sdpo_scale.data.sources import DataError, parts_of, read_rows
from tests.helpers.runs import config, save_model, text_rows, write_rows
from tests.helpers.toy_tokenizers import build


def batches(**options: Any) -> StepBatches:
    sources = np.repeat(np.arange(3, dtype=np.int32), (10, 7, 8))
    given = {"seed": 3, "sources": sources, "weights": (2.0, 1.5, 0.25), **options}
    return StepBatches(25, batch_size=4, **given)


def counts(steps: StepBatches, epoch: int) -> np.ndarray:
    steps.set_epoch(epoch)
    return np.bincount([index for step in steps for index in step], minlength=25)


def test_an_epoch_holds_weight_times_pairs_exactly():
    steps = batches()
    for epoch in range(5):
        found = counts(steps, epoch)
        assert set(found[:10]) == {2}
        assert set(found[10:17]) == {1, 2}
        assert found[10:17].sum() == round(1.5 * 7)
        assert sorted(found[17:]) == [0] * 6 + [1] * 2
        assert len(steps) == len(list(steps)) == 8
        assert steps.pairs_per_epoch == found.sum() == 32
    several = [counts(steps, epoch)[17:].tolist() for epoch in range(5)]
    assert several != [several[0]] * 5
    assert several == [counts(batches(), epoch)[17:].tolist() for epoch in range(5)]
    assert several != [counts(batches(seed=4), epoch)[17:].tolist() for epoch in range(5)]


def test_the_order_of_the_data_keeps_copies_together():
    steps = batches(shuffles=False)
    order = [index for step in steps for index in step]
    assert order == sorted(order)


def test_what_so_many_steps_use_is_each_pair_once():
    steps = batches()
    taken = [index for step in list(steps)[:3] for index in step]
    assert steps.first(3).tolist() == list(dict.fromkeys(taken))
    epochs = [counts(steps, epoch) for epoch in range(2)]
    assert sorted(steps.first(16)) == np.nonzero(sum(epochs))[0].tolist()
    assert sorted(steps.first(4000)) == list(range(25))


def test_a_weight_that_uses_no_pair_is_refused():
    with pytest.raises(ValueError, match=r"weight 0.01 of data source 2 uses none of its 8 pairs"):
        batches(weights=(1.0, 1.0, 0.01))


def test_sources_and_weights_are_kept_with_the_pairs(tmp_path: Path):
    first = write_rows(tmp_path / "a.jsonl", text_rows(5))
    source = [{"path": str(first), "weight": 2}, datasets.Dataset.from_list(text_rows(3, seed=1))]
    dataset, report = prepare_pairs(
        source, build("plain"), options=Preparation(), cache_dir=tmp_path
    )
    assert dataset.weights == (2.0, 1.0)
    assert dataset.sources.tolist() == [0] * 5 + [1] * 3
    assert [(s["rows"], s["kept"]) for s in report.sources] == [(5, 5), (3, 3)]
    assert f"  {first}: 5 read, 5 kept, weight 2" in report.describe()
    other, _ = prepare_pairs(
        [{**source[0], "weight": 3}, source[1]],
        build("plain"),
        options=Preparation(),
        cache_dir=tmp_path,
    )
    assert other.path != dataset.path
    _, report = prepare_pairs(
        source, build("plain"), options=Preparation(max_samples=4), cache_dir=tmp_path
    )
    assert report.warnings == ["max_samples was reached before <dataset> was read"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wieght": 2}, r"data\[1\]: unknown key 'wieght'; known are path, split"),
        ({"weight": 0}, r"data\[1\]: weight 0 is not a positive number"),
        ({"weight": "2"}, r"data\[1\]: weight '2' is not"),
        ({"weight": True}, r"data\[1\]: weight True is not"),
        ({"weight": float("inf")}, r"data\[1\]: weight inf is not"),
        ({"split": "train"}, r"data\[1\]: split 'train' has no effect on the file .*a\.jsonl"),
        ({"revision": "abc"}, r"data\[1\]: revision 'abc' has no effect on the file"),
        ({"revision": 5}, r"data\[1\]: revision 5 is not text"),
        ({"path": 5}, r"data\[1\]: a data source cannot be of type int"),
        ({"path": None}, r"data\[1\]: a data source cannot be of type NoneType"),
    ],
)
def test_a_bad_entry_is_refused_by_place_and_key(
    changes: dict[str, Any], message: str, tmp_path: Path
):
    path = str(write_rows(tmp_path / "a.jsonl", text_rows(1)))
    with pytest.raises(ValueError, match=message):
        parts_of([path, {"path": path, **changes}], split="train", option="data")


def test_entries_are_checked_before_any_is_read(tmp_path: Path):
    path = str(write_rows(tmp_path / "a.jsonl", text_rows(1)))
    with pytest.raises(FileNotFoundError, match=r"b\.jsonl: no such file"):
        parts_of([path, {"path": str(tmp_path / "b.jsonl")}], split="train")
    with pytest.raises(ValueError, match=r"data\[1\]: 5 is no source, as other entries are"):
        parts_of([path, 5], split="train", option="data")
    with pytest.raises(ValueError, match=r"data\[0\]: path is missing"):
        parts_of([{"weight": 2}, path], split="train", option="data")


def test_a_hub_name_with_split_subset_and_revision(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load_dataset(*args: Any, **options: Any) -> datasets.Dataset:
        asked.append((args, options))
        return datasets.Dataset.from_list(text_rows(2))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    entry = {"path": "org/name", "split": "prefs", "revision": "abc", "subset": "en"}
    (part,) = parts_of(entry, split="train")
    assert asked == []
    assert len(list(part.rows())) == 2
    assert asked == [(("org/name",), {"split": "prefs", "revision": "abc", "name": "en"})]


def csv_rows(path: Path, contents: bytes) -> list[Any]:
    path.write_bytes(contents)
    return list(read_rows(path))


def test_csv_cells_are_texts_conversations_or_missing(tmp_path: Path):
    turns = '"[{""role"": ""assistant"", ""content"": ""hi""}]"'
    contents = f'\ufeffprompt,chosen,rejected\r\nq,"a,\nb",\r\n\r\n[1],{turns},2024-01-02\r\n'
    first, second = csv_rows(tmp_path / "x.csv", contents.encode())
    assert first.values == {"prompt": "q", "chosen": "a,\nb", "rejected": None}
    assert second.values["prompt"] == "[1]"
    assert second.values["chosen"] == [{"role": "assistant", "content": "hi"}]
    assert second.values["rejected"] == "2024-01-02"
    assert second.label == f"{tmp_path}/x.csv row 1 (line 5)"
    (tabs,) = csv_rows(tmp_path / "x.tsv", b"prompt\tchosen\tr\na,b\tc\td\n")
    assert tabs.values == {"prompt": "a,b", "chosen": "c", "r": "d"}
    assert set(READERS) == {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}


def test_a_long_csv_cell_is_read_whole(tmp_path: Path):
    (row,) = csv_rows(tmp_path / "x.csv", b"chosen\n" + b"x" * 300_000)
    assert len(row.values["chosen"]) == 300_000


def test_bad_csv_is_named_by_row_line_and_column(tmp_path: Path):
    path = tmp_path / "x.csv"
    _, cells, encoding, last = csv_rows(path, b"a,b\n1,2\n3\n4,\xff\n5,6\n")
    assert str(cells) == f"{path} row 1 (line 3): another number of cells: 1, the header has 2"
    assert str(encoding) == f"{path} row 2 (line 4), column b: not UTF-8"
    assert last.row == 3
    with pytest.raises(DataError, match=r"x\.csv \(line 1\), column a: more than once"):
        csv_rows(path, b"a,a\n1,2\n")
    with pytest.raises(DataError, match=r"x\.csv row 1 \(line 3\): invalid CSV"):
        csv_rows(path, b'a,b\n1,2\n3,"4\n')


def test_template_options_of_the_run_and_of_a_row(tmp_path: Path):
    tokenizer = build("chatml")
    tokenizer.chat_template = "{{- mark -}}" + tokenizer.chat_template
    turn = {"role": "assistant"}
    row = {
        "prompt": [{"role": "user", "content": "q"}],
        "chosen": [{**turn, "content": "a"}],
        "rejected": [{**turn, "content": "b"}],
    }
    rows = [row, {**row, "chat_template_kwargs": json.dumps({"mark": "?"})}]
    options = Preparation(template_options={"mark": "!"})
    dataset, _ = prepare_pairs(rows, tokenizer, options=options, cache_dir=tmp_path)
    assert [tokenizer.decode(dataset[i].prompt_ids)[0] for i in (0, 1)] == ["!", "?"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, "'tokenize' is no variable of a template"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must map names to values"),
        ({"chat_template_kwargs": {"mesages": 1}}, "no variable 'mesages', did you mean 'mess"),
        ({"eval_dataset": [{"weight": 2}]}, r"eval_dataset: weight 2 of .*a\.jsonl has no effect"),
        ({"train_dataset": [{"weight": -1}]}, r"train_dataset\[0\]: weight -1 is not"),
        (
            {"eval_dataset": {"chat": "a.jsonl", "code": "b.jsonl"}},
            r"eval_dataset maps names \(chat, code\) to data sets, .* give a list",
        ),
    ],
)
def test_a_bad_option_is_refused_before_rows_are_read(
    changes: dict[str, Any], message: str, tmp_path: Path
):
    from sdpo_scale.inputs import prepare_inputs

    path = str(write_rows(tmp_path / "a.jsonl", text_rows(2)))
    for name in changes.keys() & {"train_dataset", "eval_dataset"}:
        if isinstance(changes[name], list):
            changes = {name: [{"path": path, **entry} for entry in changes[name]]}
    model = save_model(tmp_path / "model", "chatml")
    options = {"model": model, "train_dataset": path, **changes}
    with pytest.raises(ValueError, match=message):
        prepare_inputs(
            config(tmp_path, **options),
            model=None,
            tokenizer=None,
            train_dataset=None,
            eval_dataset=None,
        )
    assert not (tmp_path / "cache").exists()
