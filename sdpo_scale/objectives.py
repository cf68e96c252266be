"""Pairwise preference losses: pure functions of the two log-ratio sums of a pair.

Shape legend: P pairs. The two sums of a pair are

    A⁺ = Σ_t log π(y⁺_t | x, y⁺_<t) − log π_ref(y⁺_t | x, y⁺_<t)      ``chosen_sum_P``, nats
    A⁻ = the same over the rejected response                             ``rejected_sum_P``, nats

and Δ = A⁺ − A⁻. A loss returns one value per pair; who averages, and over what, is decided in one
place (``step.py``: the mean over all pairs of the optimizer step). A new loss is one function and
one row of ``OBJECTIVES``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["OBJECTIVES", "Objective", "hinge", "ipo", "margin_zero_loss", "robust", "sigmoid"]


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
    margin_P = beta * (chosen_sum_P - rejected_sum_P)
    return -(1 - label_smoothing) * F.logsigmoid(margin_P) - label_smoothing * F.logsigmoid(
        -margin_P
    )


def hinge(
    chosen_sum_P: Tensor,
    rejected_sum_P: Tensor,
    *,
    chosen_length_P: Tensor,
    rejected_length_P: Tensor,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """Hinge loss on the margin: ℓ = max(0, 1 − βΔ).

    Arguments and shapes as in :func:`sigmoid`; ``label_smoothing`` must be 0 (checked by the
    config).

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
    label_smoothing: float,
) -> Tensor:
    """Identity preference optimization on token averages: ℓ = (A⁺/n⁺ − A⁻/n⁻ − 1/(2β))².

    The averaged form is the one TRL trains; on sums the squared target would depend on the
    responses' lengths. Arguments and shapes as in :func:`sigmoid`; ``label_smoothing`` must be 0.

    References:
        Azar et al. 2023, "A general theoretical paradigm to understand learning from human
        preferences", eq. 17 (τ there is β here).
    """
    difference_P = chosen_sum_P / chosen_length_P - rejected_sum_P / rejected_length_P
    return (difference_P - 1 / (2 * beta)) ** 2


def robust(
    chosen_sum_P: Tensor,
    rejected_sum_P: Tensor,
    *,
    chosen_length_P: Tensor,
    rejected_length_P: Tensor,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """Loss that is unbiased under labels flipped at random with probability ε.

    ℓ = [−(1−ε) log σ(βΔ) + ε log σ(−βΔ)] / (1 − 2ε)

    Arguments and shapes as in :func:`sigmoid`.

    References:
        Chowdhury et al. 2024, "Provably robust DPO", eq. 12.
    """
    margin_P = beta * (chosen_sum_P - rejected_sum_P)
    weighted_P = -(1 - label_smoothing) * F.logsigmoid(margin_P)
    weighted_P = weighted_P + label_smoothing * F.logsigmoid(-margin_P)
    return weighted_P / (1 - 2 * label_smoothing)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One row of the loss table."""

    function: Callable[..., Tensor]
    """Loss of each pair; signature of :func:`sigmoid`."""
    takes_label_smoothing: bool
    """Whether ``label_smoothing`` enters the formula; where it does not, a non-zero value is
    refused."""


OBJECTIVES: dict[str, Objective] = {
    "sigmoid": Objective(function=sigmoid, takes_label_smoothing=True),
    "hinge": Objective(function=hinge, takes_label_smoothing=False),
    "ipo": Objective(function=ipo, takes_label_smoothing=False),
    "robust": Objective(function=robust, takes_label_smoothing=True),
    "nca_pair": Objective(function=nca_pair, takes_label_smoothing=False),
    "bco_pair": Objective(function=bco_pair, takes_label_smoothing=False),
    "sppo_hard": Objective(function=sppo_hard, takes_label_smoothing=False),
    "apo_zero": Objective(function=apo_zero, takes_label_smoothing=False),
    "apo_down": Objective(function=apo_down, takes_label_smoothing=False),
    "sigmoid_norm": Objective(function=sigmoid_norm, takes_label_smoothing=False),
}
"""``loss_type`` → objective. Names are TRL's."""


def margin_zero_loss(objective: Objective, *, beta: float, label_smoothing: float) -> float:
    """Loss of a pair on which policy and reference agree (A⁺ = A⁻ = 0), whatever its lengths.

    Every run starts there, so the first step's loss is checked against this value.
    """
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
