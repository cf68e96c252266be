"""Rows of preference data from the outside world, one at a time, each with its place of origin.

Accepted sources, alone or in a list: JSON Lines (`.jsonl`, `.ndjson`), a JSON array (`.json`),
parquet (`.parquet`), a folder written by `datasets.save_to_disk`, a `datasets.Dataset`, a list of
dictionaries, and the name of a dataset on the Hub. JSON is read by this module and not by
`datasets`, because a schema guessed from the first rows turns answers that look like dates into
timestamps and cannot hold rows of different shape.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

Source: TypeAlias = "str | PathLike[str] | datasets.Dataset | datasets.DatasetDict | list[Any]"

ACCEPTED_KINDS = (
    "a .jsonl, .ndjson, .json or .parquet file, a folder written by datasets.save_to_disk, "
    "a datasets.Dataset, a list of dictionaries, or the name of a dataset on the Hub"
)
_UTF8_BOM = b"\xef\xbb\xbf"
_ROWS_PER_READ = 1024
_FILE_SUFFIX = re.compile(
    r"\.(jsonl?|ndjson|parquet|arrow|feather|csv|tsv|txt|gz|bz2|xz|zst|zip)$", re.I
)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class DataError(ValueError):
    """A row that cannot be used, with its place.

    Attributes:
        file: path, Hub name, or a word in angle brackets for data given in memory.
        row: row number from 0, blank lines not counted; None if the whole file is meant.
        line: physical line from 1, for text files.
        column: the column at fault, if it is one.
        reason: what is wrong, the same words for every row with the same fault.
        detail: what is particular to this row.
        further_lines: lines that follow in the message (other bad rows, a hint).
    """

    def __init__(
        self,
        file: str,
        row: int | None = None,
        *,
        line: int | None = None,
        column: str | None = None,
        reason: str,
        detail: str = "",
        further_lines: tuple[str, ...] = (),
    ) -> None:
        self.file = file
        self.row = row
        self.line = line
        self.column = column
        self.reason = reason
        self.detail = detail
        self.further_lines = further_lines
        super().__init__(str(self))

    def __str__(self) -> str:
        column = "" if self.column is None else f", column {self.column}"
        detail = f": {self.detail}" if self.detail else ""
        first = f"{_place(self.file, self.row, self.line)}{column}: {self.reason}{detail}"
        return "\n".join([first, *self.further_lines])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (self._attributes(),)

    def _attributes(self) -> dict[str, Any]:
        names = ("file", "row", "line", "column", "reason", "detail", "further_lines")
        return {name: getattr(self, name) for name in names}

    @property
    def kind(self) -> str:
        """Column and reason: the key under which bad rows are counted."""
        return self.reason if self.column is None else f"{self.column}: {self.reason}"

    def with_lines(self, lines: Iterable[str]) -> "DataError":
        """The same error with further lines after its message."""
        return _rebuild_error({**self._attributes(), "further_lines": tuple(lines)})


def _rebuild_error(attributes: dict[str, Any]) -> DataError:
    return DataError(attributes.pop("file"), attributes.pop("row"), **attributes)


def _place(file: str, row: int | None, line: int | None) -> str:
    row_text = "" if row is None else f" row {row}"
    line_text = "" if line is None else f" (line {line})"
    return f"{file}{row_text}{line_text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One row as it was given, with its place."""

    values: dict[str, Any]
    """Column name to value."""
    file: str
    """Path, Hub name, or a word in angle brackets for data given in memory."""
    row: int
    """Row number inside the file, from 0."""
    line: int | None = None
    """Physical line from 1, for text files."""

    @property
    def label(self) -> str:
        """The place in words: `train.jsonl row 1 (line 2)`."""
        return _place(self.file, self.row, self.line)

    def error(self, column: str | None, reason: str, detail: str = "") -> DataError:
        """The error that says what is wrong with a column of this row."""
        return DataError(
            self.file, self.row, line=self.line, column=column, reason=reason, detail=detail
        )


def read_rows(source: Source, *, split: str = "train") -> Iterator[SourceRow | DataError]:
    """Yields the rows of a source in order; a row that cannot be read is yielded as a DataError.

    Files are streamed, except `.json`, which is one document.

    Args:
        source: anything `ACCEPTED_KINDS` lists, or a list of such things.
        split: which split of a Hub dataset or a dictionary of datasets; files have none.

    Raises:
        FileNotFoundError: the source is a path and nothing is there.
        ValueError: the source is of no accepted kind, or the Hub did not give it.
    """
    if isinstance(source, datasets.Dataset | datasets.DatasetDict):
        yield from _dataset_rows(source, "<dataset>", split)
    elif isinstance(source, list | tuple):
        if all(_is_source(item) for item in source):
            for item in source:
                yield from read_rows(item, split=split)
        else:
            yield from _checked_rows(source, "<memory>")
    elif isinstance(source, str | PathLike):
        yield from _path_rows(fspath(source), split)
    else:
        raise ValueError(
            f"a data source cannot be of type {type(source).__name__}; give {ACCEPTED_KINDS}"
        )


def _is_source(item: object) -> bool:
    return isinstance(item, str | PathLike | datasets.Dataset | datasets.DatasetDict)


