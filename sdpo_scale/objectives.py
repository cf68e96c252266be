"""Pairwise preference losses: pure functions of the two log-ratio sums of a pair.

Shape legend: P pairs. The two sums of a pair are

    A⁺ = Σ_t log π(y⁺_t | x, y⁺_<t) − log π_ref(y⁺_t | x, y⁺_<t)      ``chosen_sum_P``, nats
    A⁻ = the same over the rejected response                             ``rejected_sum_P``, nats

and Δ = A⁺ − A⁻. A loss returns one value per pair; who averages, and over what, is decided in one
place (``step.py``: the mean over all pairs of the optimizer step). A new loss is one function and
one row of ``OBJECTIVES``. Every loss is called with all arguments of :func:`sigmoid`, names those
that its formula reads, and takes the others unread.

What makes a run's objective of these (weighted sums, divergences, weights of tokens and pairs) is
put together in ``objective_options.py``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "DIVERGENCES",
    "OBJECTIVES",
    "Objective",
    "margin_zero_loss",
    "policy_weight",
    "sft",
]

_LARGEST_EXPONENT = {torch.float16: 11.0, torch.bfloat16: 80.0, torch.float32: 80.0}
"""Beyond it a divergence's exponential stays where it is, so that it is finite; as in TRL."""


def sigmoid(
    chosen_sum_P: Tensor,
    rejected_sum_P: Tensor,
    *,
    chosen_length_P: Tensor,
    rejected_length_P: Tensor,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """DPO's logistic loss, with label smoothing ε as in conservative DPO.

    ℓ = −(1−ε) log σ(βΔ) − ε log σ(−βΔ)

    Args:
        chosen_sum_P: float [P], A⁺ in nats.
        rejected_sum_P: float [P], A⁻ in nats.
        chosen_length_P: int [P], scored tokens of the chosen response (unused here).
        rejected_length_P: int [P], scored tokens of the rejected response (unused here).
        beta: inverse temperature β > 0.
        label_smoothing: ε in [0, 0.5), the assumed probability that a label is flipped.

    Returns:
        float [P], the loss of each pair in nats.

    References:
        Rafailov et al. 2023, "Direct Preference Optimization", eq. 7; Mitchell 2023, "A note on DPO
        with noisy preferences and relationship to IPO", eq. 3 (label smoothing).
    """
    return _logistic(beta * (chosen_sum_P - rejected_sum_P), label_smoothing)


def hinge(
    chosen_sum_P: Tensor, rejected_sum_P: Tensor, *, beta: float, **_unread: object
) -> Tensor:
    """Hinge loss on the margin: ℓ = max(0, 1 − βΔ).

    References:
        Zhao et al. 2023, "SLiC-HF", eq. 1 (the rank calibration loss, here on log-ratios).
    """
    return torch.relu(1 - beta * (chosen_sum_P - rejected_sum_P))


def ipo(
    chosen_sum_P: Tensor,
    rejected_sum_P: Tensor,
    *,
    chosen_length_P: Tensor,
    rejected_length_P: Tensor,
    beta: float,
    **_unread: object,
) -> Tensor:
    """Identity preference optimization on token averages: ℓ = (A⁺/n⁺ − A⁻/n⁻ − 1/(2β))².

    The averaged form is the one TRL trains; on sums the squared target would depend on the
    responses' lengths.

    References:
        Azar et al. 2023, "A general theoretical paradigm to understand learning from human
        preferences", eq. 17 (τ there is β here).
    """
    difference_P = chosen_sum_P / chosen_length_P - rejected_sum_P / rejected_length_P
    return (difference_P - 1 / (2 * beta)) ** 2


def exo_pair(
    chosen_sum_P: Tensor,
    rejected_sum_P: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    **_unread: object,
) -> Tensor:
    """Reverse KL divergence from the smoothed labels (1−ε, ε) to the policy's preference.

    ℓ = σ(βΔ)[log σ(βΔ) − log(1−ε)] + σ(−βΔ)[log σ(−βΔ) − log ε],  ε > 0

    References:
        Ji et al. 2024, "Towards efficient exact optimization of language model alignment", eq. 16.
    """
    margin_P = beta * (chosen_sum_P - rejected_sum_P)
    wins_P = torch.sigmoid(margin_P) * (F.logsigmoid(margin_P) - math.log1p(-label_smoothing))
    loses_P = torch.sigmoid(-margin_P) * (F.logsigmoid(-margin_P) - math.log(label_smoothing))
    return wins_P + loses_P


def nca_pair(
    chosen_sum_P: Tensor, rejected_sum_P: Tensor, *, beta: float, **_unread: object
) -> Tensor:
    """Noise contrastive alignment: ℓ = −log σ(βA⁺) − ½ log σ(−βA⁺) − ½ log σ(−βA⁻).

    References:
        Chen et al. 2024, "Noise contrastive alignment of language models with explicit rewards".
    """
    chosen_P, rejected_P = beta * chosen_sum_P, beta * rejected_sum_P
    pushed_down_P = F.logsigmoid(-chosen_P) + F.logsigmoid(-rejected_P)
    return -F.logsigmoid(chosen_P) - 0.5 * pushed_down_P


def robust(
    chosen_sum_P: Tensor,
    rejected_sum_P: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    **_unread: object,
) -> Tensor:
    """Loss that is unbiased under labels flipped at random with probability ε.

    ℓ = [−(1−ε) log σ(βΔ) + ε log σ(−βΔ)] / (1 − 2ε)

    References:
        Chowdhury et al. 2024, "Provably robust DPO", eq. 12.
    """
    margin_P = beta * (chosen_sum_P - rejected_sum_P)
    weighted_P = -(1 - label_smoothing) * F.logsigmoid(margin_P)
    weighted_P = weighted_P + label_smoothing * F.logsigmoid(-margin_P)
    return weighted_P / (1 - 2 * label_smoothing)


def bco_pair(
    chosen_sum_P: Tensor, rejected_sum_P: Tensor, *, beta: float, **_unread: object
) -> Tensor:
    """Binary classifier of responses: ℓ = −log σ(βA⁺) − log σ(−βA⁻), without a running shift.

    References:
        Jung et al. 2024, "Binary classifier optimization for large language model alignment"
        (with δ = 0, as TRL).
    """
    return -F.logsigmoid(beta * chosen_sum_P) - F.logsigmoid(-beta * rejected_sum_P)


def sppo_hard(
    chosen_sum_P: Tensor, rejected_sum_P: Tensor, *, beta: float, **_unread: object
) -> Tensor:
    """Self-play preference optimization: ℓ = (A⁺ − 1/(2β))² + (A⁻ + 1/(2β))².

    References:
        Wu et al. 2024, "Self-play preference optimization for language model alignment", eq. 4.7
        with the winner's probability 1.
    """
    return (chosen_sum_P - 0.5 / beta) ** 2 + (rejected_sum_P + 0.5 / beta) ** 2


def apo_zero(
    chosen_sum_P: Tensor, rejected_sum_P: Tensor, *, beta: float, **_unread: object
) -> Tensor:
    """Anchored, for chosen responses better than the policy's: ℓ = 1 − σ(βA⁺) + σ(βA⁻).

    References:
        D'Oosterlinck et al. 2024, "Anchored preference optimization and contrastive revisions",
        eq. 7.
    """
    return torch.sigmoid(-beta * chosen_sum_P) + torch.sigmoid(beta * rejected_sum_P)


def apo_down(
    chosen_sum_P: Tensor, rejected_sum_P: Tensor, *, beta: float, **_unread: object
) -> Tensor:
    """Anchored, for chosen responses worse than the policy's: ℓ = σ(βA⁺) + 1 − σ(βΔ).

    References:
        D'Oosterlinck et al. 2024, eq. 8.
    """
    margin_P = beta * (chosen_sum_P - rejected_sum_P)
    return torch.sigmoid(beta * chosen_sum_P) + torch.sigmoid(-margin_P)


def discopop(
    chosen_sum_P: Tensor,
    rejected_sum_P: Tensor,
    *,
    beta: float,
    discopop_tau: float = 0.05,
    **_unread: object,
) -> Tensor:
    """Log-ratio modulated loss: with x = βΔ and m = σ(x/τ), ℓ = −log σ(x)(1−m) + e^(−x) m.

    The last product is computed as one exponential: for margins far below 0 its factors overflow
    and vanish.

    References:
        Lu et al. 2024, "Discovering preference optimization algorithms with and for large language
        models", eq. 5.
    """
    margin_P = beta * (chosen_sum_P - rejected_sum_P)
    logistic_P = -F.logsigmoid(margin_P) * torch.sigmoid(-margin_P / discopop_tau)
    return logistic_P + torch.exp(F.logsigmoid(margin_P / discopop_tau) - margin_P)


def sigmoid_norm(
    chosen_sum_P: Tensor,
    rejected_sum_P: Tensor,
    *,
    chosen_length_P: Tensor,
    rejected_length_P: Tensor,
    beta: float,
    **_unread: object,
) -> Tensor:
    """DPO on token averages: ℓ = −log σ(β(A⁺/n⁺ − A⁻/n⁻)).

    References:
        Lambert et al. 2024, "Tülu 3: pushing frontiers in open language model post-training".
    """
    difference_P = chosen_sum_P / chosen_length_P - rejected_sum_P / rejected_length_P
    return -F.logsigmoid(beta * difference_P)


def simpo(
    chosen_sum_P: Tensor,
    rejected_sum_P: Tensor,
    *,
    chosen_length_P: Tensor,
    rejected_length_P: Tensor,
    beta: float,
    label_smoothing: float,
    simpo_gamma: float = 0.5,
) -> Tensor:
    """Token averages with a target margin γ: the logistic loss of β(A⁺/n⁺ − A⁻/n⁻) − γ.

    Meant for log-probabilities, so for the uniform reference.

    References:
        Meng et al. 2024, "SimPO: simple preference optimization with a reference-free reward",
        eq. 6.
    """
    difference_P = chosen_sum_P / chosen_length_P - rejected_sum_P / rejected_length_P
    return _logistic(beta * difference_P - simpo_gamma, label_smoothing)


def no_preference(chosen_sum_P: Tensor, rejected_sum_P: Tensor, **_unread: object) -> Tensor:
    """0: what remains of an objective that is ``sft`` alone."""
    return torch.zeros_like(chosen_sum_P)


def sft(chosen_logprob_P: Tensor, *, mean_chosen_length: float) -> Tensor:
    """Negative log-likelihood per token of the chosen responses: ℓ = −log π(y⁺|x) / n̄.

    n̄ is the mean number of chosen tokens over all pairs of the optimizer step, executed or not, and
    the mean of ℓ over these pairs is the step's mean over chosen tokens. TRL's ``sft`` is the mean
    over a micro-batch's chosen tokens: the same where the micro-batch is the step; otherwise it
    changes with the micro-batch, and this does not.

    Args:
        chosen_logprob_P: float [P], log π(y⁺|x), without the reference.
        mean_chosen_length: n̄ > 0.
    """
    return -chosen_logprob_P / mean_chosen_length


def policy_weight(chosen_mean_P: Tensor, rejected_mean_P: Tensor) -> Tensor:
    """WPO's factor of a pair's loss: how likely its responses are to come from the policy.

    exp(mean over y⁺ of s_t) · exp(mean over y⁻ of s_t), s_t = log π(y_t) − log Σ_v π(v)²; it has no
    gradient.

    Args:
        chosen_mean_P: float [P], the mean of s_t over the chosen response.
        rejected_mean_P: float [P], over the rejected one.

    References:
        Zhou et al. 2024, "WPO: enhancing RLHF with weighted preference optimization", eq. 2.
    """
    return (chosen_mean_P + rejected_mean_P).detach().exp()


def _logistic(margin_P: Tensor, label_smoothing: float) -> Tensor:
    flipped_P = label_smoothing * F.logsigmoid(-margin_P)
    return -(1 - label_smoothing) * F.logsigmoid(margin_P) - flipped_P


def _exp(exponent_P: Tensor) -> Tensor:
    return exponent_P.clamp(max=_LARGEST_EXPONENT.get(exponent_P.dtype, 700.0)).exp()


def _alpha_score(sum_P: Tensor, alpha: float) -> Tensor:
    if abs(alpha - 1) < 1e-6:  # the limit, as in TRL
        return sum_P
    return (_exp((alpha - 1) * sum_P) - 1) / (alpha - 1)


DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda sum_P, _: sum_P,
    "forward_kl": lambda sum_P, _: 1 - _exp(-sum_P),
    "js_divergence": lambda sum_P, _: math.log(2) + F.logsigmoid(sum_P),
    "alpha_divergence": _alpha_score,
}
"""``f_divergence_type`` → (A, α) → f'(e^A), which stands for A in the losses that allow it: f-DPO,
Wang et al. 2023, "Beyond reverse KL"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss and what is known about it: one row of the table, or the objective of a run."""

    function: Callable[..., Tensor]
    """Loss of each pair; signature of :func:`sigmoid`."""
    takes_label_smoothing: bool
    """Whether ``label_smoothing`` enters the formula; where it does not, a non-zero value is
    refused."""
    takes_divergence: bool = False
    """Whether it depends on Δ alone, in which f-DPO's unknown constants cancel."""
    option: str | None = None
    """A further argument of ``function``, and the option that sets it."""
    sft_weight: float = 0.0
    """What :func:`sft` weighs beside it."""
    ld_alpha: float | None = None
    """Weight of the tokens beyond the shorter response's length in both sums; None is 1."""
    use_weighting: bool = False
    """Whether :func:`policy_weight` multiplies it."""


