"""The reference model's per-token log-probabilities on disk, keyed by contents.

Layout under ``<cache_dir>/reference/``:

    <key>/manifest.json          the parts that the key is made of, for the log
    <key>/shard-<digest>.arrow   some pairs: content_hash, chosen_logprobs, rejected_logprobs

The key is a digest of everything but the rows: model parameters, dtype of computation, tokenizer,
template, lengths. Within a key each pair is found by the hash of its token ids, never by its
position, so reordered rows are found again, new rows are appended, and an edited row is scored
anew. A shard's name is the digest of its bytes and it is renamed into place when complete: a killed
run loses at most the shard being written, and a damaged file is noticed when the cache is opened.
Shards are never merged or deleted: other runs, on other machines as well, may be reading them.

Per pair 24 bytes are held in memory. Files are mapped when they are read, and let go together when
there are many of them or as much of them was read as ``MOST_TOUCHED_BYTES``.

Per token, not per response: prefix truncation needs the partial sums.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sdpo_scale.data.pairs import MOST_TOUCHED_BYTES, list_arrays

__all__ = ["NonFiniteError", "ReferenceCache", "ReferenceLogprobs", "ResponseLogprobs"]

logger = logging.getLogger(__name__)

ResponseLogprobs = tuple[NDArray[np.float32], NDArray[np.float32]]
"""float32 [n⁺] and float32 [n⁻]: log-probabilities of the chosen and of the rejected response's
tokens."""

_PAGE_BYTES = 4096
_MOST_MAPPED_FILES = 64
_SCHEMA = pa.schema(
    [
        ("content_hash", pa.binary(16)),
        ("chosen_logprobs", pa.list_(pa.float32())),
        ("rejected_logprobs", pa.list_(pa.float32())),
    ]
)


class NonFiniteError(RuntimeError):
    """A loss or log-probability is NaN or infinite.

    Attributes:
        what: what was not finite.
        pair_ids: the pairs concerned, as row numbers of the data set.
    """

    def __init__(self, what: str, pair_ids: Sequence[int]) -> None:
        """Names what is not finite and the rows concerned."""
        self.what = what
        self.pair_ids = tuple(int(pair_id) for pair_id in pair_ids)
        super().__init__(what, self.pair_ids)

    def __str__(self) -> str:
        """The message, with at most ten of the rows."""
        rows = ", ".join(str(pair_id) for pair_id in self.pair_ids[:10])
        more = f" and {len(self.pair_ids) - 10} more" if len(self.pair_ids) > 10 else ""
        return f"{self.what} is not finite for the pairs of rows {rows}{more}"


class ReferenceLogprobs:
    """The reference log-probabilities of a data set's pairs, in the order of the data set."""

    def __init__(self, cache: "ReferenceCache", content_hashes: Sequence[bytes]) -> None:
        """Binds a cache, which may be filled later than this is made."""
        self._cache = cache
        self._content_hashes = content_hashes

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self._content_hashes)

    def __getitem__(self, index: int) -> ResponseLogprobs:
        """Log-probabilities of the pair at ``index`` of the data set."""
        return self._cache.read(self._content_hashes[index])


