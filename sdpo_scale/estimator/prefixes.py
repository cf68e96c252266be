"""Prefix truncation: cut levels, survival function, drawn level, telescoping weights.

Shape legend: N responses, P pairs, K cut levels.

Level k = 1..K of a response of n tokens keeps its first ceil(n·k/K) tokens, or a given number of
tokens; level K is the whole response. A pair's two responses are cut at the same level. With
S_k = P(T ≥ k) the probability that the drawn level T reaches k, and ℓ_k the loss of the pair cut at
level k, the randomized telescoping estimator is

    L̂ = ℓ_0 + Σ_{k=1..T} (ℓ_k − ℓ_{k−1}) / S_k,      E[L̂] = ℓ_K  and  E[∇L̂] = ∇ℓ_K,

because a causal model's log-probabilities of a prefix do not depend on what follows it, so that
ℓ_1 … ℓ_T are known exactly once level T is executed. It holds for any loss of the two sums, linear
in them or not. Weighting the token sums instead and applying the loss afterwards would be biased.

With increments d_k = ∇ℓ_k − ∇ℓ_{k−1}, second moment E‖∇L̂‖² = Σ_{j,k} ⟨d_j, d_k⟩ / S_min(j,k).

References:
    Kahn 1955, "Use of different Monte Carlo sampling techniques" (Russian roulette); Rhee & Glynn
    2015, "Unbiased estimation with square root convergence for SDE models", eq. 4; Beatson & Adams
    2019, "Efficient optimization of loops and limits with randomized telescoping sums", eq. 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "SURVIVAL_SHAPES",
    "PrefixDesign",
    "block_lengths",
    "cut_lengths",
    "draw_levels",
    "geometric",
    "second_moment",
    "telescoping_weights",
    "token_survival",
    "uniform_floor",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixDesign:
    """Cut levels and the probability of reaching each.

    Raises:
        ValueError: survival that does not start at 1, increases, or is not positive; token counts
            that do not match or do not increase.
    """

    survival: tuple[float, ...]
    """S_1 = 1 ≥ S_2 ≥ … ≥ S_K > 0."""
    token_counts: tuple[int, ...] | None = None
    """Tokens kept at levels 1..K−1, where levels are counts; None for the fractions k/K."""

    def __post_init__(self) -> None:
        """Checks survival and counts."""
        if not self.survival or self.survival[0] != 1:
            raise ValueError(f"survival must start with S_1 = 1, got {list(self.survival)}")
        if (
            any(not later <= earlier for earlier, later in pairwise(self.survival))
            or not self.survival[-1] > 0
        ):
            raise ValueError(
                f"survival must not increase and must stay positive, got {list(self.survival)}"
            )
        if self.token_counts is None:
            return
        if len(self.token_counts) != self.num_levels - 1:
            raise ValueError(
                f"{self.num_levels} survival probabilities need {self.num_levels - 1} token counts "
                f"(the last level is the whole response), got {len(self.token_counts)}"
            )
        counts = (0, *self.token_counts)
        if any(later <= earlier for earlier, later in pairwise(counts)):
            raise ValueError(f"token counts must increase from 1 on, got {list(self.token_counts)}")

    @property
    def num_levels(self) -> int:
        """K."""
        return len(self.survival)


def uniform_floor(num_levels: int, full_probability: float) -> tuple[float, ...]:
    """Survival of: the whole pair with probability q, else a level drawn uniformly from 1..K.

    S_k = 1 − (1 − q)·(k − 1)/K.

    Args:
        num_levels: K ≥ 1.
        full_probability: q in (0, 1], the floor under every S_k.

    Raises:
        ValueError: a value out of range.
    """
    _check(num_levels, full_probability, name="full_probability")
    return tuple(1 - (1 - full_probability) * k / num_levels for k in range(num_levels))


def geometric(num_levels: int, ratio: float) -> tuple[float, ...]:
    """Survival S_k = r^(k−1): each further level is reached with probability r.

    Args:
        num_levels: K ≥ 1.
        ratio: r in (0, 1].

    Raises:
        ValueError: a value out of range.
    """
    _check(num_levels, ratio, name="ratio")
    return tuple(ratio**k for k in range(num_levels))


SURVIVAL_SHAPES = {"uniform_floor": uniform_floor, "geometric": geometric}
"""Name → (number of levels, parameter) → survival probabilities."""


def cut_lengths(lengths_N: NDArray[np.int64], design: PrefixDesign) -> NDArray[np.int64]:
    """Tokens that each level keeps of each response.

    Args:
        lengths_N: int [N], n ≥ 0.
        design: the levels.

    Returns:
        int [N, K+1], column k the tokens of level k, from 0 up to n. A response with fewer tokens
        than levels repeats lengths; the increments of repeated levels are 0.
    """
    num_levels = design.num_levels
    if design.token_counts is None:
        levels = np.arange(num_levels + 1)
        return -(-lengths_N[:, None] * levels // num_levels)  # ceil in integers
    kept = np.minimum(np.array([0, *design.token_counts]), lengths_N[:, None])
    return np.concatenate([kept, lengths_N[:, None]], axis=1)


def draw_levels(uniforms_P: NDArray[np.float64], design: PrefixDesign) -> NDArray[np.int64]:
    """The drawn level of each pair, int [P] in 1..K, with P(T ≥ k) = S_k.

    Args:
        uniforms_P: float [P] in [0, 1).
        design: the survival function.
    """
    levels_P: NDArray[np.int64] = (uniforms_P[:, None] < np.array(design.survival)).sum(axis=1)
    return levels_P


def telescoping_weights(
    levels_P: NDArray[np.int64], survival: Sequence[float]
) -> NDArray[np.float64]:
    """The estimator's weights of the losses ℓ_1 … ℓ_K, float [P, K].

    Collecting L̂ by levels, ℓ_k has the weight 1/S_k − 1/S_{k+1} for k < T and 1/S_T for k = T;
    beyond T it is 0. ℓ_0 has the weight 1 − 1/S_1 = 0 and is left out.

    Args:
        levels_P: int [P], drawn levels T in 1..K.
        survival: S_1 … S_K.
    """
    inverse = 1 / np.asarray(survival, dtype=np.float64)
    k = np.arange(1, len(inverse) + 1)
    differences = inverse - np.append(inverse[1:], np.inf)
    weights = np.where(k < levels_P[:, None], differences, 0.0)
    return np.where(k == levels_P[:, None], inverse, weights)


def block_lengths(cuts_NK1: NDArray[np.int64], executed_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Executed tokens between neighbouring levels, int [N, K]; their sum is ``executed_N``.

    Args:
        cuts_NK1: int [N, K+1], from :func:`cut_lengths`.
        executed_N: int [N], executed tokens of each response.
    """
    return np.diff(np.minimum(cuts_NK1, executed_N[:, None]), axis=1)


