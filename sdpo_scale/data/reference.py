"""The reference model's per-token log-probabilities on disk, keyed by contents.

Layout under ``<cache_dir>/reference/``:

    <key>/manifest.json          the parts that the key is made of, for the log
    <key>/shard-<digest>.arrow   some pairs: content_hash, chosen_logprobs, rejected_logprobs

The key is a digest of everything but the rows: model parameters, dtype of computation, tokenizer,
template, lengths. Within a key each pair is found by the hash of its token ids, never by its
position, so reordered rows are found again, new rows are appended, and an edited row is scored
anew. A shard's name is the digest of its bytes and it is renamed into place when complete: a killed
run loses at most the shard being written, and a damaged file is noticed when the cache is opened.

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

__all__ = ["NonFiniteError", "ReferenceCache", "ReferenceLogprobs", "ResponseLogprobs"]

logger = logging.getLogger(__name__)

ResponseLogprobs = tuple[NDArray[np.float32], NDArray[np.float32]]
"""float32 [n⁺] and float32 [n⁻]: log-probabilities of the chosen and of the rejected response's
tokens."""

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
        return self._cache.read(self._cache.row(self._content_hashes[index]))


class ReferenceCache:
    """Reference log-probabilities of one key, memory-mapped and appendable."""

    def __init__(self, root: Path, parts: Mapping[str, str]) -> None:
        """Opens or creates the cache of a key and verifies its files.

        Args:
            root: the folder that holds the caches of all keys.
            parts: name → contents digest or value of everything the log-probabilities depend on
                besides a pair's own tokens.
        """
        text = json.dumps(dict(sorted(parts.items())))
        self.key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.folder = root / self.key
        if not self.folder.is_dir():
            _log_changed_parts(root, parts)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_aside(self.folder / "manifest.json", text.encode())
        self._table = _SCHEMA.empty_table()
        self._row_of_hash: dict[bytes, int] = {}
        self._shards: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Adds what has been written since the cache was opened, by other ranks say."""
        for path in sorted(self.folder.glob("shard-*.arrow")):
            if path.name in self._shards:
                continue
            if path.name == _shard_name(path.read_bytes()):
                self._add(path)
            else:
                logger.warning("reference cache: %s is damaged; its pairs are scored anew", path)
                path.unlink(missing_ok=True)

    def __len__(self) -> int:
        """Number of pairs in the cache."""
        return len(self._row_of_hash)

    def row(self, content_hash: bytes) -> int:
        """The row of a pair in this cache, −1 where it is missing."""
        return self._row_of_hash.get(content_hash, -1)

    def read(self, row: int) -> ResponseLogprobs:
        """Log-probabilities of a row, without a copy."""
        assert row >= 0, "the pair has not been scored"
        return (
            self._table["chosen_logprobs"][row].values.to_numpy(),
            self._table["rejected_logprobs"][row].values.to_numpy(),
        )

    def append(self, content_hashes: Sequence[bytes], logprobs: Sequence[ResponseLogprobs]) -> None:
        """Adds pairs as one shard, which is complete on disk when this returns."""
        chosen, rejected = zip(*logprobs, strict=True)
        columns = [list(content_hashes), list(chosen), list(rejected)]
        arrays = [pa.array(c, type=f.type) for c, f in zip(columns, _SCHEMA, strict=True)]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, _SCHEMA) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=_SCHEMA))
        contents = sink.getvalue().to_pybytes()
        path = self.folder / _shard_name(contents)
        _write_aside(path, contents)
        self._add(path)

    def _add(self, path: Path) -> None:
        self._shards.add(path.name)
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        first = len(self._table)
        self._table = pa.concat_tables([self._table, table])
        for offset, content_hash in enumerate(table["content_hash"].to_pylist()):
            self._row_of_hash[content_hash] = first + offset


def _shard_name(contents: bytes) -> str:
    return f"shard-{hashlib.sha256(contents).hexdigest()[:32]}.arrow"


def _write_aside(path: Path, contents: bytes) -> None:
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
