"""Inclusion probabilities of the sampling designs by exact enumeration: P(unit i is kept) = π_i.

Systematic sampling is constant between neighbouring breakpoints of its start, pivotal sampling is
a tree of two-way decisions; both are enumerated with every outcome's probability.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo_scale.estimator.designs import pivotal, poisson, systematic

INCLUSION = 1e-12
"""Absolute. A few hundred roundings of 1e-16, times slack."""

Outcomes = list[tuple[float, np.ndarray]]
"""Every outcome: its probability, and bool [N]."""

TABLE = {
    "one": [0.3],
    "one-certain": [1.0],
    "all-certain": [1.0, 1.0, 1.0],
    "equal": [0.4] * 5,
    "sum-integer": [0.5, 0.25, 0.75, 0.5],
    "sum-integer-up-to-rounding": [0.1, 0.2, 0.7, 0.3, 0.7],
    "sum-below-1": [0.1, 0.05, 0.2],
    "large": [0.9, 0.95, 0.99, 0.8],
    "certain-among-others": [0.3, 1.0, 0.6, 1.0, 0.45],
    "tiny": [1e-9, 0.5, 1e-15, 0.7, 1e-300],
    "next-to-1": [1 - 2**-53, 0.5, 1 - 1e-9, 2**-53],
}
cases = pytest.mark.parametrize("pi", list(map(np.array, TABLE.values())), ids=list(TABLE))


def systematic_outcomes(pi: np.ndarray, order: np.ndarray) -> Outcomes:
    """One start from every piece between breakpoints, with the piece's length."""
    line = sorted(np.flatnonzero(pi < 1), key=lambda i: order[i])
    ends = [Fraction(0)]
    for i in line:
        ends.append((ends[-1] + Fraction(float(pi[i]))) % 1)
    outcomes = []
    for begin, end in pairwise(sorted({*ends, Fraction(1)})):
        # The middle of a piece below 1e-16 may round into its neighbour: an error of that length.
        start = min(float((begin + end) / 2), math.nextafter(1, 0))
        outcomes.append((float(end - begin), systematic(pi, start=start, order_N=order)))
    return outcomes


def decision_tree(run: Callable[[Callable[[float], bool]], np.ndarray]) -> Outcomes:
    """Every leaf: replays a script of answers, says True from there on, and queues the others."""
    outcomes = []
    scripts: list[list[bool]] = [[]]
    while scripts:
        script, asked = scripts.pop(), []

        def decide(p: float, script: list[bool] = script, asked: list = asked) -> bool:
            answer = script[len(asked)] if len(asked) < len(script) else True
            asked.append((p, answer))
            return answer

        kept = run(decide)
        outcomes.append((math.prod(p if answer else 1 - p for p, answer in asked), kept))
        answers = [answer for _, answer in asked]
        scripts += [[*answers[:k], False] for k in range(len(script), len(answers))]
    return outcomes


def pivotal_outcomes(pi: np.ndarray, order: np.ndarray) -> Outcomes:
    return decision_tree(lambda decide: pivotal(pi, decide=decide, order_N=order))


DESIGNS = {"systematic": systematic_outcomes, "pivotal": pivotal_outcomes}
designs = pytest.mark.parametrize("design", list(DESIGNS.values()), ids=list(DESIGNS))


def inclusion_error(outcomes: Outcomes, pi: np.ndarray) -> float:
    kept_probability = sum(probability * kept for probability, kept in outcomes)
    return float(np.abs(kept_probability - pi).max())