class ReferenceCache:
    """Reference log-probabilities of one key, memory-mapped and appendable."""

    def __init__(self, root: Path, parts: Mapping[str, str]) -> None:
        """Opens or creates the cache of a key and verifies its files.

        Args:
            root: the folder that holds the caches of all keys.
            parts: name → contents digest or value of everything the log-probabilities depend on
                besides a pair's own tokens.
        """
        self._origin = root, parts
        text = json.dumps(dict(sorted(parts.items())))
        self.key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.folder = root / self.key
        if not self.folder.is_dir():
            _log_changed_parts(root, parts)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_aside(self.folder / "manifest.json", text.encode())
        self._hashes: NDArray[np.bytes_] = np.empty(0, "S16")  # sorted
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)  # of each of them
        self._paths: list[Path] = []
        self._starts = [0]  # row numbers at which the files start
        self._mapped: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._touched_bytes = 0
        self.refresh()

    def __reduce__(self) -> tuple[type["ReferenceCache"], tuple[Path, Mapping[str, str]]]:
        """Pickles as its place."""
        return ReferenceCache, self._origin

    def refresh(self) -> None:
        """Adds what has been written since the cache was opened, by other ranks or runs."""
        known, whole = set(self._paths), []
        for path in sorted(self.folder.glob("shard-*.arrow")):
            if path in known:
                continue
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if path.name == _shard_name(digest):
                whole.append(path)
            else:
                logger.warning("reference cache: %s is damaged; its pairs are scored anew", path)
                path.unlink(missing_ok=True)
        self._add(whole)

    def __len__(self) -> int:
        """Number of pairs in the cache."""
        return len(self._hashes)

    def rows(self, content_hashes: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """The rows of pairs in this cache, −1 where one is missing."""
        places = np.searchsorted(self._hashes, content_hashes)
        is_known = places < len(self._hashes)
        is_known[is_known] = self._hashes[places[is_known]] == content_hashes[is_known]
        rows = np.full(len(content_hashes), -1)
        rows[is_known] = self._rows[places[is_known]]
        return rows

    def read(self, content_hash: bytes) -> ResponseLogprobs:
        """Log-probabilities of a pair, without a copy."""
        row = int(self.rows(np.frombuffer(content_hash, "S16"))[0])
        assert row >= 0, "the pair has not been scored"
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        is_full = number not in self._mapped and len(self._mapped) == _MOST_MAPPED_FILES
        if is_full or self._touched_bytes > MOST_TOUCHED_BYTES:
            self._mapped.clear()
            self._touched_bytes = 0
        if number not in self._mapped:
            _, *sides = _read_shard(self._paths[number]).columns
            self._mapped[number] = [list_arrays(side) for side in sides]
        row -= self._starts[number]
        chosen, rejected = (v[at[row] : at[row + 1]] for at, v in self._mapped[number])
        self._touched_bytes += _PAGE_BYTES + chosen.nbytes + rejected.nbytes
        return chosen, rejected

    def append(self, content_hashes: Sequence[bytes], logprobs: Sequence[ResponseLogprobs]) -> None:
        """Adds pairs as one shard, which is complete on disk when this returns."""
        chosen, rejected = zip(*logprobs, strict=True)
        columns = [list(content_hashes), list(chosen), list(rejected)]
        arrays = [pa.array(c, type=f.type) for c, f in zip(columns, _SCHEMA, strict=True)]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, _SCHEMA) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=_SCHEMA))
        contents = sink.getvalue()
        path = self.folder / _shard_name(hashlib.sha256(contents).hexdigest())
        _write_aside(path, contents)
        self._add([path])

    def _add(self, paths: Sequence[Path]) -> None:
        hashes, rows = [self._hashes], [self._rows]
        for path in paths:
            column = _read_shard(path)["content_hash"]
            hashes.append(np.frombuffer(column.buffers()[1].to_pybytes(), "S16"))
            rows.append(self._starts[-1] + np.arange(len(column)))
            self._starts.append(self._starts[-1] + len(column))
            self._paths.append(path)
        self._hashes, firsts = np.unique(np.concatenate(hashes), return_index=True)
        self._rows = np.concatenate(rows)[firsts]


def _read_shard(path: Path) -> pa.RecordBatch:
    """Mapped: nothing is read but the schema, and the file is held while arrays are in use."""
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_next_batch()


def _shard_name(digest: str) -> str:
    return f"shard-{digest[:32]}.arrow"


def _write_aside(path: Path, contents: bytes | pa.Buffer) -> None:
    """Writes beside the path and renames: the file is complete or absent."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def _log_changed_parts(root: Path, parts: Mapping[str, str]) -> None:
    """Says which parts of the key differ from the most similar cache there is."""
    changed_parts = []
    for manifest in root.glob("*/manifest.json"):
        other = json.loads(manifest.read_text("utf-8"))
        changed_parts.append(sorted(k for k in {*parts, *other} if parts.get(k) != other.get(k)))
    if changed_parts:
        changed = min(changed_parts, key=len)
        logger.info("reference cache: built anew, changed: %s", ", ".join(changed))
