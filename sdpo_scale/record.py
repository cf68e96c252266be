"""What the packs of a step add up to, on one rank and over all.

Shape legend: P pairs of the step (executed or not), B branches per pair.

Every rank fills in what it executed, in arrays over all pairs of the step; one sum over ranks and
one transfer to the host bring metrics, counts, non-finite pairs and what later draws may know to
every rank alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdpo_scale.data.reference import NonFiniteError
from sdpo_scale.draws import Observations
from sdpo_scale.estimator.branches import effective_sample_size
from sdpo_scale.metrics import PAIR_COLUMNS, MetricSums, StepCounts, sum_metrics, token_sums
from sdpo_scale.packing.layout import PackLayout
from sdpo_scale.weighting import BackwardDraw, Executed

__all__ = ["Ranks", "StepRecord", "StepResult"]

_COUNTED = (
    *("executed_tokens", "forward_tokens", "backward_tokens", "recomputed_tokens"),
    *("forward_positions", "backward_positions"),
)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _alone(value: Any) -> list[Any]:
    return [value]


def _pass(_what: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that share a step."""

    rank: int = 0
    world_size: int = 1
    sum: Callable[[Tensor], Tensor] = _unchanged
    """The sum of a tensor over all ranks, on every rank; the only communication of a step besides
    its gradients."""
    gather: Callable[[Any], list[Any]] = _alone
    """What each rank gives, in the order of ranks, on every rank."""
    wait: Callable[[str], None] = _pass
    """Returns when every rank has come here; takes what is being waited for, for messages."""
    is_first_of_node: bool = True
    """Whether this rank is the one of its node that writes what nodes keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step reports, the same on every rank."""

    metrics: MetricSums
    counts: StepCounts
    num_micro_batches: int
    """Of each rank, both passes."""
    observations: Observations | None
    """What later steps' draws may know of this one; None without a draw."""


