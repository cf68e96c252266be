"""One optimizer step, top to bottom: draw, plan, score, draw, train.

The step is a pure function of the parameters, the step's pairs, the options and the draw: it knows
neither Trainer nor backend and is handed a forward and a backward callable. Gradients are left in
the parameters, summed; clipping and the optimizer are the caller's. Shape legend: R response
tokens, P pairs.

Normalization, once and here: the objective is the mean over all pairs of the step,

    L = (1 / num_pairs) · Σ_pairs ℓ(A⁺, A⁻),

so each pack adds Σ_t weight_t · log π(y_t) / num_pairs of its own tokens, with the weights of
``weighting.py``, and every pair has the same weight in the expected gradient whatever pack it lands
in, and whether or not it was drawn. Several ranks share a step: each is given all of its pairs,
plans and draws the same, and executes its part; gradients are summed by whoever owns them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdpo_scale.data.pairs import Pair
from sdpo_scale.data.reference import ResponseLogprobs
from sdpo_scale.draws import StepDraw
from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.logprobs import TokenLogprobs
from sdpo_scale.objectives import Objective
from sdpo_scale.packing.layout import PackLayout, build_idle_layout, build_layout, select_rows
from sdpo_scale.packing.plan import MicroBatch, pair_costs, plan_ranks
from sdpo_scale.record import Ranks, StepRecord, StepResult
from sdpo_scale.weighting import (
    BackwardDraw,
    Executed,
    draw_backward,
    draw_executed,
    response_norms,
    sample_positions,
    telescoped_loss,
)

__all__ = ["StepOptions", "run_step"]


class Forward(Protocol):
    """One pack's token log-probabilities, with gradient unless gradients are switched off."""

    def __call__(self, layout: PackLayout, *, is_last: bool, **asked: bool) -> TokenLogprobs:
        """Runs the model on a pack; ``is_last``: no pack with gradients comes after it.

        ``asked``: ``with_statistics``, ``with_norms``, ``with_square_sums`` of
        :func:`~sdpo_scale.modeling.logprobs.chunked_logprobs`; what is not named is not asked for.
        """


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
    hidden_size: int = 4096
    """Width of the model, for the balance between ranks."""
    device: torch.device | str = "cpu"
    """Where the model's inputs and outputs are."""
    with_statistics: bool = False
    """Also collect entropy, logits and token accuracy, which cost a pass over the logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """Some pairs of the step after their forward."""

    positions: tuple[int, ...]
    executed: Executed
    logprobs_R: Tensor
    weights_R: Tensor
    norms_R: Tensor


def run_step(
    pairs: Sequence[Pair],
    reference: Sequence[ResponseLogprobs] | None,
    *,
    options: StepOptions,
    forward: Forward,
    backward: Callable[[Tensor, bool], None] | None,
    draw: StepDraw | None = None,
    recompute: PrunedRecompute | None = None,
    ranks: Ranks | None = None,
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
        ranks: who shares the step; None for one process. Every rank is given the same pairs and
            executes some of them; gradients are the caller's to sum.

    Returns:
        Metrics of the step, on the host, the same on every rank.

    Raises:
        NonFiniteError: a pair's loss or log-probability is NaN or infinite; gradients must be
            discarded. Raised on every rank alike.
    """
    # 1. draw what is executed at all: pairs, then one cut level for each
    executed = draw_executed(pairs, draw)
    step = _Step(
        pairs=pairs,
        reference=reference,
        options=options,
        forward=forward,
        backward=backward,
        draw=draw,
        recompute=recompute,
        ranks=ranks or Ranks(),
        executed=executed,
        record=StepRecord(
            executed,
            by_response=draw is not None and draw.options.branch_unit == "response",
            has_draw=draw is not None and backward is not None,
        ),
    )
    if step.scores_first:
        step.score_then_train()
    else:
        step.score_and_train()
    return step.record.result(step.ranks, step.options.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The step's inputs and its two ways of execution; what packs add up to is in ``record``."""

    pairs: Sequence[Pair]
    reference: Sequence[ResponseLogprobs] | None
    options: StepOptions
    forward: Forward
    backward: Callable[[Tensor, bool], None] | None
    draw: StepDraw | None
    recompute: PrunedRecompute | None
    ranks: Ranks
    executed: Executed
    record: StepRecord

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
        # 2. plan: which rank executes which pairs, and which share a pack
        present = np.flatnonzero(self.executed.pair_weights_P).tolist()
        packs = self._plan(present, self.executed.lengths_P2, self.options.max_tokens)
        for number, positions in enumerate(packs, start=1):
            is_last = number == len(packs)
            if not positions:
                self._train_nothing(is_last=is_last)
                continue
            layout = self._layout(positions, self.executed.lengths_P2)
            if self.recompute is not None:
                self.recompute.begin()
            # 3. score: log-probabilities, log-ratios, loss, each token's weight in the gradient
            scored = self._score(positions, layout, is_last=is_last)
            if self.backward is None:
                continue
            # 4. draw what is kept of this pack
            weights_R, lengths_P2 = scored.weights_R, scored.executed.lengths_P2
            if self.draw is not None:
                importance_P2 = response_norms(weights_R, scored.norms_R, scored.executed)
                # a pair that is not finite stops the step at its end, on all ranks together
                importance_P2 = np.nan_to_num(importance_P2, posinf=0.0)
                draw = self.draw if self.recompute is not None else self._draw_of_whole_backward()
                weights_R, drawn = self._draw(draw, scored, importance_P2, is_whole_step=False)
                lengths_P2 = drawn.lengths_P2
            if self.recompute is not None:
                self.recompute.keep(select_rows(layout, lengths_P2.tolist()))
            # 5. train: the backward of what is kept; gradients of all packs add up
            self._train(scored.logprobs_R, weights_R, is_last=is_last)
            self._count(scored.executed.prompt_lengths_P, lengths_P2, weights_R)

    def score_then_train(self) -> None:
        """All forwards without gradient, one draw over the step, a train pass over what is kept."""
        present = np.flatnonzero(self.executed.pair_weights_P).tolist()
        if not present:
            self._train_nothing(is_last=True)
            return
        # 2. plan: packs without gradient hold more
        most = self.options.score_max_tokens or self.options.max_tokens
        packs = self._plan(present, self.executed.lengths_P2, most)
        # 3. score
        parts = []
        with torch.no_grad():
            for positions in packs:
                if positions:
                    layout = self._layout(positions, self.executed.lengths_P2)
                    parts.append(self._score(positions, layout, is_last=False))
                else:
                    self._run_nothing(is_last=False)
        scored = self._joined(parts, present)
        # 4. draw what is kept of the whole step
        importance_P2 = response_norms(scored.weights_R, scored.norms_R, scored.executed)
        if not np.isfinite(importance_P2).all():
            self._train_nothing(is_last=True)
            return
        assert self.draw is not None, "a step that scores first has a draw"
        weights_R, drawn = self._draw(self.draw, scored, importance_P2, is_whole_step=True)
        # 5. plan again, since what is kept needs fewer packs, and train
        kept_P2 = np.zeros_like(self.executed.lengths_P2)
        kept_P2[present] = drawn.lengths_P2
        tokens = np.split(np.flatnonzero(drawn.is_kept_R), np.cumsum(kept_P2.sum(axis=1))[:-1])
        kept = np.flatnonzero(kept_P2.sum(axis=1)).tolist()
        packs = self._plan(kept, kept_P2, self.options.max_tokens)
        for number, positions in enumerate(packs, start=1):
            is_last = number == len(packs)
            if not positions:
                self._train_nothing(is_last=is_last)
                continue
            logprobs_R = self._run(self._layout(positions, kept_P2), is_last=is_last).logprobs_R
            index = torch.from_numpy(np.concatenate([tokens[p] for p in positions]))
            kept_weights_R = weights_R[index.to(weights_R.device)]
            self._train(logprobs_R, kept_weights_R, is_last=is_last)
            prompts_P = self.executed.prompt_lengths_P[list(positions)]
            self._count(prompts_P, kept_P2[list(positions)], kept_weights_R)

    def _plan(
        self, positions: Sequence[int], lengths_P2: NDArray[np.int64], max_tokens: int
    ) -> list[tuple[int, ...]]:
        """This rank's packs of the given pairs; as many as every rank's, () where it has none."""
        prompts_P, lengths_P2 = self.executed.prompt_lengths_P[positions], lengths_P2[positions]
        micro_batches: Sequence[MicroBatch | None] = (None,)
        if positions:
            plans = plan_ranks(
                prompts_P + lengths_P2.sum(axis=1),
                pair_costs(prompts_P, lengths_P2, self.options.hidden_size),
                max_tokens=max_tokens,
                world_size=self.ranks.world_size,
            )
            micro_batches = plans.micro_batches[self.ranks.rank]
            if self.ranks.world_size > 1:  # of two passes, the later one is the longer
                self.record.counts.balance = plans.balance
        self.record.num_micro_batches += len(micro_batches)
        return [tuple(positions[p] for p in m.positions) if m else () for m in micro_batches]

    def _layout(self, positions: Sequence[int], lengths_P2: NDArray[np.int64]) -> PackLayout:
        prefixes = []
        for position in positions:
            pair, (chosen, rejected) = self.pairs[position], lengths_P2[position]
            prefixes.append(
                (pair.prompt_ids, pair.chosen_ids[:chosen], pair.rejected_ids[:rejected])
            )
        return build_layout(prefixes)

    def _run(self, layout: PackLayout, *, is_last: bool, **asked: bool) -> TokenLogprobs:
        self.record.counts.forward_tokens += layout.num_tokens
        self.record.counts.forward_positions += len(layout.target_ids_R)
        with_norms = self.draw is not None
        return self.forward(layout, is_last=is_last, with_norms=with_norms, **asked)

    def _run_nothing(self, *, is_last: bool) -> Tensor:
        """One token, whose log-probability nobody needs."""
        layout = build_idle_layout(self.pairs[0].tokens)
        with_norms = self.draw is not None
        return self.forward(layout, is_last=is_last, with_norms=with_norms).logprobs_R

    def _train_nothing(self, *, is_last: bool) -> None:
        """A backward of one token with weight 0: gradients are there, and are 0."""
        if self.recompute is not None:
            self.recompute.begin()
        logprobs_R = self._run_nothing(is_last=is_last)
        if self.recompute is not None:
            self.recompute.keep(None)
        if self.backward is not None:
            self._train(logprobs_R, torch.zeros_like(logprobs_R), is_last=is_last)

    def _score(self, positions: tuple[int, ...], layout: PackLayout, *, is_last: bool) -> _Scored:
        executed = self.executed.of(positions)
        output = self._run(
            layout,
            is_last=is_last,
            with_statistics=self.options.with_statistics,
            with_square_sums=self.options.objective.use_weighting,
        )
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
            square_sums_R=output.square_sums_R,
        )
        self.record.scored(positions, rows_P7, output.statistics_R3, layout)
        return _Scored(
            positions=positions,
            executed=executed,
            logprobs_R=output.logprobs_R,
            weights_R=weights_R,
            norms_R=torch.ones_like(weights_R) if output.norms_R is None else output.norms_R,
        )

    def _joined(self, parts: Sequence[_Scored], positions: Sequence[int]) -> _Scored:
        """The pairs that all ranks scored, in the order of the step, as if they were one pack."""
        executed = self.executed.of(positions)
        ends_P = np.cumsum(executed.lengths_P2.sum(axis=1))
        place = {p: slice(*ends) for p, ends in zip(positions, pairwise([0, *ends_P]), strict=True)}
        tokens_3R = torch.zeros(3, int(ends_P[-1]), dtype=torch.float64, device=self.options.device)
        for part in parts:
            sizes = part.executed.lengths_P2.sum(axis=1).tolist()
            values = torch.stack([part.logprobs_R, part.weights_R, part.norms_R]).double()
            for position, value in zip(part.positions, values.split(sizes, dim=1), strict=True):
                tokens_3R[:, place[position]] = value
        dtype = parts[0].weights_R.dtype if parts else torch.float32
        logprobs_R, weights_R, norms_R = self.ranks.sum(tokens_3R).to(dtype)
        return _Scored(
            positions=tuple(positions),
            executed=executed,
            logprobs_R=logprobs_R,
            weights_R=weights_R,
            norms_R=norms_R,
        )

    def _draw_of_whole_backward(self) -> StepDraw:
        assert self.draw is not None
        return replace(self.draw, options=self.draw.options.without_backward_pruning())

    def _draw(
        self,
        draw: StepDraw,
        scored: _Scored,
        importance_P2: NDArray[np.float64],
        *,
        is_whole_step: bool,
    ) -> tuple[Tensor, BackwardDraw]:
        drawn = draw_backward(draw, scored.executed, importance_P2, is_whole_step=is_whole_step)
        weights_R, draw_sums = sample_positions(
            scored.weights_R, scored.norms_R, scored.executed, draw=draw, backward=drawn
        )
        if not is_whole_step or self.ranks.rank == 0:  # else every rank has drawn the same
            self.record.drawn(scored.positions, scored.executed, drawn, draw_sums)
        return weights_R, drawn

    def _train(self, logprobs_R: Tensor, weights_R: Tensor, *, is_last: bool) -> None:
        assert self.backward is not None
        self.backward((logprobs_R * weights_R).sum() / len(self.pairs), is_last)

    def _count(
        self, prompts_P: NDArray[np.int64], lengths_P2: NDArray[np.int64], weights_R: Tensor
    ) -> None:
        self.record.trained(prompts_P, lengths_P2, recomputes=self.options.recomputes)
        self.record.counts.backward_positions += len(weights_R)  # without a draw; else overwritten
