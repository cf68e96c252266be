"""Ranks as threads of one process: enough for a step, whose only communication is a sum."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sdpo_scale.record import Ranks


def run_ranks(world_size: int, function: Callable[[Ranks], Any]) -> list[Any]:
    """The results of a function on every rank; a rank that waits alone fails after 60 seconds."""
    barrier = threading.Barrier(world_size, timeout=60)
    parts: list[torch.Tensor | None] = [None] * world_size

    def run(rank: int) -> Any:
        def total(tensor: torch.Tensor) -> torch.Tensor:
            parts[rank] = tensor
            barrier.wait()
            result = torch.stack([part for part in parts if part is not None]).sum(dim=0)
            barrier.wait()
            return result

        try:
            return function(Ranks(rank=rank, world_size=world_size, sum=total))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
