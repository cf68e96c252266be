"""The plan of one optimizer step: which pairs share a micro-batch.

A plan is a pure function of the pairs' lengths and ``max_tokens``; it draws nothing and knows no
model. Every pair of the step is in exactly one micro-batch and both of its responses are in the
same one. Micro-batches are an execution detail: the step's gradient does not depend on them (a
test).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["MicroBatch", "StepPlan", "plan_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The pairs that one forward and backward execute together."""

    positions: tuple[int, ...]
    """Positions of its pairs within the step, ascending."""
    num_tokens: int
    """Tokens of its pack: prompt + chosen + rejected of each pair, the prompt once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step: its micro-batches in the order of execution."""

    micro_batches: tuple[MicroBatch, ...]
    num_pairs: int
    """Pairs of the step; the loss is their mean, so each weighs 1 / ``num_pairs``."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step executes, all packs together."""
        return sum(micro_batch.num_tokens for micro_batch in self.micro_batches)


def plan_step(pair_tokens: Sequence[int] | NDArray[np.int64], *, max_tokens: int) -> StepPlan:
    """Packs a step's pairs by best-fit decreasing.

    The longest pair first, each into the fullest pack that still has room. Best-fit decreasing
    needs at most 11/9 of the least possible number of packs (Johnson 1974). The largest pack runs
    first, so a step that does not fit in memory fails at its start.

    Args:
        pair_tokens: int [P], tokens of each pair's layout (prompt + chosen + rejected), each ≥ 1.
        max_tokens: the most tokens of one micro-batch.

    Returns:
        The plan; positions refer to ``pair_tokens``.

    Raises:
        ValueError: the step has no pair, or a pair is longer than ``max_tokens``.
    """
    sizes = [int(size) for size in pair_tokens]
    if not sizes:
        raise ValueError("a step needs at least one pair")
    longest = max(sizes)
    if longest > max_tokens:
        raise ValueError(
            f"pair {sizes.index(longest)} of the step has {longest} tokens, max_tokens is "
            f"{max_tokens}: both responses of a pair run in one micro-batch, so raise max_tokens"
        )
    packs: list[list[int]] = []
    room: list[int] = []
    for position in sorted(range(len(sizes)), key=lambda p: (-sizes[p], p)):
        fitting = [k for k in range(len(packs)) if room[k] >= sizes[position]]
        if fitting:
            best = min(fitting, key=lambda k: (room[k], k))
        else:
            packs.append([])
            room.append(max_tokens)
            best = len(packs) - 1
        packs[best].append(position)
        room[best] -= sizes[position]
    micro_batches = [
        MicroBatch(positions=tuple(sorted(pack)), num_tokens=sum(sizes[p] for p in pack))
        for pack in packs
    ]
    micro_batches.sort(key=lambda m: (-m.num_tokens, m.positions))
    return StepPlan(micro_batches=tuple(micro_batches), num_pairs=len(sizes))
