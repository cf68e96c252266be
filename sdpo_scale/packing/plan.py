"""The plan of one optimizer step: which rank executes which pairs, and which share a micro-batch.

A plan is a pure function of the pairs' lengths, ``max_tokens`` and the number of ranks; it draws
nothing and knows no model, so every rank computes the same one without communication. Every pair of
the step is in exactly one micro-batch of one rank and both of its responses are in the same one.
Micro-batches and ranks are an execution detail: the step's gradient does not depend on them (a
test).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["MicroBatch", "RankPlans", "StepPlan", "pair_costs", "plan_ranks", "plan_step"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlans:
    """One optimizer step on all ranks."""

    micro_batches: tuple[tuple[MicroBatch | None, ...], ...]
    """[rank][k]: as many for every rank, since sharded modules need the same collectives from each;
    None where a rank has nothing to do while others do."""
    balance: float
    """Σ_k of the most expensive k-th micro-batch over the mean cost of a rank, ≥ 1: ranks wait for
    each other at every micro-batch."""


def plan_ranks(
    pair_tokens: Sequence[int] | NDArray[np.int64],
    pair_costs: Sequence[float] | NDArray[np.float64],
    *,
    max_tokens: int,
    world_size: int,
) -> RankPlans:
    """Splits a step's pairs over ranks, then each rank's into as many packs as any rank needs.

    Ranks: the most expensive pair first, each to the rank with the least cost so far, which is at
    most 4/3 of the best possible maximum (Graham 1969). Packs: the same within a rank, over the
    number of packs that the fullest rank needs, where ``max_tokens`` allows; else as few as
    possible. The k-th packs of all ranks are then alike, the most expensive first.

    Args:
        pair_tokens: int [P], tokens of each pair's layout, each ≥ 1.
        pair_costs: float [P], what executing a pair costs, in any unit.
        max_tokens: the most tokens of one micro-batch.
        world_size: number of ranks.

    Returns:
        The plans; positions refer to ``pair_tokens``. With one rank, the packs of
        :func:`plan_step`.

    Raises:
        ValueError: the step has no pair, or a pair is longer than ``max_tokens``.
    """
    if world_size == 1:
        plan = plan_step(pair_tokens, max_tokens=max_tokens)
        return RankPlans(micro_batches=(plan.micro_batches,), balance=1.0)
    plan_step(pair_tokens, max_tokens=max_tokens)  # refuses what no rank can run
    tokens, costs = [int(n) for n in pair_tokens], [float(c) for c in pair_costs]
    everything = range(len(tokens))
    shares = _spread(everything, costs, tokens, num_bins=world_size, capacity=sum(tokens))
    assert shares is not None, "the capacity is that of all pairs"
    fewest = [_best_fit(share, tokens, max_tokens) for share in shares]
    num_packs = max(map(len, fewest))
    micro_batches = []
    for share, packs in zip(shares, fewest, strict=True):
        even = _spread(share, costs, tokens, num_bins=num_packs, capacity=max_tokens) or packs
        ordered = sorted(even, key=lambda pack: (-sum(costs[p] for p in pack), sorted(pack)))
        batches = [_micro_batch(pack, tokens) if pack else None for pack in ordered]
        micro_batches.append((*batches, *([None] * (num_packs - len(batches)))))
    waits = sum(
        max(sum(costs[p] for p in m.positions) if m else 0.0 for m in kth)
        for kth in zip(*micro_batches, strict=True)
    )
    return RankPlans(
        micro_batches=tuple(micro_batches), balance=waits * world_size / max(sum(costs), 1e-30)
    )


def pair_costs(
    prompt_lengths_P: NDArray[np.int64], lengths_P2: NDArray[np.int64], hidden_size: int
) -> NDArray[np.float64]:
    """What executing a pair costs, float [P], in tokens of linear work.

    A decoder layer of width D has about 12·D² parameters, so a token costs 24·D² FLOPs forward, and
    4·D for each key that it attends to, which is half of them on average: the attention to k keys
    costs as much as k / (12·D) tokens.
    """
    keys_P2 = prompt_lengths_P[:, None] + lengths_P2
    queries_P2 = np.stack([keys_P2[:, 0], lengths_P2[:, 1]], axis=1)
    attention_P = (queries_P2 * keys_P2).sum(axis=1) / (12 * hidden_size)
    costs_P: NDArray[np.float64] = prompt_lengths_P + lengths_P2.sum(axis=1) + attention_P
    return costs_P


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
    packs = _best_fit(range(len(sizes)), sizes, max_tokens)
    micro_batches = [_micro_batch(pack, sizes) for pack in packs]
    micro_batches.sort(key=lambda m: (-m.num_tokens, m.positions))
    return StepPlan(micro_batches=tuple(micro_batches), num_pairs=len(sizes))


def _micro_batch(pack: Sequence[int], sizes: Sequence[int]) -> MicroBatch:
    return MicroBatch(positions=tuple(sorted(pack)), num_tokens=sum(sizes[p] for p in pack))


def _best_fit(positions: Sequence[int], sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: the longest first, each into the fullest pack that has room."""
    packs: list[list[int]] = []
    room: list[int] = []
    for position in sorted(positions, key=lambda p: (-sizes[p], p)):
        fitting = [k for k in range(len(packs)) if room[k] >= sizes[position]]
        if fitting:
            best = min(fitting, key=lambda k: (room[k], k))
        else:
            packs.append([])
            room.append(max_tokens)
            best = len(packs) - 1
        packs[best].append(position)
        room[best] -= sizes[position]
    return packs


def _spread(
    positions: Sequence[int],
    costs: Sequence[float],
    sizes: Sequence[int],
    *,
    num_bins: int,
    capacity: int,
) -> list[list[int]] | None:
    """The most expensive first, each into the cheapest bin with room; None if one has none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load, room = [0.0] * num_bins, [capacity] * num_bins
    for position in sorted(positions, key=lambda p: (-costs[p], p)):
        fitting = [k for k in range(num_bins) if room[k] >= sizes[position]]
        if not fitting:
            return None
        best = min(fitting, key=lambda k: (load[k], k))
        bins[best].append(position)
        load[best] += costs[position]
        room[best] -= sizes[position]
    return bins