def _path_rows(name: str, split: str) -> Iterator[SourceRow | DataError]:
    path = Path(name).expanduser()
    if path.is_dir():
        if any((path / mark).exists() for mark in ("state.json", "dataset_dict.json")):
            return _dataset_rows(datasets.load_from_disk(str(path)), name, split)
        return _hub_rows(name, split)
    if path.exists():
        readers = {".jsonl": _jsonl_rows, ".ndjson": _jsonl_rows, ".json": _json_rows}
        reader = {**readers, ".parquet": _parquet_rows}.get(path.suffix.lower())
        if reader is None:
            raise ValueError(
                f"{name}: files ending in {path.suffix!r} are not read; give {ACCEPTED_KINDS}"
            )
        return reader(path, name)
    if _FILE_SUFFIX.search(name) or not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise FileNotFoundError(f"{name}: no such file or folder (looked for {path.absolute()})")
    return _hub_rows(name, split)


def _hub_rows(name: str, split: str) -> Iterator[SourceRow | DataError]:
    try:
        dataset = datasets.load_dataset(name, split=split)
    except Exception as error:  # the loaders, the network and the Hub each bring their own classes
        raise ValueError(
            f"{name!r}, split {split!r}, is neither here nor could it be loaded as a dataset "
            f"({type(error).__name__}: {error}); give {ACCEPTED_KINDS}"
        ) from error
    return _dataset_rows(dataset, name, split)


def _jsonl_rows(path: Path, name: str) -> Iterator[SourceRow | DataError]:
    """Rows of a JSON Lines file; a line ends at the byte 0x0A and nowhere else."""
    row = 0
    with path.open("rb") as lines:
        for line, raw in enumerate(lines, start=1):
            content = (raw.removeprefix(_UTF8_BOM) if line == 1 else raw).rstrip(b"\r\n")
            if not content.strip():
                continue
            yield _jsonl_row(content, name, row, line)
            row += 1


def _jsonl_row(content: bytes, name: str, row: int, line: int) -> SourceRow | DataError:
    try:
        values = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        detail = f"byte {content[error.start]:#04x} at position {error.start}"
        return DataError(name, row, line=line, reason="not UTF-8", detail=detail)
    except (ValueError, RecursionError) as error:
        return DataError(name, row, line=line, reason="invalid JSON", detail=str(error))
    return _checked_row(values, name, row, line)


def _json_rows(path: Path, name: str) -> Iterator[SourceRow | DataError]:
    try:
        document = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield DataError(name, reason="not UTF-8", detail=f"byte at position {error.start}")
        return
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # several documents: JSON Lines under the name .json
            yield from _jsonl_rows(path, name)
        else:
            yield DataError(name, line=error.lineno, reason="invalid JSON", detail=str(error))
        return
    rows = document.get("data") if isinstance(document, dict) else document
    if isinstance(rows, list):
        yield from _checked_rows(rows, name)
    else:
        yield DataError(name, reason='neither an array of objects nor {"data": [...]}')


def _checked_rows(rows: Iterable[Any], name: str) -> Iterator[SourceRow | DataError]:
    return (_checked_row(values, name, row, None) for row, values in enumerate(rows))


def _checked_row(values: Any, name: str, row: int, line: int | None) -> SourceRow | DataError:
    if not isinstance(values, dict):
        kind = type(values).__name__
        return DataError(name, row, line=line, reason="not an object", detail=f"of type {kind}")
    return SourceRow(values=values, file=name, row=row, line=line)


def _parquet_rows(path: Path, name: str) -> Iterator[SourceRow | DataError]:
    row = 0
    try:
        with pq.ParquetFile(path) as parquet:
            padded = _padded_columns(parquet.schema_arrow)
            for batch in parquet.iter_batches(batch_size=_ROWS_PER_READ):
                for values in batch.to_pylist():
                    yield SourceRow(values=_without_padding(values, padded), file=name, row=row)
                    row += 1
    except pa.ArrowException as error:
        yield DataError(name, reason="not a readable parquet file", detail=str(error))


def _dataset_rows(
    dataset: datasets.Dataset | datasets.DatasetDict, name: str, split: str
) -> Iterator[SourceRow | DataError]:
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise ValueError(
                f"{name} has no split {split!r}; it has {', '.join(map(str, dataset))}"
            )
        dataset = dataset[split]
    padded = _padded_columns(dataset.features.arrow_schema)
    row = 0
    for columns in dataset.with_format(None).iter(batch_size=_ROWS_PER_READ):
        names = list(columns)
        for record in zip(*columns.values(), strict=True):
            values = _without_padding(dict(zip(names, record, strict=True)), padded)
            yield SourceRow(values=values, file=name, row=row)
            row += 1


def _padded_columns(schema: pa.Schema) -> set[str]:
    """Columns in which Arrow gives every dictionary the union of all keys."""
    return {field.name for field in schema if pa.types.is_nested(field.type)}


def _without_padding(values: dict[str, Any], padded: set[str]) -> dict[str, Any]:
    return {name: _pruned(value) if name in padded else value for name, value in values.items()}


def _pruned(value: Any) -> Any:
    """Drops null keys from dictionaries at any depth; a message keeps its `content: None`."""
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    if isinstance(value, dict):
        keep_content = "role" in value
        return {
            key: _pruned(item)
            for key, item in value.items()
            if item is not None or (keep_content and key == "content")
        }
    return value
