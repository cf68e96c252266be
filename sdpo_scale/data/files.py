"""Rows of one file, streamed except where the file is one document.

JSON and CSV are read by this module and not by `datasets`, because a schema guessed from the first
rows turns answers that look like dates into timestamps and cannot hold rows of different shape.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sdpo_scale.data.rows import DataError, SourceRow

__all__ = ["READERS", "checked_rows", "padded_columns", "without_padding"]

ROWS_PER_READ = 1024
_UTF8_BOM = b"\xef\xbb\xbf"
_TEXTS_OR_MESSAGES = ("prompt", "chosen", "rejected")


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
        yield from checked_rows(rows, name)
    else:
        yield DataError(name, reason='neither an array of objects nor {"data": [...]}')


def checked_rows(rows: Iterable[Any], name: str) -> Iterator[SourceRow | DataError]:
    """Rows given as objects."""
    return (_checked_row(values, name, row, None) for row, values in enumerate(rows))


def _checked_row(values: Any, name: str, row: int, line: int | None) -> SourceRow | DataError:
    if not isinstance(values, dict):
        kind = type(values).__name__
        return DataError(name, row, line=line, reason="not an object", detail=f"of type {kind}")
    return SourceRow(values=values, file=name, row=row, line=line)


def _csv_rows(path: Path, name: str) -> Iterator[SourceRow | DataError]:
    """Rows of a CSV file with a header; `.tsv` is separated by tabs.

    An empty cell is a missing value. A cell of `prompt`, `chosen` or `rejected` that is a JSON list
    of messages is a conversation, as such a file has no other way to hold one.

    Raises:
        DataError: the header repeats a name, or a quote is wrong: rows after it cannot be told
            apart.
    """
    csv.field_size_limit(sys.maxsize)  # of the process; the limit of 128 KiB is no use to anybody
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    # bytes that are not UTF-8 become lone surrogates, so that their row can be named
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        row, line = 0, 1
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                place = None if header is None else row
                raise DataError(
                    name, place, line=line, reason="invalid CSV", detail=str(error)
                ) from None
            if cells is None:
                return
            if header is None:
                header = _csv_header(cells, name)
            elif cells:
                yield _csv_row(cells, header, name, row, line)
                row += 1
            line = reader.line_num + 1


def _csv_header(cells: list[str], name: str) -> list[str]:
    repeated = sorted({cell for cell in cells if cells.count(cell) > 1})
    if repeated:
        raise DataError(name, line=1, column=repeated[0], reason="more than once in the header")
    return cells


def _csv_row(
    cells: list[str], header: list[str], name: str, row: int, line: int
) -> SourceRow | DataError:
    if len(cells) != len(header):
        detail = f"{len(cells)}, the header has {len(header)}"
        return DataError(name, row, line=line, reason="another number of cells", detail=detail)
    try:
        "".join(cells).encode("utf-8")
    except UnicodeEncodeError as error:
        column = header[
            next(i for i, cell in enumerate(cells) if error.object[error.start] in cell)
        ]
        return DataError(name, row, line=line, column=column, reason="not UTF-8")
    values = {column: _cell(column, cell) for column, cell in zip(header, cells, strict=True)}
    return SourceRow(values=values, file=name, row=row, line=line)


def _cell(column: str, cell: str) -> Any:
    if column in _TEXTS_OR_MESSAGES and cell.lstrip().startswith("["):
        try:
            turns = json.loads(cell)
        except (ValueError, RecursionError):
            return cell
        if turns and all(isinstance(turn, dict) and "role" in turn for turn in turns):
            return turns
    return cell or None


def _parquet_rows(path: Path, name: str) -> Iterator[SourceRow | DataError]:
    row = 0
    try:
        with pq.ParquetFile(path) as parquet:
            padded = padded_columns(parquet.schema_arrow)
            for batch in parquet.iter_batches(batch_size=ROWS_PER_READ):
                for values in batch.to_pylist():
                    yield SourceRow(values=without_padding(values, padded), file=name, row=row)
                    row += 1
    except pa.ArrowException as error:
        yield DataError(name, reason="not a readable parquet file", detail=str(error))


def padded_columns(schema: pa.Schema) -> set[str]:
    """Columns in which Arrow gives every dictionary the union of all keys."""
    return {field.name for field in schema if pa.types.is_nested(field.type)}


def without_padding(values: dict[str, Any], padded: set[str]) -> dict[str, Any]:
    """A row without the null keys that Arrow has added."""
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


READERS = {
    ".jsonl": _jsonl_rows,
    ".ndjson": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}
"""End of a file's name → (path, name for messages) → its rows; one that cannot be read is yielded
as a DataError."""
