"""Every kind of source gives the same rows; what cannot be read is named by file, row and line."""

import json
import pickle
import tracemalloc
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdpo_scale.data.sources import DataError, SourceRow, read_rows

ROWS = [
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": "d", "chosen": "e", "rejected": "f"},
]
# The second row lacks keys of the first and the other way round.
UNEVEN = [
    {
        "chosen": [{"role": "assistant", "content": None, "tool_calls": [{"arguments": {"x": 1}}]}],
        "tools": [{"name": "a", "parameters": {"x": "number"}}],
        "score": None,
    },
    {
        "chosen": [{"role": "assistant", "content": "hi"}],
        "tools": [{"name": "b", "parameters": {"y": "text"}}],
        "score": 1.0,
    },
]


def jsonl(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


def values(source, **options) -> list[dict]:
    rows = list(read_rows(source, **options))
    assert all(isinstance(row, SourceRow) for row in rows), rows
    return [row.values for row in rows]


def only_error(source) -> DataError:
    (error,) = [row for row in read_rows(source) if isinstance(row, DataError)]
    return error


def written(rows: list[dict], folder: Path) -> dict:
    """The same rows as every kind of source."""
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(
        folder / "dict"
    )
    dataset.to_parquet(folder / "rows.parquet")
    lines = [json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "data.json").write_text(json.dumps({"version": 1, "data": rows}))
    (folder / "lines.json").write_text("\n".join(lines))
    files = ("saved", "dict", "rows.parquet", "rows.jsonl", "rows.json", "data.json", "lines.json")
    in_memory = {
        "list": rows,
        "Dataset": dataset,
        "DatasetDict": datasets.DatasetDict(train=dataset),
    }
    return {**{name: str(folder / name) for name in files}, **in_memory}


def test_all_kinds_of_source_give_the_same_rows(tmp_path):
    for name, source in written(ROWS, tmp_path).items():
        assert values(source) == ROWS, name
        labels = [(row.row, row.line) for row in read_rows(source)]
        in_lines = name in ("rows.jsonl", "lines.json")
        assert labels == ([(0, 1), (1, 2)] if in_lines else [(0, None), (1, None)]), name


def test_arrow_padding_is_taken_out_again(tmp_path):
    sources = written(UNEVEN, tmp_path)
    assert values(sources["rows.parquet"])[0]["tools"][0]["parameters"] == {"x": "number"}
    for name, source in sources.items():
        assert values(source) == UNEVEN, name


def test_json_keeps_its_nulls():
    rows = [{"tools": [{"default": None}], "chosen": [{"role": "assistant", "name": None}]}]
    assert values(rows) == rows


def test_sources_in_a_list_are_read_one_after_the_other(tmp_path):
    sources = written(ROWS, tmp_path)
    read = list(
        read_rows([sources["rows.jsonl"], Path(sources["rows.parquet"]), sources["Dataset"]])
    )
    assert [row.values for row in read] == ROWS * 3
    assert [row.row for row in read] == [0, 1] * 3
    assert read[2].label == f"{tmp_path}/rows.parquet row 0"
    assert read[4].label == "<dataset> row 0"


def test_splits(tmp_path):
    folder = written(ROWS, tmp_path)["dict"]
    assert values(folder, split="test") == ROWS[:1]
    with pytest.raises(ValueError, match=r"dict has no split 'eval'; it has train, test"):
        values(folder, split="eval")


def test_blank_lines_count_as_lines_but_not_as_rows(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n', b"\r\n", b"  \n", b'{"a": 2}')
    rows = list(read_rows(path))
    assert [(row.values, row.row, row.line) for row in rows] == [({"a": 1}, 0, 1), ({"a": 2}, 1, 4)]
    assert rows[1].label == f"{path} row 1 (line 4)"


def test_unicode_line_ends_stay_inside_strings(tmp_path):
    text = "a\u2028b\x85c\x0bd".replace("\x0b", "\\u000b")
    path = jsonl(tmp_path / "x.jsonl", f'{{"a": "{text}"}}\n'.encode())
    assert values(path) == [{"a": "a\u2028b\x85c\x0bd"}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": ', "invalid JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"5", "not an object"),
        (b"[" * 100_000, "invalid JSON"),
    ],
)
def test_a_bad_line_is_yielded_and_the_next_ones_are_read(tmp_path, line, reason):
    path = jsonl(tmp_path / "x.jsonl", b'{"a": 1}\n', line, b'\n{"a": 2}\n')
    first, error, last = read_rows(path)
    assert (error.file, error.row, error.line, error.reason) == (str(path), 1, 2, reason)
    assert (first.values, last.values, last.row) == ({"a": 1}, {"a": 2}, 2)