def token_survival(
    cuts_NK1: NDArray[np.int64], executed_N: NDArray[np.int64], survival: Sequence[float]
) -> NDArray[np.float64]:
    """S(t) of every executed token, float [Σ executed_N]: the survival of the level that adds it.

    Where coefficients are exact before the cut is drawn, each token's gradient is weighted by
    1/S(t) and no telescoping is needed: P(token t is kept) = S(t).
    """
    blocks_NK = block_lengths(cuts_NK1, executed_N)
    survival_NK = np.broadcast_to(np.asarray(survival, dtype=np.float64), blocks_NK.shape)
    return np.repeat(survival_NK.ravel(), blocks_NK.ravel())


def second_moment(gram_KK: NDArray[np.float64], survival: Sequence[float]) -> float:
    """E‖∇L̂‖² = Σ_{j,k} ⟨d_j, d_k⟩ / S_min(j,k).

    Args:
        gram_KK: float [K, K], inner products ⟨d_j, d_k⟩ of the gradient's increments.
        survival: S_1 … S_K.
    """
    k = np.arange(len(survival))
    least = np.minimum(k[:, None], k[None, :])
    return float((gram_KK / np.asarray(survival)[least]).sum())


def _check(num_levels: int, probability: float, *, name: str) -> None:
    if num_levels < 1:
        raise ValueError(f"the number of cut levels must be at least 1, got {num_levels}")
    if not 0 < probability <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {probability}")
