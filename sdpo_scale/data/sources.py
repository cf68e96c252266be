"""Where preference data comes from: files, folders, the Hub or memory, alone or as a mixture.

Accepted are JSON Lines (`.jsonl`, `.ndjson`), a JSON array (`.json`), `.csv`, `.tsv`, `.parquet`, a
folder written by `datasets.save_to_disk`, a `datasets.Dataset`, a list of dictionaries, the name of
a dataset on the Hub, and a list of these, in which an entry may say more:

    train_dataset:
      - path: mine.jsonl
        weight: 2                 # each of its pairs twice in an epoch
      - path: org/name            # on the Hub
        subset: default
        split: train_prefs
        revision: 3d1a0bd
        weight: 0.25              # a quarter of its pairs, another one in each epoch
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

import datasets

from sdpo_scale.data.files import (
    READERS,
    ROWS_PER_READ,
    checked_rows,
    padded_columns,
    without_padding,
)
from sdpo_scale.data.rows import DataError, SourceRow

__all__ = ["DataError", "Part", "Source", "SourceRow", "parts_of", "read_rows"]

Source: TypeAlias = (
    "str | PathLike[str] | datasets.Dataset | datasets.DatasetDict | Mapping[str, Any] | list[Any]"
)
Rows: TypeAlias = Iterator[SourceRow | DataError]

ACCEPTED_KINDS = (
    "a .jsonl, .ndjson, .json, .csv, .tsv or .parquet file, a folder written by "
    "datasets.save_to_disk, a datasets.Dataset, a list of dictionaries, or the name of a dataset "
    "on the Hub"
)
_KEYS = ("path", "split", "subset", "revision", "weight")
_FILE_SUFFIX = re.compile(
    r"\.(jsonl?|ndjson|parquet|arrow|feather|csv|tsv|txt|gz|bz2|xz|zst|zip)$", re.I
)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One source of a mixture."""

    label: str
    """Path, Hub name, or a word in angle brackets for data given in memory."""
    weight: float = 1.0
    """Copies of each of its pairs in an epoch, on average; exactly weight × pairs in all."""
    rows: Callable[[], Rows]
    """Reads it."""


def read_rows(source: Source, *, split: str = "train") -> Rows:
    """Yields the rows of a source in order; a row that cannot be read is yielded as a DataError.

    Files are streamed, except `.json`, which is one document.

    Args:
        source: as in `parts_of`.
        split: as in `parts_of`.

    Raises:
        FileNotFoundError: the source is a path and nothing is there.
        ValueError: the source is of no accepted kind, or the Hub did not give it.
    """
    for part in parts_of(source, split=split):
        yield from part.rows()


def parts_of(source: Source, *, split: str, option: str = "data source") -> list[Part]:
    """The sources that a source consists of, checked as far as that is possible without reading.

    Args:
        source: anything `ACCEPTED_KINDS` lists, or a list of such things and of mappings with
            `path` and any of `split`, `subset`, `revision` and `weight`.
        split: which split of a Hub dataset or a dictionary of datasets, unless an entry says it;
            files have none.
        option: what gave the source, for messages.

    Raises:
        FileNotFoundError: a path where nothing is.
        ValueError: a source of no accepted kind, or a key of an entry that cannot be used.
    """
    if not isinstance(source, list | tuple):
        return [_any_part(source, split, option)]
    if all(isinstance(item, Part) for item in source):
        return list(source)
    if not any(_is_source(item) for item in source):
        return [Part(label="<memory>", rows=lambda: checked_rows(source, "<memory>"))]
    parts = []
    for number, item in enumerate(source):
        place = f"{option}[{number}]"
        if not _is_source(item):
            text = repr(item)[:80]
            raise ValueError(f"{place}: {text} is no source, as other entries are; {_FORMS}")
        parts.append(_any_part(item, split, place))
    return parts


_FORMS = f"give {ACCEPTED_KINDS}, or a mapping with {', '.join(_KEYS)}"


def _any_part(item: Any, split: str, place: str) -> Part:
    is_entry = isinstance(item, Mapping) and not isinstance(item, datasets.DatasetDict)
    return _entry(item, split, place) if is_entry else _part(item, split, place, {})


def _is_source(item: object) -> bool:
    """Whether an item of a list is a source and not a row."""
    if isinstance(item, Mapping) and not isinstance(item, datasets.DatasetDict):
        return not {"chosen", "rejected"} & item.keys() and bool(set(_KEYS) & item.keys())
    return isinstance(item, str | PathLike | datasets.Dataset | datasets.DatasetDict)


