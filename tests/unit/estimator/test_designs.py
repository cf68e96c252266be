"""Sampling designs: worked examples, edges, the number of units kept.

That inclusion probabilities are right is shown by enumeration in
``exactness/test_design_inclusion_probabilities.py``.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo_scale.estimator.designs import pivotal, poisson, systematic

JUST_BELOW_1 = math.nextafter(1, 0)
EXAMPLE = np.array([0.5, 0.25, 0.75, 0.5])
IN_ORDER = np.arange(4.0)

probabilities = st.lists(
    st.one_of(
        st.floats(0.01, 1),
        st.floats(1e-300, 1e-3),
        st.sampled_from([1.0, JUST_BELOW_1, 0.5, 0.1, 1 / 3, 2**-64, 5e-324]),
    ),
    min_size=1,
    max_size=40,
).map(np.array)
starts = st.one_of(st.floats(0, JUST_BELOW_1), st.sampled_from([0.0, 0.5, JUST_BELOW_1]))


def coins(rng: np.random.Generator) -> Callable[[float], bool]:
    return lambda p: bool(rng.random() < p)


def allowed_counts(probabilities_N: np.ndarray) -> range:
    """⌊Σπ⌋ to ⌈Σπ⌉ of the exact sum of the doubles, each up to 2^-64."""
    total = sum(map(Fraction, probabilities_N.tolist()))
    rounded_up = total + Fraction(len(probabilities_N), 2**64)
    return range(math.floor(total), math.ceil(rounded_up) + 1)


# Poisson


def test_poisson_keeps_where_the_coin_is_below_the_probability():
    kept = poisson(EXAMPLE, uniforms_N=np.array([0.49, 0.25, 0.8, 0.0]))
    assert kept.dtype == np.bool_
    assert kept.tolist() == [True, False, False, True]


def test_poisson_keeps_every_unit_of_probability_1():
    assert poisson(np.ones(3), uniforms_N=np.array([0, 0.5, JUST_BELOW_1])).all()


def test_poisson_coins_outside_the_unit_interval_are_refused():
    for u in (-0.1, 1.0, math.nan):
        with pytest.raises(AssertionError):
            poisson(np.ones(1), uniforms_N=np.array([u]))


# Systematic


@pytest.mark.parametrize(
    ("start", "kept"),
    [(0.0, [0, 2]), (0.49, [0, 2]), (0.5, [1, 3]), (0.74, [1, 3]), (0.75, [2, 3]), (0.8, [2, 3])],
)
def test_systematic_keeps_the_units_under_the_teeth(start: float, kept: list[int]):
    """Intervals 0–0.5–0.75–1.5–2; teeth at start and start + 1; left ends belong to a unit."""
    result = systematic(EXAMPLE, start=start, order_N=IN_ORDER)
    assert result.dtype == np.bool_
    assert np.flatnonzero(result).tolist() == kept


def test_systematic_lays_the_line_in_ascending_order_of_the_keys():
    """The line is 3, 2, 1, 0: intervals 0–0.5–1.25–1.5–2."""
    kept = systematic(EXAMPLE, start=0.3, order_N=-IN_ORDER)
    assert np.flatnonzero(kept).tolist() == [1, 3]


def test_systematic_result_does_not_depend_on_how_units_are_numbered():
    rng = np.random.default_rng(3)
    pi, keys = rng.uniform(0.05, 1, 30), rng.random(30)
    kept = systematic(pi, start=0.37, order_N=keys)
    shuffled = rng.permutation(30)
    again = systematic(pi[shuffled], start=0.37, order_N=keys[shuffled])
    assert again.tolist() == kept[shuffled].tolist()


@pytest.mark.parametrize("start", [0.0, 0.3, JUST_BELOW_1])
def test_ten_tenths_keep_exactly_one_although_their_float_sum_is_below_1(start: float):
    """The exact sum of ten doubles 0.1 is 1 + 5.6e-17: only start = 0 may find a second unit."""
    pi = np.full(10, 0.1)
    assert np.cumsum(pi)[-1] < 1
    count = systematic(pi, start=start, order_N=np.arange(10.0)).sum()
    assert count == 1 or (start == 0 and count == 2)


@pytest.mark.parametrize("start", [0.0, 0.3, JUST_BELOW_1])
def test_quarters_keep_exactly_a_quarter(start: float):
    assert systematic(np.full(400, 0.25), start=start, order_N=np.zeros(400)).sum() == 100


def test_a_start_outside_the_unit_interval_is_refused():
    for start in (-0.1, 1.0, math.nan):
        with pytest.raises(AssertionError):
            systematic(np.ones(1), start=start, order_N=np.zeros(1))


# Pivotal


def test_pivotal_fights_the_duels_of_the_definition():
    """0.5 and 0.25 → one has 0.75; with 0.75 → one is kept, 0.5 left; with 0.5 → one is kept."""
    asked: list[float] = []

    def first_always_wins(p: float) -> bool:
        asked.append(p)
        return True

    kept = pivotal(EXAMPLE, decide=first_always_wins, order_N=IN_ORDER)
    assert kept.dtype == np.bool_
    assert asked == [0.5 / 0.75, 0.25 / 0.5, 0.5 / 1]
    assert np.flatnonzero(kept).tolist() == [0, 2]


def test_pivotal_second_can_win_every_duel():
    kept = pivotal(EXAMPLE, decide=lambda p: False, order_N=IN_ORDER)
    assert np.flatnonzero(kept).tolist() == [2, 3]


def test_pivotal_fights_in_ascending_order_of_the_keys():
    kept = pivotal(EXAMPLE, decide=lambda p: True, order_N=-IN_ORDER)
    assert np.flatnonzero(kept).tolist() == [2, 3]


@pytest.mark.parametrize("answer", [True, False])
def test_pivotal_asks_a_lone_unit_for_its_own_probability(answer: bool):
    asked: list[float] = []

    def decide(p: float) -> bool:
        asked.append(p)
        return answer

    assert pivotal(np.array([0.3]), decide=decide, order_N=np.zeros(1)).tolist() == [answer]
    assert asked == [0.3]


def test_pivotal_leaves_no_unit_open_where_probabilities_sum_to_an_integer():
    """Three decisions for four quarters: the last duel settles both."""
    asked: list[float] = []

    def decide(p: float) -> bool:
        asked.append(p)
        return False

    assert pivotal(np.full(4, 0.25), decide=decide, order_N=IN_ORDER).sum() == 1
    assert asked == [1 / 2, 2 / 3, 3 / 4]


@settings(derandomize=True, max_examples=50, deadline=None)
@given(probabilities)
def test_pivotal_asks_at_most_once_per_uncertain_unit_and_only_for_probabilities(pi):
    asked: list[float] = []

    def decide(p: float) -> bool:
        asked.append(p)
        return len(asked) % 2 == 0

    pivotal(pi, decide=decide, order_N=np.zeros(len(pi)))
    assert len(asked) <= (pi < 1).sum()
    assert all(0 < p <= 1 for p in asked)


# Both


@settings(derandomize=True, max_examples=150, deadline=None)
@given(probabilities, starts, st.integers(0, 2**32 - 1))
def test_number_kept_is_the_floor_or_ceiling_of_the_sum(pi, start, seed):
    rng = np.random.default_rng(seed)
    order = rng.random(len(pi))
    allowed = allowed_counts(pi)
    assert systematic(pi, start=start, order_N=order).sum() in allowed
    assert pivotal(pi, decide=coins(rng), order_N=order).sum() in allowed


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("certain", [1.0, JUST_BELOW_1])
def test_certain_units_are_kept(size: int, certain: float):
    """Just below 1 a unit can only lose where a tooth falls into the gap of 2^-53."""
    pi = np.full(size, certain)
    order = np.arange(float(size))
    for start in (0.0, 0.5, 1 - size * 2**-53 - 2**-53):
        assert systematic(pi, start=start, order_N=order).all()
    assert pivotal(pi, decide=lambda p: p > 0.5, order_N=order).all()


@settings(derandomize=True, max_examples=50, deadline=None)
@given(probabilities, starts)
def test_units_of_probability_1_do_not_touch_the_others(pi, start):
    order = np.arange(float(len(pi)))
    uncertain = pi < 1
    kept = systematic(pi, start=start, order_N=order)
    assert kept[~uncertain].all()
    alone = systematic(pi[uncertain], start=start, order_N=order[uncertain])
    assert kept[uncertain].tolist() == alone.tolist()
    kept = pivotal(pi, decide=lambda p: p > 0.5, order_N=order)
    assert kept[~uncertain].all()
    alone = pivotal(pi[uncertain], decide=lambda p: p > 0.5, order_N=order[uncertain])
    assert kept[uncertain].tolist() == alone.tolist()


def test_tiny_probabilities_are_not_lost():
    """Below 2^-64 a probability counts as 2^-64: the unit still can be kept."""
    pi = np.array([5e-324, 1e-30])
    assert systematic(pi, start=0.0, order_N=np.arange(2.0)).tolist() == [True, False]
    assert pivotal(pi, decide=lambda p: True, order_N=np.arange(2.0)).tolist() == [True, False]
    assert pivotal(pi, decide=lambda p: False, order_N=np.arange(2.0)).tolist() == [False, False]
    assert not systematic(pi, start=0.5, order_N=np.arange(2.0)).any()


def test_ties_of_the_keys_are_broken_by_index():
    pi = np.random.default_rng(2).uniform(0.05, 1, 200)  # sorts of a few units are always stable
    in_order = np.arange(200.0)
    for ties in (in_order // 50, np.zeros(200)):
        tied = systematic(pi, start=0.4, order_N=ties)
        assert tied.tolist() == systematic(pi, start=0.4, order_N=in_order).tolist()
        tied = pivotal(pi, decide=lambda p: p > 0.5, order_N=ties)
        assert tied.tolist() == pivotal(pi, decide=lambda p: p > 0.5, order_N=in_order).tolist()


def test_no_unit_gives_an_empty_result():
    nothing = np.zeros(0)
    assert poisson(nothing, uniforms_N=nothing).shape == (0,)
    assert systematic(nothing, start=0.5, order_N=nothing).shape == (0,)
    assert pivotal(nothing, decide=lambda p: True, order_N=nothing).shape == (0,)


def test_arguments_are_left_as_they_were():
    pi, order = np.array([1.0, 0.4, 0.3]), np.array([2.0, 1.0, 0.0])
    systematic(pi, start=0.2, order_N=order)
    pivotal(pi, decide=lambda p: True, order_N=order)
    poisson(pi, uniforms_N=np.zeros(3))
    assert pi.tolist() == [1.0, 0.4, 0.3]
    assert order.tolist() == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("wrong", [0.0, -0.1, math.nextafter(1, 2), math.nan, math.inf])
def test_probabilities_outside_0_1_are_refused(wrong: float):
    pi, keys = np.array([0.5, wrong]), np.array([0.1, 0.2])
    with pytest.raises(AssertionError):
        poisson(pi, uniforms_N=keys)
    with pytest.raises(AssertionError):
        systematic(pi, start=0.5, order_N=keys)
    with pytest.raises(AssertionError):
        pivotal(pi, decide=lambda p: True, order_N=keys)


@pytest.mark.parametrize("keys", [np.zeros(1), np.zeros((2, 1)), np.array([0.0, math.nan])])
def test_keys_that_do_not_order_the_units_are_refused(keys: np.ndarray):
    pi = np.array([0.5, 0.5])
    with pytest.raises(AssertionError):
        systematic(pi, start=0.5, order_N=keys)
    with pytest.raises(AssertionError):
        pivotal(pi, decide=lambda p: True, order_N=keys)