class StepRecord:
    """Accumulates what the packs of a step report."""

    def __init__(self, executed: Executed, *, by_response: bool, has_draw: bool) -> None:
        """Takes the step's pairs and what a branch is."""
        num_pairs = len(executed.pair_ids)
        branches = (num_pairs, 2 if by_response else 1)
        self.counts = StepCounts()
        self.num_micro_batches = 0
        self._executed = executed
        self._has_draw = has_draw
        self._rows: list[Tensor] = []
        self._positions: list[int] = []
        self._token_sums: list[Tensor] = []
        self._draw_sums: list[Tensor] = []
        self._pairs_P2 = np.zeros((num_pairs, 2))  # importance, whether it was scored
        self._branches_3PB = np.zeros((3, *branches))  # importance, cost, weight

    def scored(
        self,
        positions: Sequence[int],
        rows_P7: Tensor,
        statistics_R3: Tensor | None,
        layout: PackLayout,
    ) -> None:
        """Adds a scored pack: its pairs' rows of ``PAIR_COLUMNS`` and token statistics."""
        self._positions += positions
        self._rows.append(rows_P7)
        self.counts.executed_tokens += layout.num_tokens
        if statistics_R3 is not None:
            is_chosen_R = layout.is_chosen_R.to(statistics_R3.device, non_blocking=True)
            self._token_sums.append(token_sums(statistics_R3, is_chosen_R))

    def drawn(
        self, positions: Sequence[int], executed: Executed, draw: BackwardDraw, draw_sums_4: Tensor
    ) -> None:
        """Adds what was drawn for the backward of some pairs, by one rank only."""
        index = list(positions)
        self._draw_sums.append(draw_sums_4)
        self._pairs_P2[index, 0] = draw.importance_P / executed.pair_weights_P
        self._pairs_P2[index, 1] = 1
        branches = (draw.branch_importance_N, draw.branch_cost_N, draw.ht_weights_N)
        for k, values_N in enumerate(branches):
            self._branches_3PB[k, index] = values_N.reshape(len(index), -1)
        self._branches_3PB[2, index] *= executed.pair_weights_P[:, None]

    def trained(
        self, prompts_P: NDArray[np.int64], lengths_P2: NDArray[np.int64], *, recomputes: bool
    ) -> None:
        """Counts a backward over the given response prefixes; (0, 0) was dropped."""
        kept_P = lengths_P2.sum(axis=1)
        tokens = int(kept_P.sum() + prompts_P[kept_P > 0].sum())
        self.counts.backward_tokens += tokens
        self.counts.recomputed_tokens += tokens if recomputes else 0

    def result(self, ranks: Ranks, device: torch.device | str) -> StepResult:
        """Sums over ranks and brings everything to the host, with one synchronization.

        Raises:
            NonFiniteError: on every rank, names the pairs.
        """
        num_pairs = len(self._executed.pair_ids)
        rows_P7 = torch.zeros(num_pairs, len(PAIR_COLUMNS), device=device, dtype=torch.float64)
        if self._rows:
            positions = torch.tensor(self._positions, device=device)
            rows_P7[positions] = torch.cat(self._rows).to(device, torch.float64)
        largest = torch.zeros(ranks.world_size, device=device, dtype=torch.float64)
        draw_sums = torch.zeros(3, device=device, dtype=torch.float64)
        if self._draw_sums:
            stacked = torch.stack(self._draw_sums)
            draw_sums, largest[ranks.rank] = stacked[:, :3].sum(dim=0), stacked[:, 3].amax()
        host = [getattr(self.counts, name) for name in _COUNTED]
        host += [*self._pairs_P2.ravel(), *self._branches_3PB.ravel()] if self._has_draw else []
        is_bad_P = (~torch.isfinite(rows_P7)).any(dim=1)
        extra = [
            is_bad_P.double(),
            draw_sums,
            largest,
            torch.tensor(host, dtype=torch.float64).to(device, non_blocking=True),
        ]
        metrics, values = sum_metrics(
            torch.where(is_bad_P[:, None], 0.0, rows_P7),
            torch.stack(self._token_sums).sum(dim=0) if self._token_sums else None,
            torch.cat(extra),
            num_pairs=num_pairs,
            sum_over_ranks=ranks.sum,
        )
        sizes = np.cumsum([num_pairs, 3, ranks.world_size, len(_COUNTED)])
        bad, sums, weights, counted, rest = np.split(np.array(values), sizes)
        if bad.any():
            ids = [i for i, is_bad in zip(self._executed.pair_ids, bad, strict=True) if is_bad]
            raise NonFiniteError("the loss or a log-probability", sorted(ids))
        self._fill_counts(sums, weights, counted)
        return StepResult(
            metrics=metrics,
            counts=self.counts,
            num_micro_batches=self.num_micro_batches,
            observations=self._observations(rest) if self._has_draw else None,
        )

    def _fill_counts(
        self,
        sums: NDArray[np.float64],
        weights: NDArray[np.float64],
        counted: NDArray[np.float64],
    ) -> None:
        counts = self.counts
        for name, value in zip(_COUNTED, counted.tolist(), strict=True):
            setattr(counts, name, value if name == "backward_positions" else round(value))
        counts.num_steps = 1
        counts.dense_positions = int(self._executed.full_lengths_P2.sum())
        counts.dense_tokens = counts.dense_positions + int(self._executed.prompt_lengths_P.sum())
        if self._has_draw:
            counts.second_moment, counts.dense_moment = float(sums[0]), float(sums[1])
            counts.backward_positions = float(sums[2])
            counts.max_weight = float(weights.max())

    def _observations(self, values: NDArray[np.float64]) -> Observations:
        pairs_P2 = values[: self._pairs_P2.size].reshape(self._pairs_P2.shape)
        branches_3PB = values[self._pairs_P2.size :].reshape(self._branches_3PB.shape)
        seen = np.flatnonzero(pairs_P2[:, 1])
        importance_N, cost_N, weights_N = (part[seen].ravel() for part in branches_3PB)
        self.counts.effective_sample_size = effective_sample_size(weights_N[weights_N > 0])
        return Observations(
            pair_ids=tuple(self._executed.pair_ids[p] for p in seen),
            importance_P=pairs_P2[seen, 0],
            branches=(importance_N, cost_N),
        )
