"""Tokenized pairs on disk: an Arrow stream of record batches, written once, then memory-mapped.

| column | type |
|---|---|
| `pair_id` | int64 |
| `prompt_ids`, `chosen_ids`, `rejected_ids` | list of int32 |
| `content_hash` | 16 bytes: BLAKE2b over the three id arrays and their lengths |
| `source` | int32: which source of a mixture the pair is from |

The weights of the sources stand in the schema's metadata. Per pair about 50 bytes are held in
memory, whatever its length, and at most `MOST_TOUCHED_BYTES` of the file stay mapped.
"""

import hashlib
import json
import mmap
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from sdpo_scale.data.tokenization import TokenizedRow

_ROWS_PER_BATCH = 1000
MOST_TOUCHED_BYTES = 8 << 20
_ID_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
_SCHEMA = pa.schema(
    [
        ("pair_id", pa.int64()),
        *((name, pa.list_(pa.int32())) for name in _ID_COLUMNS),
        ("content_hash", pa.binary(16)),
        ("source", pa.int32()),
    ],
    metadata={"format": "sdpo_scale tokenized pairs, version 2"},
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


class ContentHashes(Sequence[bytes]):
    """16 bytes for each pair, without an object for each of them."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        """16-byte strings [N]."""

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        start = range(len(self))[index]
        return self.array[start : start + 1].tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContentHashes) and np.array_equal(self.array, other.array)

    __hash__ = None  # type: ignore[assignment]


class PairDataset:
    """Tokenized pairs read from a memory-mapped file; pickles as its path.

    Attributes:
        path: the file.
        lengths: int64 [N, 3], tokens of prompt, chosen and rejected.
        pair_ids: int64 [N].
        content_hashes: N times 16 bytes.
        sources: int32 [N], which source of a mixture each is from.
        weights: of each source, its pairs' copies in an epoch.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._touched_bytes = 0
        self._starts = [0]
        self._ids: list[list[tuple[np.ndarray, np.ndarray]]] = []
        with pa.ipc.open_stream(pa.py_buffer(self._map)) as stream:
            self.weights: tuple[float, ...] = tuple(json.loads(stream.schema.metadata[b"weights"]))
            batches = list(stream)  # nothing is read yet
        num_pairs = sum(batch.num_rows for batch in batches)
        self.lengths = np.empty((num_pairs, 3), np.int64)
        self.pair_ids = np.empty(num_pairs, np.int64)
        self.content_hashes = ContentHashes(np.empty(num_pairs, "S16"))
        self.sources = np.empty(num_pairs, np.int32)
        for batch in batches:
            columns = [list_arrays(batch.column(name)) for name in _ID_COLUMNS]
            rows = slice(self._starts[-1], self._starts[-1] + batch.num_rows)
            self._ids.append(columns)
            self._starts.append(rows.stop)
            self.lengths[rows] = np.stack([np.diff(offsets) for offsets, _ in columns], axis=1)
            self.pair_ids[rows] = batch.column("pair_id").to_numpy()
            hashes = batch.column("content_hash").buffers()[1]
            self.content_hashes.array[rows] = np.frombuffer(hashes, "S16", batch.num_rows)
            self.sources[rows] = batch.column("source").to_numpy()
            self._release()

    def _release(self) -> None:
        """Hands the file's pages back to the system; they are read again where they are needed.

        Otherwise all of the file would count as this process's memory once it was read.
        """
        self._touched_bytes = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

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
        self._touched_bytes += mmap.PAGESIZE + prompt.nbytes + chosen.nbytes + rejected.nbytes
        if self._touched_bytes > MOST_TOUCHED_BYTES:
            self._release()
        pair_id, content_hash = int(self.pair_ids[index]), self.content_hashes[index]
        return Pair(pair_id, prompt, chosen, rejected, content_hash)


def list_arrays(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and values, without a copy."""
    return column.offsets.to_numpy(), column.values.to_numpy()


class PairWriter:
    """Writes pairs to a temporary file and gives it its final name when everything is on disk."""

    def __init__(self, folder: Path, *, weights: Sequence[float] = (1.0,)) -> None:
        """Takes the folder, and the weights of the sources that the pairs are from."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._temporary = folder / f".tokens-{os.getpid()}-{uuid.uuid4().hex}.tmp"
        text = json.dumps([float(weight) for weight in weights])
        self._schema = _SCHEMA.with_metadata({**_SCHEMA.metadata, b"weights": text.encode()})
        self._digest = hashlib.sha256(text.encode())
        self._pairs: list[tuple[int, int, TokenizedRow]] = []

    def __enter__(self) -> "PairWriter":
        self._file = self._temporary.open("wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, pair_id: int, pair: TokenizedRow, *, source: int = 0) -> None:
        """Adds one pair."""
        self._pairs.append((pair_id, source, pair))
        if len(self._pairs) == _ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        if not self._pairs:
            return
        pair_ids = np.array([pair_id for pair_id, _, _ in self._pairs], np.int64)
        sources = np.array([source for _, source, _ in self._pairs], np.int32)
        pairs = [pair for _, _, pair in self._pairs]
        sides = [
            [np.array(side, np.int32) for side in (p.prompt, p.chosen, p.rejected)] for p in pairs
        ]
        hashes = [_content_hash(arrays) for arrays in sides]
        columns = [_list_column(arrays) for arrays in zip(*sides, strict=True)]
        last = [pa.array(hashes, pa.binary(16)), pa.array(sources)]
        columns = [pa.array(pair_ids), *columns, *last]
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        for part in (pair_ids.tobytes(), sources.tobytes(), *hashes):
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
