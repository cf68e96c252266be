"""Inclusion probabilities keep their budget, at the least cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo_scale.estimator.branches import (
    budget_scale,
    effective_sample_size,
    fraction_scale,
    importance_probabilities,
    variance_inflation,
)

FLOOR = 0.05


def branches_of(seed, count=9):
    rng = np.random.default_rng(seed)
    return rng.lognormal(0, 1.2, count), rng.integers(20, 900, count).astype(float)


def probabilities_of(importance, cost, scale, floor=FLOOR):
    return importance_probabilities(importance, cost, scale=scale, floor=floor)


@given(st.integers(0, 10_000), st.floats(1.01, 4.0))
def test_the_budget_is_met_and_not_exceeded(seed, inflation):
    importance, cost = branches_of(seed)
    scale = budget_scale(importance, cost, inflation=inflation, floor=FLOOR)
    probabilities = probabilities_of(importance, cost, scale)
    found = variance_inflation(importance, probabilities)
    assert found <= inflation * (1 + 1e-12)
    if (probabilities > FLOOR).any() and (probabilities < 1).any():
        assert found == pytest.approx(inflation, rel=1e-6)


def least_cost_nearby(probabilities, importance, cost, inflation, seed):
    """The least cost of 200 random changes, each mixed with 'keep all' until within the budget."""
    rng = np.random.default_rng(seed)
    size = (200, len(cost))
    tried = np.clip(probabilities * rng.lognormal(0, rng.choice([0.02, 0.2], (200, 1)), size), 0, 1)
    tried = np.maximum(tried, FLOOR)

    def mixed(share):
        return tried + (1 - tried) * share

    low, high = np.zeros((200, 1)), np.ones((200, 1))
    for _ in range(50):
        middle = (low + high) / 2
        second = (importance**2 / mixed(middle)).sum(axis=1, keepdims=True)
        is_within = second <= inflation * (importance**2).sum()
        low, high = np.where(is_within, low, middle), np.where(is_within, middle, high)
    return float((mixed(high) * cost).sum(axis=1).min())


@given(st.integers(0, 10_000), st.floats(1.05, 3.0))
def test_no_other_probabilities_within_the_budget_are_cheaper(seed, inflation):
    importance, cost = branches_of(seed, count=5)
    scale = budget_scale(importance, cost, inflation=inflation, floor=FLOOR)
    best = probabilities_of(importance, cost, scale)
    found = least_cost_nearby(best, importance, cost, inflation, seed)
    assert found >= float((best * cost).sum()) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_something_cheaper_where_costs_are_left_out(seed):
    importance, cost = branches_of(seed, count=5)
    scale = budget_scale(importance, np.ones(5), inflation=1.5, floor=FLOOR)
    other = probabilities_of(importance, np.ones(5), scale)
    found = least_cost_nearby(other, importance, cost, 1.5, seed)
    # far more than the rounding that the test above allows
    assert found < float((other * cost).sum()) * (1 - 1e-5)


@given(st.integers(0, 10_000), st.floats(0.1, 0.99))
def test_the_kept_fraction_is_met(seed, fraction):
    importance, cost = branches_of(seed)
    scale = fraction_scale(importance, cost, keep_fraction=fraction, floor=FLOOR)
    found = float((probabilities_of(importance, cost, scale) * cost).sum() / cost.sum())
    assert found == pytest.approx(fraction, rel=1e-6)


@given(st.integers(0, 10_000), st.floats(0.01, 1.0), st.floats(0.0, 100.0))
def test_no_weight_exceeds_the_inverse_of_the_floor(seed, floor, scale):
    importance, cost = branches_of(seed)
    found = probabilities_of(importance * (np.arange(9) > 1), cost, scale, floor)
    assert (found >= floor).all()
    assert (found <= 1).all()


def test_where_the_floor_is_more_than_the_budget_the_floor_is_kept():
    importance, cost = branches_of(0)
    for scale in (
        fraction_scale(importance, cost, keep_fraction=0.2, floor=0.4),
        budget_scale(importance, cost, inflation=5.0, floor=0.4),
    ):
        assert probabilities_of(importance, cost, scale, 0.4).tolist() == [0.4] * 9


def test_the_mean_over_steps_is_budgeted_where_there_are_several():
    importance, cost = branches_of(1, count=12)
    steps = np.repeat(np.arange(3), 4)
    scale = budget_scale(importance, cost, inflation=1.4, floor=FLOOR, step_N=steps)
    probabilities = probabilities_of(importance, cost, scale)
    each = [variance_inflation(importance[steps == s], probabilities[steps == s]) for s in range(3)]
    assert np.mean(each) == pytest.approx(1.4, rel=1e-6)


@pytest.mark.parametrize("importance", [np.zeros(3), np.zeros(0)])
def test_where_nothing_is_known_everything_is_kept(importance):
    cost = np.ones(len(importance))
    assert budget_scale(importance, cost, inflation=1.5, floor=FLOOR) == np.inf
    scale = fraction_scale(importance, cost, keep_fraction=0.5, floor=FLOOR)
    assert (probabilities_of(importance, cost, scale) == 1).all()


def test_no_inflation_and_the_whole_fraction_keep_everything():
    importance, cost = branches_of(0)
    assert budget_scale(importance, cost, inflation=1.0, floor=FLOOR) == np.inf
    assert fraction_scale(importance, cost, keep_fraction=1.0, floor=FLOOR) == np.inf


def test_one_branch_is_kept_with_the_inverse_of_the_inflation():
    importance, cost = np.array([2.0]), np.array([70.0])
    scale = budget_scale(importance, cost, inflation=2.0, floor=FLOOR)
    assert probabilities_of(importance, cost, scale) == pytest.approx([0.5])


def test_branches_without_gradient_stay_at_the_floor():
    importance, cost = np.array([0.0, 1.0]), np.array([10.0, 10.0])
    scale = budget_scale(importance, cost, inflation=1.25, floor=FLOOR)
    assert probabilities_of(importance, cost, scale) == pytest.approx([FLOOR, 0.8])
    # whatever the budget: what has no gradient need not run
    scale = fraction_scale(importance, cost, keep_fraction=0.9, floor=FLOOR)
    assert probabilities_of(importance, cost, scale) == pytest.approx([FLOOR, 1.0])


def test_probabilities_favour_importance_and_cheapness():
    found = probabilities_of(np.array([1.0, 2.0, 1.0]), np.array([100.0, 100.0, 400.0]), 2.0)
    assert found == pytest.approx([0.2, 0.4, 0.1])


def test_effective_sample_size():
    assert effective_sample_size(np.array([2.0, 2.0, 2.0])) == pytest.approx(3)
    assert effective_sample_size(np.array([1.0, 3.0])) == pytest.approx(1.6)
    assert effective_sample_size(np.zeros(0)) == 0
    assert variance_inflation(np.zeros(2), np.ones(2)) == 1
