"""Branch pruning: inclusion probabilities under a budget, Horvitz–Thompson weights, inflation.

Shape legend: N branches. A branch is a pair, or one response of a pair.

Branch i contributes the gradient G_i, whose norm is about the importance w_i. It is kept with
probability π_i > 0 and then weighted by 1/π_i:

    Ĝ = Σ_{i kept} G_i / π_i,      E[Ĝ] = Σ_i G_i  for any π and any design with these π_i,

the Horvitz–Thompson estimator. Among independent draws with the same expected cost Σ cost_i·π_i,
π_i ∝ w_i / √cost_i has the least Σ w_i²/π_i (by Cauchy–Schwarz), capped at 1. The *variance
inflation* is Σ w_i²/π_i / Σ w_i² ≥ 1: the second moment of a branch's weighted gradient over that
of the dense one. A floor under π bounds the largest weight; a weight is never clipped, which would
be a bias.

References:
    Horvitz & Thompson 1952, "A generalization of sampling without replacement from a finite
    universe"; Särndal, Swensson & Wretman 1992, "Model assisted survey sampling", §3.7 (optimal
    allocation under unequal costs).
"""

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "budget_scale",
    "effective_sample_size",
    "fraction_scale",
    "importance_probabilities",
    "variance_inflation",
]

Floats = NDArray[np.float64]
_BISECTIONS = 100  # from any bracket to the last bit of a double


def importance_probabilities(
    importance_N: Floats, cost_N: Floats, *, scale: float, floor: float
) -> Floats:
    """π_i = c·w_i/√cost_i between the floor and 1, float [N].

    Args:
        importance_N: float [N], w_i ≥ 0, proportional to the gradient's norm.
        cost_N: float [N], cost_i > 0, tokens.
        scale: c ≥ 0, from :func:`budget_scale` or :func:`fraction_scale`; infinite keeps all.
        floor: π_min in (0, 1].
    """
    if np.isinf(scale):
        return np.ones_like(importance_N)
    return np.clip(scale * importance_N / np.sqrt(cost_N), floor, 1.0)


def variance_inflation(importance_N: Floats, probabilities_N: Floats) -> float:
    """Σ w_i²/π_i / Σ w_i²; 1 where every importance is 0."""
    total = float((importance_N**2).sum())
    return float((importance_N**2 / probabilities_N).sum()) / total if total > 0 else 1.0


def budget_scale(
    importance_N: Floats,
    cost_N: Floats,
    *,
    inflation: float,
    floor: float,
    step_N: NDArray[np.int64] | None = None,
) -> float:
    """The c of least cost whose variance inflation is at most the given one.

    Args:
        importance_N: float [N].
        cost_N: float [N].
        inflation: how much of the dense second moment is acceptable, ≥ 1.
        floor: π_min.
        step_N: int [N], the step that each branch belongs to, from 0 on; the inflation is then the
            mean over steps. One step if None.

    Returns:
        c ≥ 0; infinite (keep all) if nothing is known or every importance is 0.
    """
    steps_N = np.zeros(len(importance_N), dtype=np.int64) if step_N is None else step_N
    total_S = np.bincount(steps_N, importance_N**2)
    has_any_S = total_S > 0
    if inflation <= 1 or not has_any_S.any():
        return np.inf

    def is_enough(scale: float) -> bool:
        probabilities_N = importance_probabilities(importance_N, cost_N, scale=scale, floor=floor)
        weighted_S = np.bincount(steps_N, importance_N**2 / probabilities_N)
        return float((weighted_S[has_any_S] / total_S[has_any_S]).mean()) <= inflation

    return _least_scale(importance_N, cost_N, floor, is_enough)


def fraction_scale(
    importance_N: Floats, cost_N: Floats, *, keep_fraction: float, floor: float
) -> float:
    """The c whose expected cost Σ cost_i·π_i is the given fraction of Σ cost_i.

    Args:
        importance_N: float [N].
        cost_N: float [N].
        keep_fraction: in (0, 1]; below the floor, the floor is what is kept.
        floor: π_min.

    Returns:
        c ≥ 0; infinite if nothing is known (N = 0).
    """

    def is_enough(scale: float) -> bool:
        probabilities_N = importance_probabilities(importance_N, cost_N, scale=scale, floor=floor)
        return float((cost_N * probabilities_N).sum()) >= keep_fraction * float(cost_N.sum())

    return np.inf if keep_fraction >= 1 else _least_scale(importance_N, cost_N, floor, is_enough)


def effective_sample_size(ht_weights_N: Floats) -> float:
    """Kish's (Σ h)² / Σ h² of the kept branches' weights h = 1/π; 0 if none was kept.

    References:
        Kish 1965, "Survey sampling", §11.7.
    """
    return float(ht_weights_N.sum() ** 2 / (ht_weights_N**2).sum()) if len(ht_weights_N) else 0.0


def _least_scale(importance_N: Floats, cost_N: Floats, floor: float, is_enough) -> float:  # type: ignore[no-untyped-def]
    """The least c that is enough; being enough never ends as c grows."""
    if len(importance_N) == 0:
        return np.inf
    if is_enough(0.0):
        return 0.0
    ratios = np.sqrt(cost_N[importance_N > 0]) / importance_N[importance_N > 0]
    if len(ratios) == 0:  # equal for every scale: keep all rather than guess
        return np.inf
    low, high = np.log(floor * ratios.min()), np.log(ratios.max())
    if not is_enough(np.exp(high)):  # what is missing are branches that have no gradient
        return float(np.exp(high))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(np.exp(middle)) else (middle, high)
    return float(np.exp(high))
