"""Sampling designs: random subsets of N units in which unit i has a given probability π_i.

Shape legend: N units; L ≤ N of them have π < 1, laid in a line in ascending order of given keys.

A design fixes more than the inclusion probabilities π_i = P(unit i is kept): it also fixes how many
units are kept, and which are kept together. The Horvitz–Thompson estimator is unbiased under each
of the three; they differ in variance and in how steady the number of kept units is.

    design      number kept        randomness used
    poisson     anything in 0..N   N numbers, one per unit
    systematic  ⌊Σπ⌋ or ⌈Σπ⌉       one number
    pivotal     ⌊Σπ⌋ or ⌈Σπ⌉       at most N decisions

The last two compute with π as integers in units of 2^-64 (rounded up, so that no unit gets lost).
A double in [2^-11, 1) is such an integer, so sums of probabilities are exact, and "Σπ" above is
the sum of the very numbers given; smaller π change by less than 2^-64 each. In floating point ten
units of 0.1 end at 0.9999999999999999, a residue of rounding that could keep or lose a unit.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["pivotal", "poisson", "systematic"]

Floats = NDArray[np.float64]
_ONE = 2**64  # probability 1 in fixed point; unsigned 64-bit sums wrap there


def poisson(probabilities_N: Floats, *, uniforms_N: Floats) -> NDArray[np.bool_]:
    """Independent coins: unit i is kept where u_i < π_i.

    P(unit i is kept) = π_i for u_i uniform on [0, 1), and units are independent if the u_i are. The
    number kept has the mean Σπ and the variance Σ π(1 − π).

    Args:
        probabilities_N: float64 [N] in (0, 1].
        uniforms_N: float64 [N] in [0, 1).

    Returns:
        bool [N], true where a unit is kept; always where π = 1.

    References:
        Hájek 1964, "Asymptotic theory of rejective sampling with varying probabilities from a
        finite population" (Poisson sampling).
    """
    _check(probabilities_N, uniforms_N)
    assert ((uniforms_N >= 0) & (uniforms_N < 1)).all(), "uniforms must be in [0, 1)"
    kept_N: NDArray[np.bool_] = uniforms_N < probabilities_N
    return kept_N


def systematic(probabilities_N: Floats, *, start: float, order_N: Floats) -> NDArray[np.bool_]:
    """Systematic sampling: a comb with teeth at start, start + 1, … over the units' intervals.

    The units lie end to end on a line, unit i as an interval of length π_i; it is kept if a tooth
    falls into its interval. With π = 0.5, 0.25, 0.75, 0.5 in this order, start = 0.8
    keeps units 2 and 3:

        0       0.5 0.75        1.5     2
        |---0---|-1-|-----2-----|---3---|
                     ^ 0.8           ^ 1.8

    P(unit i is kept) = π_i for start uniform on [0, 1), whatever the order, as long as the order
    does not depend on start: modulo 1 the interval is an arc of length π_i of a circle, and start
    a uniform point on it. The number kept is the number of teeth on the line, ⌊Σπ⌋ or ⌈Σπ⌉.

    In a fixed order some units can never be kept together. That changes the estimator's variance,
    never its mean; random keys in ``order_N`` make it an average over orders.

    Differences from the textbook:
        1. Units with π = 1 are kept and do not lie on the line; a rounded end of an interval of
           length 1 could not lose them. The other units are kept as if they were alone.
        2. Σπ need not be an integer.
        3. Arcs of the circle are compared in wrapping integers, so nothing is rounded.

    Args:
        probabilities_N: float64 [N] in (0, 1].
        start: the one uniform number, in [0, 1).
        order_N: float64 [N], the line is in ascending order of these; ties by index.

    Returns:
        bool [N], true where a unit is kept.

    References:
        Madow 1949, "On the theory of systematic sampling, II" (unequal probabilities).
    """
    _check(probabilities_N, order_N)
    assert 0 <= start < 1, f"start must be in [0, 1), got {start}"
    line_L, arcs_L = _line(probabilities_N, order_N)
    kept_N: NDArray[np.bool_] = probabilities_N == 1
    begins_L = np.cumsum(arcs_L, dtype=np.uint64) - arcs_L  # modulo 1, both
    distances_L = np.uint64(int(start * _ONE)) - begins_L  # from an arc's begin onward to start
    kept_N[line_L] = distances_L < arcs_L
    return kept_N


def pivotal(
    probabilities_N: Floats, *, decide: Callable[[float], bool], order_N: Floats
) -> NDArray[np.bool_]:
    """Ordered pivotal sampling: duels along a line, the one who stays open meets the next unit.

    Of two open units with p and q, one is settled by the duel:

        p + q < 1   one leaves, the other goes on with p + q:  the first with probability p/(p+q)
        p + q ≥ 1   one is kept, the other goes on with p + q − 1:
                    the first is kept with probability (1−q)/(2−p−q)

    Either way the expectation of both units' probabilities stays what it was, (p, q), so they are
    a martingale from π to 0 or 1 and P(unit i is kept) = π_i, whatever the order, as long as the
    order does not depend on the decisions. A duel also keeps the sum of probabilities, so the
    number kept is ⌊Σπ⌋ or ⌈Σπ⌉. Neighbours on the line are seldom kept together.

    Differences from the textbook:
        1. The line is given, where the textbook draws the two units of each duel at random; random
           keys in ``order_N`` bring chance back without a change to any π.
        2. Σπ need not be an integer: the last unit left open with p > 0 is kept with probability
           p, as if it met a unit outside the sample.
        3. Probabilities are integers in units of 2^-64: sums are exact and a unit ends at 0 or 1
           exactly, where floating point leaves an open unit with 1e-17 or 1 − 1e-16.

    Args:
        probabilities_N: float64 [N] in (0, 1]. Units with π = 1 are kept and fight no duel.
        decide: answers True with the probability it is given, independently at every call; at most
            one call for every unit with π < 1. The probability is in (0, 1], rounded to a double.
        order_N: float64 [N], the line is in ascending order of these; ties by index.

    Returns:
        bool [N], true where a unit is kept.

    References:
        Deville & Tillé 1998, "Unequal probability sampling without replacement through a splitting
        method" (the pivotal method); Chauvet 2012, "On a characterization of ordered pivotal
        sampling" (in a given order).
    """
    _check(probabilities_N, order_N)
    line_L, shares_L = _line(probabilities_N, order_N)
    kept_N: NDArray[np.bool_] = probabilities_N == 1
    first, p = 0, 0  # p = 0: no unit is open
    for second, q in zip(line_L.tolist(), shares_L.tolist(), strict=True):
        if p == 0:
            first, p = second, q
        elif p + q < _ONE:
            first = first if decide(p / (p + q)) else second
            p += q
        else:
            first_is_kept = decide((_ONE - q) / (2 * _ONE - p - q))
            kept, first = (first, second) if first_is_kept else (second, first)
            kept_N[kept] = True
            p += q - _ONE
    if p > 0 and decide(p / _ONE):
        kept_N[first] = True
    return kept_N


def _line(probabilities_N: Floats, order_N: Floats) -> tuple[NDArray[np.intp], NDArray[np.uint64]]:
    """Indices of the units with π < 1 along the line, and their π in units of 2^-64, both [L]."""
    indices_N = np.argsort(order_N, kind="stable")
    line_L = indices_N[probabilities_N[indices_N] < 1]
    return line_L, np.ceil(probabilities_N[line_L] * float(_ONE)).astype(np.uint64)


def _check(probabilities_N: Floats, keys_N: Floats) -> None:
    assert probabilities_N.ndim == 1, probabilities_N.shape
    assert keys_N.shape == probabilities_N.shape, (keys_N.shape, probabilities_N.shape)
    assert ((probabilities_N > 0) & (probabilities_N <= 1)).all(), "π must be in (0, 1]"
    assert not np.isnan(keys_N).any(), "a key is not a number"
