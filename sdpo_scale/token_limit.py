"""What a run does when a micro-batch does not fit into memory: the same step in smaller ones.

A step is a pure function of parameters, pairs and draw, and ``max_tokens`` is an execution detail,
so one process repeats the step with half of it, and the run's numbers do not change. Several ranks
cannot: one of them has left the collectives that the others wait in. There the smaller limit is
written into the output folder, the job ends, and its restart (``--max-restarts``, a requeued job)
reads it.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["TokenLimit", "write_json"]

logger = logging.getLogger(__name__)


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    """Replaces a file, which is complete or absent at any time; any rank may be the one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(contents, indent=1) + "\n", "utf-8")
    aside.replace(path)


class TokenLimit:
    """``max_tokens`` as it is now."""

    NAME = "max_tokens.json"

    def __init__(self, folder: Path, *, configured: int, longest: int, world_size: int) -> None:
        """Takes the configured limit, or the smaller one that an earlier start has found.

        Args:
            folder: the run's output folder.
            configured: the option ``max_tokens``.
            longest: tokens of the longest pair, which has to fit into one micro-batch.
            world_size: number of ranks.
        """
        self._path, self._longest, self._world_size = folder / self.NAME, longest, world_size
        self.max_tokens = configured
        if self._path.is_file():
            found = json.loads(self._path.read_text("utf-8"))
            if found["configured"] == configured and found["max_tokens"] >= longest:
                self.max_tokens = found["max_tokens"]
                logger.warning(
                    "max_tokens is %d, not %d: an earlier start ran out of memory; delete %s to "
                    "try again",
                    self.max_tokens,
                    configured,
                    self._path,
                )
        self._configured = configured

    def lower(self, error: Exception, *, step: int) -> None:
        """Halves the limit, to repeat a step with it.

        Args:
            error: why it failed.
            step: its number.

        Raises:
            MemoryError: no smaller limit holds the longest pair, or ranks cannot repeat a step.
        """
        smaller = max(self._longest, self.max_tokens // 2)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        where = f"step {step} ran out of memory with micro-batches of {self.max_tokens} tokens"
        if smaller >= self.max_tokens:
            raise MemoryError(
                f"{where}, and the longest pair has {self._longest}: lower max_length, or shard "
                f"the model over more ranks ({reason})"
            ) from error
        write_json(self._path, {"max_tokens": smaller, "configured": self._configured})
        if self._world_size > 1:
            raise MemoryError(
                f"{where} ({reason}); {self._path} makes the next start take {smaller}, which "
                "changes no result: resume_from_checkpoint: auto goes on from the last checkpoint"
            ) from error
        logger.warning("%s (%s): repeated with %d, which changes no result", where, reason, smaller)
        self.max_tokens = smaller
