"""One row of preference data as it was given, and the error that names a row by its place."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["DataError", "SourceRow"]


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
