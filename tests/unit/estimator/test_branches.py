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


@given(st.integers(0, 10_000), st.floats(1.05, 3.0))
def test_no_other_probabilities_within_the_budget_are_cheaper(seed, inflation):
    importance, cost = branches_of(seed, count=5)
    scale = budget_scale(importance, cost, inflation=inflation, floor=FLOOR)
    best = float((probabilities_of(importance, cost, scale) * cost).sum())
    rng = np.random.default_rng(seed)
    tried = np.clip(
        probabilities_of(importance, cost, scale) * rng.lognormal(0, 0.3, (200, 5)), FLOOR, 1
    )
    total = (importance**2).sum()
    within = (importance**2 / tried).sum(axis=1) <= inflation * total
    assert ((tried * cost).sum(axis=1)[within] >= best * (1 - 1e-9)).all()


@given(st.integers(0, 10_000), st.floats(0.1, 0.99))
def test_the_kept_fraction_is_met(seed, fraction):
    importance, cost = branches_of(seed)
    scale = fraction_scale(importance, cost, keep_fraction=fraction, floor=FLOOR)
    found = float((probabilities_of(importance, cost, scale) * cost).sum() / cost.sum())
    assert found == pytest.approx(fraction, rel=1e-6)


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
