"""Tokenized pairs on disk: an Arrow stream of record batches, written once, then memory-mapped.

| column | type |
|---|---|
| `pair_id` | int64 |
| `prompt_ids`, `chosen_ids`, `rejected_ids` | list of int32 |
| `content_hash` | 16 bytes: BLAKE2b over the three id arrays and their lengths |
"""

import hashlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from sdpo_scale.data.tokenization import TokenizedRow

_ROWS_PER_BATCH = 1000
_ID_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
_SCHEMA = pa.schema(
    [
        ("pair_id", pa.int64()),
        *((name, pa.list_(pa.int32())) for name in _ID_COLUMNS),
        ("content_hash", pa.binary(16)),
    ],
    metadata={"format": "sdpo_scale tokenized pairs, version 1"},
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One tokenized pair."""

    pair_id: int
    """Number of the row over all sources, bad rows counted."""
    prompt_ids: np.ndarray
    """int32."""
    chosen_ids: np.ndarray
    """int32."""
    rejected_ids: np.ndarray
    """int32."""
    content_hash: bytes
    """16 bytes that depend on the three id arrays only."""

    @property
    def tokens(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The three id arrays: prompt, chosen, rejected."""
        return self.prompt_ids, self.chosen_ids, self.rejected_ids


class PairDataset:
    """Tokenized pairs read from a memory-mapped file; pickles as its path.

    Attributes:
        path: the file.
        lengths: int64 [N, 3], tokens of prompt, chosen and rejected.
        pair_ids: int64 [N].
        content_hashes: N times 16 bytes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with pa.memory_map(str(self.path)) as source, pa.ipc.open_stream(source) as stream:
            batches = list(stream)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self._ids = [
            [_list_arrays(batch.column(name)) for name in _ID_COLUMNS] for batch in batches
        ]
        sizes = [
            np.stack([np.diff(offsets) for offsets, _ in columns], axis=1) for columns in self._ids
        ]
        self.lengths = np.concatenate(sizes).astype(np.int64)
        self.pair_ids = np.concatenate([batch.column("pair_id").to_numpy() for batch in batches])
        hashes = (batch.column("content_hash").to_pylist() for batch in batches)
        self.content_hashes: list[bytes] = [value for part in hashes for value in part]

    def __reduce__(self) -> tuple[type["PairDataset"], tuple[Path]]:
        return PairDataset, (self.path,)

    def __len__(self) -> int:
        return len(self.pair_ids)

    def __getitem__(self, index: int) -> Pair:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        index %= len(self)
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - int(self._starts[batch])
        # views of the map: the ids are read from disk by whoever lays the pair out, so each rank of
        # a step reads only its own
        prompt, chosen, rejected = (
            values[offsets[row] : offsets[row + 1]] for offsets, values in self._ids[batch]
        )
        pair_id, content_hash = int(self.pair_ids[index]), self.content_hashes[index]
        return Pair(pair_id, prompt, chosen, rejected, content_hash)


def _list_arrays(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    return column.offsets.to_numpy(), column.values.to_numpy()


class PairWriter:
    """Writes pairs to a temporary file and gives it its final name when everything is on disk."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._temporary = folder / f".tokens-{os.getpid()}-{uuid.uuid4().hex}.tmp"
        self._digest = hashlib.sha256()
        self._pairs: list[tuple[int, TokenizedRow]] = []

    def __enter__(self) -> "PairWriter":
        self._file = self._temporary.open("wb")
        self._stream = pa.ipc.new_stream(self._file, _SCHEMA)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, pair_id: int, pair: TokenizedRow) -> None:
        """Adds one pair."""
        self._pairs.append((pair_id, pair))
        if len(self._pairs) == _ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        if not self._pairs:
            return
        pair_ids = np.array([pair_id for pair_id, _ in self._pairs], np.int64)
        pairs = [pair for _, pair in self._pairs]
        sides = [
            [np.array(side, np.int32) for side in (p.prompt, p.chosen, p.rejected)] for p in pairs
        ]
        hashes = [_content_hash(arrays) for arrays in sides]
        columns = [_list_column(arrays) for arrays in zip(*sides, strict=True)]
        columns = [pa.array(pair_ids), *columns, pa.array(hashes, pa.binary(16))]
        self._stream.write_batch(pa.record_batch(columns, schema=_SCHEMA))
        for part in (pair_ids.tobytes(), *hashes):
            self._digest.update(part)
        self._pairs.clear()

    def commit(self) -> Path:
        """Finishes the file: afterwards it is complete under the name of its contents."""
        self._flush()
        self._stream.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        path = self._folder / f"tokens-{self._digest.hexdigest()[:16]}.arrow"
        os.replace(self._temporary, path)
        return path


def _list_column(arrays: tuple[np.ndarray, ...]) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, arrays)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)))


def _content_hash(arrays: list[np.ndarray]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for ids in arrays:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.astype("<i4").tobytes())
    return digest.digest()
