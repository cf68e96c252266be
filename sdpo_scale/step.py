"""One optimizer step, top to bottom: plan, forward, loss, backward, metrics.

The step is a pure function of the parameters, the step's pairs and the options: it knows neither
Trainer nor backend and is handed a forward and a backward callable. Gradients are left in the
parameters, summed; clipping and the optimizer are the caller's. Shape legend: R response tokens, P
pairs of a pack.

Normalization, once and here: the objective is the mean over all pairs of the step,

    L = (1 / num_pairs) · Σ_pairs ℓ(A⁺, A⁻),

so each pack adds Σ ℓ / num_pairs of its own pairs, whatever their number, and every pair has the
same weight in the gradient whatever pack it lands in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdpo_scale.data.pairs import Pair
from sdpo_scale.data.reference import NonFiniteError, ResponseLogprobs
from sdpo_scale.metrics import MetricSums, pair_rows, sum_metrics, token_sums
from sdpo_scale.modeling.logprobs import TokenLogprobs
from sdpo_scale.objectives import Objective
from sdpo_scale.packing.layout import PackLayout, build_layout
from sdpo_scale.packing.plan import plan_step

__all__ = ["StepOptions", "StepResult", "run_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What a step depends on besides parameters and pairs."""

    objective: Objective
    beta: float
    label_smoothing: float
    max_tokens: int
    """The most tokens of one micro-batch: an execution detail, no result depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step reports."""

    metrics: MetricSums
    num_tokens: int
    """Tokens executed, each prompt once."""
    num_micro_batches: int


def run_step(
    pairs: Sequence[Pair],
    reference: Sequence[ResponseLogprobs] | None,
    *,
    options: StepOptions,
    forward: Callable[[PackLayout, bool], TokenLogprobs],
    backward: Callable[[Tensor, bool], None] | None,
    with_statistics: bool = False,
) -> StepResult:
    """Computes the step's loss and leaves its gradient in the parameters.

    Args:
        pairs: the pairs of the step, in any order.
        reference: reference log-probabilities of each pair; None for the uniform reference, whose
            log-ratios are the policy's log-probabilities (``reference_free``).
        options: objective and execution.
        forward: (layout, with_statistics) → token log-probabilities with gradient.
        backward: (scalar loss of one pack, whether it is the step's last) → None; None to evaluate
            only.
        with_statistics: also collect entropy, logits and token accuracy, which cost a pass over the
            logits.

    Returns:
        Metrics of the step, on the host.

    Raises:
        NonFiniteError: a pair's loss or log-probability is NaN or infinite; gradients must be
            discarded.
    """
    # 1. plan: which pairs share a pack
    pair_tokens = [sum(len(part) for part in pair.tokens) for pair in pairs]
    plan = plan_step(pair_tokens, max_tokens=options.max_tokens)
    rows: list[Tensor] = []
    statistics: list[Tensor] = []
    for number, micro_batch in enumerate(plan.micro_batches, start=1):
        layout = build_layout([pairs[position].tokens for position in micro_batch.positions])

        # 2. forward: log-probabilities of the response tokens, then log-ratios to the reference
        logprobs_R, statistics_R3 = forward(layout, with_statistics)
        log_ratios_R = logprobs_R
        if reference is not None:
            log_ratios_R = logprobs_R - _reference_of(reference, micro_batch.positions, logprobs_R)

        # 3. loss: per pair from its two sums, weighted 1 / num_pairs
        sums_P2 = sum_by_response(log_ratios_R, layout)
        chosen_length_P = layout.chosen_length_P.to(sums_P2.device, non_blocking=True)
        rejected_length_P = layout.rejected_length_P.to(sums_P2.device, non_blocking=True)
        losses_P = options.objective.function(
            sums_P2[:, 0],
            sums_P2[:, 1],
            chosen_length_P=chosen_length_P,
            rejected_length_P=rejected_length_P,
            beta=options.beta,
            label_smoothing=options.label_smoothing,
        )

        # 4. backward: gradients of all packs add up
        if backward is not None:
            backward(losses_P.sum() / plan.num_pairs, number == len(plan.micro_batches))

        # 5. metrics stay on the device until the step's end
        logprob_sums_P2 = sum_by_response(logprobs_R.detach(), layout)
        rows.append(
            pair_rows(losses_P=losses_P, log_ratio_sums_P2=sums_P2, logprob_sums_P2=logprob_sums_P2)
        )
        if statistics_R3 is not None:
            is_chosen_R = layout.is_chosen_R.to(statistics_R3.device, non_blocking=True)
            statistics.append(token_sums(statistics_R3, is_chosen_R))

    order = [position for m in plan.micro_batches for position in m.positions]
    lengths_P2 = torch.tensor(
        [[len(pairs[p].chosen_ids), len(pairs[p].rejected_ids)] for p in order]
    )
    metrics, all_finite = sum_metrics(torch.cat(rows), lengths_P2, statistics)
    if not all_finite:
        bad_P = ~torch.isfinite(torch.cat(rows)).all(dim=1).cpu()
        bad_ids = [pairs[p].pair_id for p, bad in zip(order, bad_P.tolist(), strict=True) if bad]
        raise NonFiniteError("the loss or a log-probability", sorted(bad_ids))
    return StepResult(
        metrics=metrics,
        num_tokens=plan.num_tokens,
        num_micro_batches=len(plan.micro_batches),
    )


def sum_by_response(values_R: Tensor, layout: PackLayout) -> Tensor:
    """Float [P, 2]: a per-token value summed over each pair's chosen and rejected response."""
    lengths_P2 = torch.stack([layout.chosen_length_P, layout.rejected_length_P], dim=1)
    lengths = lengths_P2.view(-1).to(values_R.device, non_blocking=True)
    # responses are contiguous runs; unlike index_add this sums in one order on every device
    return torch.segment_reduce(values_R, "sum", lengths=lengths).view(-1, 2)


def _reference_of(
    reference: Sequence[ResponseLogprobs], positions: Sequence[int], like: Tensor
) -> Tensor:
    parts: list[NDArray[np.float32]] = [part for p in positions for part in reference[p]]
    return torch.from_numpy(np.concatenate(parts)).to(like.device, like.dtype, non_blocking=True)
