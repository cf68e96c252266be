"""One optimizer step, top to bottom: draw, plan, score, draw, train.

The step is a pure function of the parameters, the step's pairs, the options and the draw: it knows
neither Trainer nor backend and is handed a forward and a backward callable. Gradients are left in
the parameters, summed; clipping and the optimizer are the caller's. Shape legend: R response
tokens, P pairs.

Normalization, once and here: the objective is the mean over all pairs of the step,

    L = (1 / num_pairs) · Σ_pairs ℓ(A⁺, A⁻),

so each pack adds Σ_t weight_t · log π(y_t) / num_pairs of its own tokens, with the weights of
``weighting.py``, and every pair has the same weight in the expected gradient whatever pack it lands
in, and whether or not it was drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdpo_scale.data.pairs import Pair
from sdpo_scale.data.reference import NonFiniteError, ResponseLogprobs
from sdpo_scale.draws import Observations, StepDraw
from sdpo_scale.estimator.branches import effective_sample_size
from sdpo_scale.metrics import PAIR_COLUMNS, MetricSums, StepCounts, sum_metrics, token_sums
from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.logprobs import TokenLogprobs
from sdpo_scale.objectives import Objective
from sdpo_scale.packing.layout import PackLayout, build_layout, select_rows
from sdpo_scale.packing.plan import plan_step
from sdpo_scale.weighting import (
    BackwardDraw,
    Executed,
    draw_backward,
    draw_executed,
    observations_of,
    response_norms,
    sample_positions,
    telescoped_loss,
)

__all__ = ["StepOptions", "StepResult", "run_step"]


class Forward(Protocol):
    """One pack's token log-probabilities, with gradient unless gradients are switched off."""

    def __call__(
        self, layout: PackLayout, *, with_statistics: bool = False, with_norms: bool = False
    ) -> TokenLogprobs:
        """Runs the model on a pack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What a step depends on besides parameters, pairs and draw."""

    objective: Objective
    beta: float
    label_smoothing: float
    max_tokens: int
    """The most tokens of one micro-batch: an execution detail, no result depends on it."""
    score_max_tokens: int | None = None
    """The same where no gradient is needed; ``max_tokens`` if None."""
    recomputes: bool = False
    """Whether the backward recomputes activations; counts and the choice of execution need it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step reports."""

    metrics: MetricSums
    counts: StepCounts
    num_micro_batches: int
    observations: Observations | None
    """What later steps' draws may know of this one; None without a draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """Some pairs of the step after their forward."""

    positions: tuple[int, ...]
    executed: Executed
    logprobs_R: Tensor
    weights_R: Tensor
    norms_R: Tensor | None


@dataclass(slots=True, kw_only=True)
class _Record:
    """What the packs of a step add up to."""

    positions: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    token_sums: list[Tensor] = field(default_factory=list)
    draw_sums: list[Tensor] = field(default_factory=list)
    draws: list[tuple[Executed, BackwardDraw]] = field(default_factory=list)
    counts: StepCounts = field(default_factory=StepCounts)
    num_micro_batches: int = 0


def run_step(
    pairs: Sequence[Pair],
    reference: Sequence[ResponseLogprobs] | None,
    *,
    options: StepOptions,
    forward: Forward,
    backward: Callable[[Tensor, bool], None] | None,
    draw: StepDraw | None = None,
    recompute: PrunedRecompute | None = None,
    with_statistics: bool = False,
) -> StepResult:
    """Computes the step's loss and leaves its gradient, or an unbiased estimate, in the parameters.

    Args:
        pairs: the pairs of the step, in any order.
        reference: reference log-probabilities of each pair; None for the uniform reference, whose
            log-ratios are the policy's log-probabilities (``reference_free``).
        options: objective and execution.
        forward: the model.
        backward: (scalar of one pack, whether it is the step's last) → None; None to evaluate only.
        draw: what to prune; None for the dense step.
        recompute: the model's pruned activation checkpointing; None if it has none.
        with_statistics: also collect entropy, logits and token accuracy, which cost a pass over the
            logits.

    Returns:
        Metrics of the step, on the host.

    Raises:
        NonFiniteError: a pair's loss or log-probability is NaN or infinite; gradients must be
            discarded.
    """
    step = _Step(
        pairs=pairs,
        reference=reference,
        options=options,
        forward=forward,
        backward=backward,
        draw=draw,
        recompute=recompute,
        with_statistics=with_statistics,
        # 1. draw what is executed at all: pairs, then one cut level for each
        executed=draw_executed(pairs, draw),
    )
    if not step.present:
        step.train_nothing()
    elif step.scores_first:
        step.score_then_train()
    else:
        step.score_and_train()
    return step.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The step's inputs and its ways of execution; what packs add up to is in ``record``."""

    pairs: Sequence[Pair]
    reference: Sequence[ResponseLogprobs] | None
    options: StepOptions
    forward: Forward
    backward: Callable[[Tensor, bool], None] | None
    draw: StepDraw | None
    recompute: PrunedRecompute | None
    with_statistics: bool
    executed: Executed
    record: _Record = field(default_factory=_Record)

    @property
    def present(self) -> list[int]:
        """Positions of the pairs that are executed."""
        found: list[int] = np.flatnonzero(self.executed.pair_weights_P).tolist()
        return found

    @property
    def scores_first(self) -> bool:
        """Whether a forward without gradient comes before a train pass over what is kept.

        Unless asked for by name, that is left out where it saves nothing by what past steps kept,
        as in the first step. The choice depends on the past alone, so it changes no expectation.
        """
        if self.draw is None or self.backward is None or self.recompute is not None:
            return False
        options = self.draw.options
        if not options.prunes_backward or options.branch_execution == "two_pass":
            return options.prunes_backward
        kept = self.draw.history.expected_kept(options)
        train = 4 if self.options.recomputes else 3
        return 1 + train * kept < train

    def score_and_train(self) -> None:
        """Each pack's forward and backward in turn."""
        # 2. plan: which pairs share a pack
        packs = self._plan(self.present, self.executed.pair_tokens_P, self.options.max_tokens)
        for number, positions in enumerate(packs, start=1):
            layout = self._layout(positions, self.executed.lengths_P2[list(positions)])
            if self.recompute is not None:
                self.recompute.begin()
            # 3. score: log-probabilities, log-ratios, loss, each token's weight in the gradient
            scored = self._score(positions, layout)
            if self.backward is None:
                continue
            # 4. draw what is kept of this pack
            weights_R, drawn = self._draw(scored, is_whole_step=False)
            lengths_P2 = scored.executed.lengths_P2
            if self.recompute is not None:
                lengths_P2 = lengths_P2 if drawn is None else drawn.lengths_P2
                self.recompute.keep(select_rows(layout, lengths_P2.tolist()))
            # 5. train: the backward of what is kept; gradients of all packs add up
            self._train(scored.logprobs_R, weights_R, is_last=number == len(packs))
            self._count_backward(scored.executed.prompt_lengths_P, lengths_P2)

    def score_then_train(self) -> None:
        """All forwards without gradient, one draw over the step, a train pass over what is kept."""
        # 2. plan: packs without gradient hold more
        most = self.options.score_max_tokens or self.options.max_tokens
        packs = self._plan(self.present, self.executed.pair_tokens_P, most)
        # 3. score
        with torch.no_grad():
            parts = [
                self._score(p, self._layout(p, self.executed.lengths_P2[list(p)])) for p in packs
            ]
        scored = _joined(parts, self.executed)
        # 4. draw what is kept of the whole step
        weights_R, drawn = self._draw(scored, is_whole_step=True)
        assert drawn is not None, "a step that scores first has a draw"
        prompts_P = scored.executed.prompt_lengths_P
        kept_P = drawn.lengths_P2.sum(axis=1)
        if not kept_P.any():
            self.train_nothing()
            return
        # 5. plan again, since what is kept needs fewer packs, and train
        tokens_of_pair = np.split(np.flatnonzero(drawn.is_kept_R), np.cumsum(kept_P)[:-1])
        packs = self._plan(
            np.flatnonzero(kept_P).tolist(), prompts_P + kept_P, self.options.max_tokens
        )
        for number, group in enumerate(packs, start=1):
            positions = [scored.positions[p] for p in group]
            layout = self._layout(positions, drawn.lengths_P2[list(group)])
            tokens = torch.from_numpy(np.concatenate([tokens_of_pair[p] for p in group]))
            logprobs_R = self._run(layout).logprobs_R
            kept_weights_R = weights_R[tokens.to(weights_R.device)]
            self._train(logprobs_R, kept_weights_R, is_last=number == len(packs))
        self._count_backward(prompts_P, drawn.lengths_P2)

    def train_nothing(self) -> None:
        """One token's backward with weight 0: gradients are there and are 0, collectives match."""
        pair = self.pairs[0]
        layout = build_layout([(pair.prompt_ids[:1], pair.chosen_ids[:1], pair.rejected_ids[:0])])
        if self.recompute is not None:
            self.recompute.begin()
        logprobs_R = self._run(layout).logprobs_R
        if self.recompute is not None:
            self.recompute.keep(None)
        if self.backward is not None:
            self._train(logprobs_R, torch.zeros_like(logprobs_R), is_last=True)

    def result(self) -> StepResult:
        """Brings what the packs added up to the host, with one synchronization."""
        record, counts = self.record, self.record.counts
        rows_P7 = torch.cat(record.rows) if record.rows else torch.zeros(0, len(PAIR_COLUMNS))
        draw_sums = torch.zeros(4, dtype=torch.float64, device=rows_P7.device)
        if record.draw_sums:
            stacked = torch.stack(record.draw_sums)
            draw_sums = torch.cat([stacked[:, :3].sum(dim=0), stacked[:, 3].amax(dim=0)[None]])
        metrics, from_draws, all_finite = sum_metrics(
            rows_P7,
            torch.stack(record.token_sums).sum(dim=0) if record.token_sums else None,
            draw_sums,
            num_pairs=len(self.pairs),
        )
        if not all_finite:
            is_bad_P = (~torch.isfinite(rows_P7)).any(dim=1).cpu().numpy()
            self._refuse(is_bad_P, record.positions)
        counts.num_steps = 1
        counts.dense_positions = int(self.executed.full_lengths_P2.sum())
        counts.dense_tokens = counts.dense_positions + int(self.executed.prompt_lengths_P.sum())
        if record.draws:
            counts.second_moment, counts.dense_moment, counts.backward_positions = from_draws[:3]
            counts.max_weight = from_draws[3]
            counts.effective_sample_size = effective_sample_size(
                np.concatenate([d.total_weights(e) for e, d in record.draws])
            )
        return StepResult(
            metrics=metrics,
            counts=counts,
            num_micro_batches=record.num_micro_batches,
            observations=observations_of(record.draws) if record.draws else None,
        )

    def _plan(
        self, positions: Sequence[int], tokens_P: NDArray[np.int64], max_tokens: int
    ) -> list[tuple[int, ...]]:
        plan = plan_step(tokens_P[list(positions)], max_tokens=max_tokens)
        self.record.num_micro_batches += len(plan.micro_batches)
        return [tuple(positions[p] for p in m.positions) for m in plan.micro_batches]

    def _layout(self, positions: Sequence[int], lengths_P2: NDArray[np.int64]) -> PackLayout:
        pairs = [self.pairs[p] for p in positions]
        prefixes = [
            (pair.prompt_ids, pair.chosen_ids[:chosen], pair.rejected_ids[:rejected])
            for pair, (chosen, rejected) in zip(pairs, lengths_P2, strict=True)
        ]
        return build_layout(prefixes)

    def _run(self, layout: PackLayout, *, with_statistics: bool = False) -> TokenLogprobs:
        self.record.counts.forward_tokens += layout.num_tokens
        self.record.counts.forward_positions += len(layout.target_ids_R)
        return self.forward(
            layout, with_statistics=with_statistics, with_norms=self.draw is not None
        )

    def _score(self, positions: tuple[int, ...], layout: PackLayout) -> _Scored:
        executed = self.executed.of(positions)
        output = self._run(layout, with_statistics=self.with_statistics)
        logprobs_R = output.logprobs_R.detach()
        log_ratios_R = logprobs_R
        if self.reference is not None:
            references = [
                logprobs[:length]
                for position, lengths in zip(positions, executed.lengths_P2, strict=True)
                for logprobs, length in zip(self.reference[position], lengths, strict=True)
            ]
            reference_R = torch.from_numpy(np.concatenate(references))
            log_ratios_R = logprobs_R - reference_R.to(logprobs_R, non_blocking=True)
        weights_R, rows_P7 = telescoped_loss(
            logprobs_R,
            log_ratios_R,
            executed,
            objective=self.options.objective,
            beta=self.options.beta,
            label_smoothing=self.options.label_smoothing,
        )
        self.record.positions += positions
        self.record.rows.append(rows_P7)
        self.record.counts.executed_tokens += layout.num_tokens
        if output.statistics_R3 is not None:
            is_chosen_R = layout.is_chosen_R.to(logprobs_R.device, non_blocking=True)
            self.record.token_sums.append(token_sums(output.statistics_R3, is_chosen_R))
        return _Scored(
            positions=positions,
            executed=executed,
            logprobs_R=output.logprobs_R,
            weights_R=weights_R,
            norms_R=output.norms_R,
        )

    def _draw(self, scored: _Scored, *, is_whole_step: bool) -> tuple[Tensor, BackwardDraw | None]:
        if self.draw is None:
            self.record.counts.backward_positions += len(scored.weights_R)
            return scored.weights_R, None
        assert scored.norms_R is not None, "the forward was asked for norms"
        importance_P2 = response_norms(scored.weights_R, scored.norms_R, scored.executed)
        is_bad_P = ~np.isfinite(importance_P2).all(axis=1)
        if is_bad_P.any():
            self._refuse(is_bad_P, scored.positions)
        draw = self.draw
        if not is_whole_step and self.recompute is None:
            draw = replace(draw, options=draw.options.without_backward_pruning())
        drawn = draw_backward(draw, scored.executed, importance_P2, is_whole_step=is_whole_step)
        weights_R, draw_sums = sample_positions(
            scored.weights_R, scored.norms_R, scored.executed, draw=draw, backward=drawn
        )
        self.record.draw_sums.append(draw_sums)
        self.record.draws.append((scored.executed, drawn))
        return weights_R, drawn

    def _train(self, logprobs_R: Tensor, weights_R: Tensor, *, is_last: bool) -> None:
        assert self.backward is not None
        self.backward((logprobs_R * weights_R).sum() / len(self.pairs), is_last)

    def _count_backward(self, prompts_P: NDArray[np.int64], lengths_P2: NDArray[np.int64]) -> None:
        kept_P = lengths_P2.sum(axis=1)
        tokens = int(kept_P.sum() + prompts_P[kept_P > 0].sum())
        self.record.counts.backward_tokens += tokens
        self.record.counts.recomputed_tokens += tokens if self.options.recomputes else 0

    def _refuse(self, is_bad_P: Any, positions: Sequence[int]) -> None:
        ids = [self.pairs[p].pair_id for p, bad in zip(positions, is_bad_P, strict=True) if bad]
        raise NonFiniteError("the loss or a log-probability", sorted(ids))


def _joined(parts: Sequence[_Scored], executed: Executed) -> _Scored:
    """All scored pairs of a step as if they were one pack."""
    positions = tuple(p for part in parts for p in part.positions)
    return _Scored(
        positions=positions,
        executed=executed.of(positions),
        logprobs_R=torch.cat([part.logprobs_R for part in parts]),
        weights_R=torch.cat([part.weights_R for part in parts]),
        norms_R=torch.cat([part.norms_R for part in parts if part.norms_R is not None]),
    )