OBJECTIVES: dict[str, Objective] = {
    "sigmoid": Objective(function=sigmoid, takes_label_smoothing=True, takes_divergence=True),
    "hinge": Objective(function=hinge, takes_label_smoothing=False, takes_divergence=True),
    "ipo": Objective(function=ipo, takes_label_smoothing=False, takes_divergence=True),
    "exo_pair": Objective(function=exo_pair, takes_label_smoothing=True, takes_divergence=True),
    "nca_pair": Objective(function=nca_pair, takes_label_smoothing=False),
    "robust": Objective(function=robust, takes_label_smoothing=True, takes_divergence=True),
    "bco_pair": Objective(function=bco_pair, takes_label_smoothing=False),
    "sppo_hard": Objective(function=sppo_hard, takes_label_smoothing=False),
    "apo_zero": Objective(function=apo_zero, takes_label_smoothing=False),
    "apo_down": Objective(function=apo_down, takes_label_smoothing=False),
    "discopop": Objective(
        function=discopop,
        takes_label_smoothing=False,
        takes_divergence=True,
        option="discopop_tau",
    ),
    "sigmoid_norm": Objective(
        function=sigmoid_norm, takes_label_smoothing=False, takes_divergence=True
    ),
    "simpo": Objective(function=simpo, takes_label_smoothing=True, option="simpo_gamma"),
    "sft": Objective(
        function=no_preference, takes_label_smoothing=False, takes_divergence=True, sft_weight=1.0
    ),
}
"""``loss_type`` → objective. Names are TRL's."""


def margin_zero_loss(objective: Objective, *, beta: float, label_smoothing: float) -> float | None:
    """Loss of a pair on which policy and reference agree (A⁺ = A⁻ = 0), whatever its lengths.

    Every run starts there, so the first step's loss is checked against this value. None where the
    loss depends on the policy's probabilities themselves.
    """
    if objective.sft_weight or objective.use_weighting:
        return None
    zero = torch.zeros(1, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.int64)
    loss_P = objective.function(
        zero,
        zero,
        chosen_length_P=one,
        rejected_length_P=one,
        beta=beta,
        label_smoothing=label_smoothing,
    )
    return float(loss_P)