def check(outcomes: Outcomes, pi: np.ndarray) -> None:
    assert sum(probability for probability, _ in outcomes) == pytest.approx(1, abs=INCLUSION)
    assert inclusion_error(outcomes, pi) <= INCLUSION
    # Outcomes of rounding's size: a sum that is an integer only up to rounding has a third count.
    counts = {int(kept.sum()) for probability, kept in outcomes if probability > INCLUSION}
    assert max(counts) - min(counts) <= 1
    assert min(counts) <= math.fsum(pi) + INCLUSION
    assert max(counts) >= math.fsum(pi) - INCLUSION
    exact = sum(map(Fraction, pi.tolist()))
    rounded_up = exact + Fraction(len(pi), 2**64)
    for _, kept in outcomes:
        assert math.floor(exact) <= kept.sum() <= math.ceil(rounded_up)


@designs
@cases
def test_inclusion_probabilities_are_the_requested_ones_in_every_order(design, pi):
    for order in permutations(range(len(pi))):
        check(design(pi, np.array(order, dtype=np.float64)), pi)


@designs
@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    pi=st.lists(
        st.one_of(st.floats(1e-3, 1), st.sampled_from([0.1, 0.25, 0.5, 1.0])),
        min_size=1,
        max_size=8,
    ).map(np.array),
    seed=st.integers(0, 2**32 - 1),
)
def test_inclusion_probabilities_are_the_requested_ones_for_random_probabilities(design, pi, seed):
    check(design(pi, np.random.default_rng(seed).random(len(pi))), pi)


@designs
def test_the_number_kept_varies_by_at_most_one(design):
    pi = np.array([0.35, 0.6, 0.8, 0.15, 0.55, 0.9, 0.25])  # 3.6
    order = np.random.default_rng(1).random(7)
    outcomes = design(pi, order)
    assert {int(kept.sum()) for _, kept in outcomes} == {3, 4}
    four = sum(probability for probability, kept in outcomes if kept.sum() == 4)
    assert four == pytest.approx(0.6, abs=INCLUSION)


@designs
def test_the_number_kept_is_constant_where_the_sum_is_an_integer(design):
    for pi in ([0.5, 0.25, 0.75, 0.5], [0.125, 0.875, 0.625, 0.375, 1.0], [0.75] * 8):
        outcomes = design(np.array(pi), np.arange(float(len(pi))))
        assert {int(kept.sum()) for _, kept in outcomes} == {int(sum(pi))}


@designs
def test_horvitz_thompson_sums_are_unbiased(design):
    """What the designs are for: E[Σ_{kept} y/π] = Σ y."""
    rng = np.random.default_rng(4)
    pi, order, values = rng.uniform(0.05, 1, 8), rng.random(8), rng.normal(size=8)
    outcomes = design(pi, order)
    expected = sum(probability * (values / pi)[kept].sum() for probability, kept in outcomes)
    assert expected == pytest.approx(values.sum(), abs=10 * INCLUSION)


@cases
def test_poisson_inclusion_probabilities_are_the_requested_ones_and_independent(pi):
    """Every cell of the cube that the thresholds u_i = π_i cut into 2^N, by one point in it."""
    outcomes = []
    for code in range(2 ** len(pi)):
        below = np.array([code >> i & 1 for i in range(len(pi))], dtype=bool)
        if (pi[~below] == 1).any():
            continue  # an empty cell
        inside = np.where(below, pi / 2, pi)  # the threshold itself belongs to the upper cell
        kept = poisson(pi, uniforms_N=inside)
        assert kept.tolist() == below.tolist()
        outcomes.append((float(np.prod(np.where(below, pi, 1 - pi))), kept))
    assert sum(probability for probability, _ in outcomes) == pytest.approx(1, abs=INCLUSION)
    assert inclusion_error(outcomes, pi) <= INCLUSION


def test_a_wrong_coin_is_seen():
    """The enumeration would notice duels decided with other probabilities."""
    pi, order = np.array([0.3, 0.6, 0.4]), np.arange(3.0)

    def wrong(decide: Callable[[float], bool]) -> np.ndarray:
        return pivotal(pi, decide=lambda p: decide(p**1.001), order_N=order)

    assert inclusion_error(decision_tree(wrong), pi) > 1e-5