def _entry(entry: Mapping[str, Any], split: str, place: str) -> Part:
    """The part that a mapping describes."""
    unknown = sorted(entry.keys() - set(_KEYS))
    if unknown:
        raise ValueError(f"{place}: unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    if "path" not in entry:
        raise ValueError(f"{place}: path is missing; {_FORMS}")
    for key in ("split", "subset", "revision"):
        if key in entry and not isinstance(entry[key], str):
            raise ValueError(f"{place}: {key} {entry[key]!r} is not text")
    weight = entry.get("weight", 1)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 < weight < math.inf:
        raise ValueError(
            f"{place}: weight {weight!r} is not a positive number; it is the number of copies of "
            "each pair in an epoch (to use none, leave the entry out)"
        )
    part = _part(entry["path"], entry.get("split", split), place, entry)
    return Part(label=part.label, weight=float(weight), rows=part.rows)


def _part(source: Any, split: str, place: str, entry: Mapping[str, Any]) -> Part:
    """A part of weight 1; `entry` holds the keys that the user gave."""
    if isinstance(source, datasets.Dataset | datasets.DatasetDict):
        _refuse_keys(entry, ("subset", "revision"), place, "a dataset in memory")
        if isinstance(source, datasets.Dataset):
            _refuse_keys(entry, ("split",), place, "a datasets.Dataset")
        else:
            _check_split(source, "<dataset>", split)
        return Part(label="<dataset>", rows=lambda: _dataset_rows(source, "<dataset>", split))
    if not isinstance(source, str | PathLike):
        raise ValueError(
            f"{place}: a data source cannot be of type {type(source).__name__}; {_FORMS}"
        )
    name = fspath(source)
    path = Path(name).expanduser()
    if path.is_file():
        reader = READERS.get(path.suffix.lower())
        if reader is None:
            raise ValueError(
                f"{name}: files ending in {path.suffix!r} are not read; give {ACCEPTED_KINDS}"
            )
        _refuse_keys(entry, ("split", "subset", "revision"), place, f"the file {name}")
        return Part(label=name, rows=lambda: reader(path, name))
    if any((path / mark).exists() for mark in ("state.json", "dataset_dict.json")):
        _refuse_keys(entry, ("subset", "revision"), place, f"the folder {name}")
        return Part(label=name, rows=lambda: _saved_rows(path, name, split))
    is_no_hub_name = not _HUB_NAME.fullmatch(name) or name.startswith(".")
    if not path.is_dir() and (_FILE_SUFFIX.search(name) or is_no_hub_name):
        raise FileNotFoundError(f"{name}: no such file or folder (looked for {path.absolute()})")
    options = {"name": entry.get("subset"), "revision": entry.get("revision")}
    given = {key: value for key, value in options.items() if value is not None}
    return Part(label=name, rows=lambda: _hub_rows(name, split, given))


def _refuse_keys(entry: Mapping[str, Any], keys: Iterable[str], place: str, what: str) -> None:
    for key in keys:
        if key in entry:
            raise ValueError(f"{place}: {key} {entry[key]!r} has no effect on {what}; drop it")


def _hub_rows(name: str, split: str, options: dict[str, str]) -> Rows:
    try:
        dataset = datasets.load_dataset(name, split=split, **options)
    except Exception as error:  # the loaders, the network and the Hub each bring their own classes
        given = "".join(f", {key} {value!r}" for key, value in options.items())
        raise ValueError(
            f"{name!r}, split {split!r}{given}, is neither here nor could it be loaded as a "
            f"dataset ({type(error).__name__}: {error}); give {ACCEPTED_KINDS}"
        ) from error
    return _dataset_rows(dataset, name, split)


def _saved_rows(path: Path, name: str, split: str) -> Rows:
    return _dataset_rows(datasets.load_from_disk(str(path)), name, split)


def _check_split(dataset: datasets.DatasetDict, name: str, split: str) -> None:
    if split not in dataset:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(map(str, dataset))}")


def _dataset_rows(dataset: datasets.Dataset | datasets.DatasetDict, name: str, split: str) -> Rows:
    if isinstance(dataset, datasets.DatasetDict):
        _check_split(dataset, name, split)
        dataset = dataset[split]
    padded = padded_columns(dataset.features.arrow_schema)
    row = 0
    for columns in dataset.with_format(None).iter(batch_size=ROWS_PER_READ):
        names = list(columns)
        for record in zip(*columns.values(), strict=True):
            values = without_padding(dict(zip(names, record, strict=True)), padded)
            yield SourceRow(values=values, file=name, row=row)
            row += 1
