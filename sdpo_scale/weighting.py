"""From draws to weights: what is executed of each pair, and each token's weight in the gradient.

Shape legend: R scored response tokens, P pairs, K cut levels, N branches. Responses lie as
everywhere: pair by pair, chosen before rejected.

A step's gradient is Σ_t weight_t · ∇ log π(y_t). The weights are exact numbers once the tokens are
scored:

    weight_t = 1/π_pair · ∂L̂/∂a_t        presample and prefix stage: L̂ telescopes over cut levels
               · 1/π_branch · 1/S(t)      branch and train-prefix stage, 0 where not kept
               · 1/p_t                    position stage, 0 where not kept

Dense training is the case of one level and probabilities of 1 throughout.

What a loss needs besides the two sums is known of every level as well: the likelihood of the chosen
prefix (``sft``), the mean of the prefix's tokens (``use_weighting``; its factor has no gradient).
Numbers of tokens that a loss divides by, or that say where ``ld_alpha`` begins, are those of the
whole responses at every level. Level K is then the loss itself, and telescoping needs no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdpo_scale.data.pairs import Pair
from sdpo_scale.draws import StepDraw
from sdpo_scale.estimator.positions import position_probabilities
from sdpo_scale.estimator.prefixes import (
    PrefixDesign,
    block_lengths,
    cut_lengths,
    telescoping_weights,
    token_survival,
)
from sdpo_scale.estimator.rng import Stage
from sdpo_scale.objectives import Objective, policy_weight, sft
from sdpo_scale.pruning import Pruning

__all__ = [
    "BackwardDraw",
    "Executed",
    "draw_backward",
    "draw_executed",
    "response_norms",
    "sample_positions",
    "telescoped_loss",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """What a step executes of its pairs, before anything is computed."""

    pair_ids: tuple[int, ...]
    pair_weights_P: Floats
    """float [P], 1/π of the presample stage; 0 for pairs that are not executed."""
    levels_P: Ints
    """int [P], drawn cut level."""
    design: PrefixDesign
    prompt_lengths_P: Ints
    full_lengths_P2: Ints
    """int [P, 2], n⁺ and n⁻."""
    lengths_P2: Ints
    """int [P, 2], executed tokens of each response."""
    mean_chosen_length: float
    """Of all pairs of the step, whole."""

    @property
    def pair_tokens_P(self) -> Ints:
        """Tokens that each pair's layout has, int [P]."""
        return self.prompt_lengths_P + self.lengths_P2.sum(axis=1)

    def of(self, positions: Sequence[int]) -> "Executed":
        """The same for some of the pairs, in the given order."""
        index = np.asarray(positions, dtype=np.int64)
        return Executed(
            pair_ids=tuple(self.pair_ids[p] for p in positions),
            pair_weights_P=self.pair_weights_P[index],
            levels_P=self.levels_P[index],
            design=self.design,
            prompt_lengths_P=self.prompt_lengths_P[index],
            full_lengths_P2=self.full_lengths_P2[index],
            lengths_P2=self.lengths_P2[index],
            mean_chosen_length=self.mean_chosen_length,
        )


def draw_executed(pairs: Sequence[Pair], draw: StepDraw | None) -> Executed:
    """Draws the pairs and the cut levels of a step; without a draw everything is executed."""
    pair_ids = tuple(pair.pair_id for pair in pairs)
    prompt_P = np.array([len(pair.prompt_ids) for pair in pairs])
    full_P2 = np.array([[len(pair.chosen_ids), len(pair.rejected_ids)] for pair in pairs])
    if draw is None:
        design = PrefixDesign(survival=(1.0,))
        levels_P, weights_P = np.ones(len(pairs), dtype=np.int64), np.ones(len(pairs))
    else:
        design = draw.options.prefix_design
        levels_P = draw.levels(pair_ids, Stage.PREFIX)
        weights_P = draw.presample(pair_ids, (prompt_P + full_P2.sum(axis=1)).astype(np.float64))
    cuts_NK1 = cut_lengths(full_P2.reshape(-1), design)
    lengths_N = np.take_along_axis(cuts_NK1, levels_P.repeat(2)[:, None], axis=1)[:, 0]
    return Executed(
        pair_ids=pair_ids,
        pair_weights_P=weights_P,
        levels_P=levels_P,
        design=design,
        prompt_lengths_P=prompt_P,
        full_lengths_P2=full_P2,
        lengths_P2=lengths_N.reshape(-1, 2),
        mean_chosen_length=float(full_P2[:, 0].mean()),
    )


