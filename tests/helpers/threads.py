"""Ranks as threads of one process: enough for a step, and for scoring the reference."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sdpo_scale.record import Ranks


def run_ranks(world_size: int, function: Callable[[Ranks], Any]) -> list[Any]:
    """The results of a function on every rank; a rank that waits alone fails after 60 seconds."""
    barrier = threading.Barrier(world_size, timeout=60)
    parts: list[Any] = [None] * world_size

    def run(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            parts[rank] = value
            barrier.wait()
            everything = list(parts)
            barrier.wait()
            return everything

        ranks = Ranks(
            rank=rank,
            world_size=world_size,
            sum=lambda tensor: torch.stack(gather(tensor)).sum(dim=0),
            gather=gather,
            wait=lambda _what: gather(None) and None,
        )
        try:
            return function(ranks)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