@pytest.mark.parametrize(
    ("contents", "reason", "line"),
    [
        (b'[{"a": 1},\n{"a": ]', "invalid JSON", 2),
        (b'[{"a": "\xff"}]', "not UTF-8", None),
        (b'{"rows": []}', 'neither an array of objects nor {"data": [...]}', None),
    ],
)
def test_a_bad_json_document(tmp_path, contents, reason, line):
    path = jsonl(tmp_path / "x.json", contents)
    error = only_error(path)
    assert (error.file, error.row, error.line, error.reason) == (str(path), None, line, reason)


def test_rows_that_are_no_objects(tmp_path):
    assert str(only_error([{"a": 1}, 5])) == "<memory> row 1: not an object: of type int"
    path = jsonl(tmp_path / "x.json", b'[{"a": 1}, "b"]')
    assert str(only_error(path)) == f"{path} row 1: not an object: of type str"


def test_a_bad_parquet_file(tmp_path):
    path = jsonl(tmp_path / "x.parquet", b"not parquet")
    assert only_error(path).reason == "not a readable parquet file"


@pytest.mark.parametrize(
    "name", ["train.jsonl", "data/x/train", "./train", "/nowhere/train", "org/name.parquet", "a b"]
)
def test_a_missing_file(name):
    with pytest.raises(FileNotFoundError, match=f"^{name}: no such file"):
        values(name)


def test_a_file_of_another_kind(tmp_path):
    path = jsonl(tmp_path / "x.txt", b"a,b")
    with pytest.raises(
        ValueError, match=r"x\.txt: files ending in '\.txt' are not read; give a \.jsonl"
    ):
        values(path)


def test_a_source_of_another_type():
    with pytest.raises(ValueError, match=r"a data source cannot be of type int; give a \.jsonl"):
        values(5)


def test_hub_names_and_other_folders_go_to_the_loader(monkeypatch, tmp_path):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert values("org/name-v1.5", split="train_prefs") == ROWS
    assert values(tmp_path) == ROWS
    assert asked == [("org/name-v1.5", "train_prefs"), (str(tmp_path), "train")]
    assert next(read_rows("name")).label == "name row 0"


def test_a_failure_of_the_hub_names_the_source(monkeypatch):
    def load_dataset(name, split):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        ValueError, match=r"'org/name', split 'train'.*ConnectionError: offline.*\.jsonl"
    ):
        values("org/name")


def test_large_files_are_streamed(tmp_path):
    row = {"prompt": "x" * 1000, "chosen": "a", "rejected": "b"}
    lines = jsonl(tmp_path / "x.jsonl", *[json.dumps(row).encode() + b"\n"] * 20_000)
    table = pa.Table.from_pylist([row] * 20_000)
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=1000)
    for path in (lines, tmp_path / "x.parquet"):
        tracemalloc.start()
        assert sum(1 for _ in read_rows(path)) == 20_000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5e6, path  # the file has 20 MB


def test_errors_keep_their_attributes_when_pickled():
    row = SourceRow(values={}, file="f.jsonl", row=3, line=5)
    error = row.error("chosen", "null", "why").with_lines(["more"])
    error.add_note("a note") if hasattr(error, "add_note") else None
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "f.jsonl row 3 (line 5), column chosen: null: why\nmore"
    assert (copy.file, copy.row, copy.line, copy.column) == ("f.jsonl", 3, 5, "chosen")
    assert (copy.reason, copy.detail, copy.kind) == ("null", "why", "chosen: null")
    assert isinstance(copy, ValueError)