def telescoped_loss(
    logprobs_R: Tensor,
    log_ratios_R: Tensor,
    executed: Executed,
    *,
    objective: Objective,
    beta: float,
    label_smoothing: float,
    square_sums_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The estimate L̂ of each pair's loss and what it weighs each token with.

    Args:
        logprobs_R: float [R] without gradient.
        log_ratios_R: float [R] without gradient, a_t.
        executed: of the pairs whose tokens these are.
        objective: the loss.
        beta: its β.
        label_smoothing: its ε.
        square_sums_R: float [R], log Σ_v π(v)² of each token, where ``objective.use_weighting``.

    Returns:
        (float [R], 1/π · ∂L̂/∂a_t; float [P, 7], the columns of ``metrics.PAIR_COLUMNS``, each an
        unbiased estimate of the whole pair's value).
    """
    device, dtype = log_ratios_R.device, log_ratios_R.dtype
    levels = _Levels.of(executed, device)
    num_levels = levels.num_levels
    level_weights = telescoping_weights(executed.levels_P, executed.design.survival)
    weights_PK = torch.from_numpy(level_weights).to(device, dtype)
    pair_weights_P = torch.from_numpy(executed.pair_weights_P).to(device, dtype)
    full_P2 = torch.from_numpy(executed.full_lengths_P2).to(device)
    tokens_R = torch.ones_like(log_ratios_R)
    if objective.ld_alpha is not None:
        tokens_R = torch.from_numpy(_shared_weights(executed, objective.ld_alpha)).to(tokens_R)

    with torch.enable_grad():
        leaf_R = torch.zeros_like(log_ratios_R).requires_grad_()
        chosen_PK, rejected_PK = levels.sums((log_ratios_R.detach() + leaf_R) * tokens_R)
        losses_PK = objective.function(
            chosen_PK.reshape(-1),
            rejected_PK.reshape(-1),
            chosen_length_P=full_P2[:, 0].repeat_interleave(num_levels),
            rejected_length_P=full_P2[:, 1].repeat_interleave(num_levels),
            beta=beta,
            label_smoothing=label_smoothing,
        ).view(-1, num_levels)
        if objective.sft_weight:
            chosen_logprob_PK, _ = levels.sums(logprobs_R.detach() + leaf_R)
            likelihood_PK = sft(chosen_logprob_PK, mean_chosen_length=executed.mean_chosen_length)
            losses_PK = losses_PK + objective.sft_weight * likelihood_PK
        if objective.use_weighting:
            assert square_sums_R is not None, "the forward was asked for them"
            losses_PK = losses_PK * policy_weight(*levels.means(logprobs_R - square_sums_R))
        estimates_P = (weights_PK * losses_PK).sum(dim=1) * pair_weights_P
        (weights_R,) = torch.autograd.grad(estimates_P.sum(), leaf_R)
    columns = [losses_PK, chosen_PK, rejected_PK, *levels.sums(logprobs_R * tokens_R)]
    columns.append((chosen_PK > rejected_PK).to(dtype))
    rows_P6 = (torch.stack(columns, dim=1).detach() * weights_PK[:, None]).sum(dim=2)
    lengths_P2 = torch.from_numpy(executed.lengths_P2).to(device)
    last_P2 = torch.stack([chosen_PK[:, -1], rejected_PK[:, -1]], dim=1).detach()
    per_token_P = (last_P2.abs() / lengths_P2).sum(dim=1, keepdim=True)
    return weights_R, torch.cat([rows_P6 * pair_weights_P[:, None], per_token_P], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """Sums over what each cut level keeps of some pairs' responses; levels not executed repeat."""

    blocks_NK: Tensor
    """int [N, K], executed tokens between neighbouring levels."""

    @classmethod
    def of(cls, executed: Executed, device: torch.device) -> "_Levels":
        cuts_NK1 = cut_lengths(executed.full_lengths_P2.reshape(-1), executed.design)
        blocks_NK = block_lengths(cuts_NK1, executed.lengths_P2.reshape(-1))
        return cls(blocks_NK=torch.from_numpy(blocks_NK).to(device))

    @property
    def num_levels(self) -> int:
        return self.blocks_NK.shape[1]

    def sums(self, values_R: Tensor) -> tuple[Tensor, Tensor]:
        """Float [P, K] of the chosen and of the rejected response."""
        blocks = torch.segment_reduce(values_R, "sum", lengths=self.blocks_NK.reshape(-1))
        sums_P2K = blocks.view(-1, 2, self.num_levels).cumsum(dim=2)
        return sums_P2K[:, 0], sums_P2K[:, 1]

    def means(self, values_R: Tensor) -> tuple[Tensor, Tensor]:
        """The same of means; 0 where a level keeps nothing."""
        counts_P2K = self.blocks_NK.view(-1, 2, self.num_levels).cumsum(dim=2).clamp_min(1)
        chosen_PK, rejected_PK = self.sums(values_R)
        return chosen_PK / counts_P2K[:, 0], rejected_PK / counts_P2K[:, 1]


def _shared_weights(executed: Executed, ld_alpha: float) -> Floats:
    """LD-DPO's weight of every executed token, float [R].

    1 up to the length of the pair's shorter response, ``ld_alpha`` beyond it.

    References:
        Liu et al. 2024, "Length desensitization in direct preference optimization".
    """
    executed_N = executed.lengths_P2.reshape(-1)
    shared_N = executed.full_lengths_P2.min(axis=1).repeat(2)
    return np.where(_ranks(executed_N) < np.repeat(shared_N, executed_N), 1.0, ld_alpha)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardDraw:
    """What is kept for the backward of some scored pairs."""

    factors_R: Floats
    """float [R], 1 / (π_branch · S(t)) of every scored token, kept or not."""
    is_kept_R: NDArray[np.bool_]
    lengths_P2: Ints
    """int [P, 2], tokens kept of each response; 0 0 for a pair that was dropped."""
    ht_weights_N: Floats
    """float [N], 1/π of kept branches, 0 for the others."""
    scored_probability_R: Floats
    """float [R], probability that the token was executed at all: presample and prefix stage."""
    importance_P: Floats
    branch_importance_N: Floats
    branch_cost_N: Floats


def response_norms(weights_R: Tensor, norms_R: Tensor, executed: Executed) -> Floats:
    """Float [P, 2] on the host: √Σ (weight_t · norm_t)² over each response.

    With orthogonal token gradients of equal size below the head, the norm of the response's
    gradient up to a factor: the importance that branches are drawn by.
    """
    sizes_R = (weights_R * norms_R).double() ** 2
    lengths_N = torch.from_numpy(executed.lengths_P2.reshape(-1)).to(sizes_R.device)
    squares_N = torch.segment_reduce(sizes_R, "sum", lengths=lengths_N)
    norms: Floats = squares_N.sqrt().cpu().numpy().reshape(-1, 2)
    return norms


def draw_backward(
    draw: StepDraw, executed: Executed, importance_P2: Floats, *, is_whole_step: bool
) -> BackwardDraw:
    """Draws branches and, for those that are kept, the cut level of the backward.

    Args:
        draw: the step's chance.
        executed: of the scored pairs.
        importance_P2: float [P, 2], √Σ (weight_t · norm_t)² over each response.
        is_whole_step: whether these are all pairs of the step, see ``StepDraw.branches``.
    """
    options = draw.options
    by_response = options.branch_unit == "response"
    importance_P = np.sqrt((importance_P2**2).sum(axis=1))
    if by_response:  # the prompt is shared: half of it for each
        cost_P2 = executed.lengths_P2 + executed.prompt_lengths_P[:, None] / 2
        importance_N, cost_N = importance_P2.reshape(-1), cost_P2.reshape(-1)
    else:
        importance_N, cost_N = importance_P, executed.pair_tokens_P.astype(np.float64)
    probabilities_N, kept_N = draw.branches(
        executed.pair_ids, importance_N, cost_N, is_whole_step=is_whole_step
    )
    shape = (-1, 2) if by_response else (-1, 1)
    inverse_P2 = np.broadcast_to((1 / probabilities_N).reshape(shape), importance_P2.shape)
    is_kept_P2 = np.broadcast_to(kept_N.reshape(shape), importance_P2.shape)

    executed_N = executed.lengths_P2.reshape(-1)
    design = options.train_prefix_design
    levels_P = draw.levels(executed.pair_ids, Stage.TRAIN_PREFIX)
    cuts_NK1 = cut_lengths(executed_N, design)
    kept_lengths_N = np.take_along_axis(cuts_NK1, levels_P.repeat(2)[:, None], axis=1)[:, 0]
    kept_lengths_N = np.where(is_kept_P2.reshape(-1), kept_lengths_N, 0)
    survival_R = token_survival(cuts_NK1, executed_N, design.survival)
    return BackwardDraw(
        factors_R=np.repeat(inverse_P2.reshape(-1), executed_N) / survival_R,
        is_kept_R=_ranks(executed_N) < np.repeat(kept_lengths_N, executed_N),
        lengths_P2=kept_lengths_N.reshape(-1, 2),
        ht_weights_N=np.where(kept_N, 1 / probabilities_N, 0.0),
        scored_probability_R=_scored_probability(executed),
        importance_P=importance_P,
        branch_importance_N=importance_N,
        branch_cost_N=cost_N,
    )


def sample_positions(
    weights_R: Tensor,
    norms_R: Tensor,
    executed: Executed,
    *,
    draw: StepDraw,
    backward: BackwardDraw,
) -> tuple[Tensor, Tensor]:
    """Applies the branch, train-prefix and position stages to the tokens' weights.

    Args:
        weights_R: float [R], from :func:`telescoped_loss`.
        norms_R: float [R], ‖onehot(y_t) − softmax_t‖.
        executed: of the pairs whose tokens these are.
        draw: the step's chance.
        backward: what the earlier stages keep.

    Returns:
        (float [R] final weights, 0 where not kept; float64 [4]: Σ (weight·norm)² over the draws'
        inclusion probabilities, the same for the dense gradient, positions kept, largest product
        of inverse probabilities. The ratio of the first two is the predicted variance inflation,
        where tokens' gradients are taken as orthogonal.)
    """
    device, dtype = weights_R.device, weights_R.dtype
    factors_R = torch.from_numpy(backward.factors_R).to(device, dtype)
    is_kept_R = torch.from_numpy(backward.is_kept_R).to(device)
    scored_R = torch.from_numpy(backward.scored_probability_R).to(device)
    probabilities_R = torch.ones_like(factors_R)
    options: Pruning = draw.options
    if options.position_fraction is not None:
        sizes_R = (weights_R * factors_R).abs()
        sizes_R = (
            sizes_R * norms_R if options.positions == "importance" else (sizes_R > 0).to(dtype)
        )
        lengths_P = executed.lengths_P2.sum(axis=1)
        probabilities_R = position_probabilities(
            sizes_R,
            torch.from_numpy(lengths_P).to(device),
            keep_fraction=options.position_fraction,
            floor=options.min_probability,
        )
        coins = [
            draw.uniforms(int(count), pair_id, Stage.POSITION)
            for pair_id, count in zip(executed.pair_ids, lengths_P, strict=True)
        ]
        coins_R = torch.from_numpy(np.concatenate(coins)).to(device)
        is_kept_R = is_kept_R & (coins_R < probabilities_R)
    sizes_R = (weights_R * norms_R).double() ** 2
    total_R = factors_R / probabilities_R
    largest = torch.where(is_kept_R, total_R / scored_R, 0.0).max()
    sums = [(sizes_R * total_R).sum(), (sizes_R * scored_R).sum(), is_kept_R.sum(), largest]
    weights_R = torch.where(is_kept_R, weights_R * total_R, 0.0)
    return weights_R, torch.stack([number.double() for number in sums])


def _scored_probability(executed: Executed) -> Floats:
    """Float [R]: the probability that a token was executed."""
    executed_N = executed.lengths_P2.reshape(-1)
    cuts_NK1 = cut_lengths(executed.full_lengths_P2.reshape(-1), executed.design)
    survival_R = token_survival(cuts_NK1, executed_N, executed.design.survival)
    pair_weights_R = np.repeat(executed.pair_weights_P, executed.lengths_P2.sum(axis=1))
    return survival_R / pair_weights_R


def _ranks(lengths_N: Ints) -> Ints:
    """Int [Σ lengths]: 0, 1, 2, … within each run."""
    starts_N = np.cumsum(lengths_N) - lengths_N
    return np.arange(lengths_N.sum()) - np.repeat(starts_N, lengths_N)
