"""Variances and means over many draws are those of the formulas: fixed seeds, stated error rate."""

from statistics import NormalDist

import numpy as np
import pytest

from sdpo_scale.draws import PruningHistory, StepDraw
from sdpo_scale.estimator.branches import (
    budget_scale,
    importance_probabilities,
    variance_inflation,
)
from sdpo_scale.estimator.designs import pivotal, poisson, systematic
from sdpo_scale.estimator.prefixes import (
    PrefixDesign,
    draw_levels,
    second_moment,
    telescoping_weights,
    uniform_floor,
)
from sdpo_scale.estimator.rng import Stage
from sdpo_scale.pruning import Pruning

NUM_DRAWS = 4000
LIMIT = NormalDist().inv_cdf(1 - 1e-4 / 2)
"""A right formula fails one test in 10,000."""


def z_score(values, expected):
    values = np.asarray(values)
    return (values.mean() - expected) / (values.std(ddof=1) / np.sqrt(len(values)))


@pytest.fixture(scope="module")
def branches():
    rng = np.random.default_rng(5)
    importance = rng.lognormal(0, 1, 12)
    cost = rng.integers(50, 500, 12).astype(float)
    scale = budget_scale(importance, cost, inflation=1.5, floor=0.1)
    probabilities = importance_probabilities(importance, cost, scale=scale, floor=0.1)
    return importance, probabilities


def second_moments(importance, kept, probabilities):
    """‖Ĝ − G‖² with orthogonal gradients of the given norms."""
    weights = np.where(kept, 1 / probabilities, 0.0)
    return float((importance**2 * (weights - 1) ** 2).sum())


def test_independent_draws_have_the_variance_inflation_of_the_formula(branches):
    importance, probabilities = branches
    rng = np.random.default_rng(1)
    found = [
        second_moments(importance, poisson(probabilities, uniforms_N=rng.random(12)), probabilities)
        for _ in range(NUM_DRAWS)
    ]
    expected = (variance_inflation(importance, probabilities) - 1) * (importance**2).sum()
    assert abs(z_score(found, expected)) < LIMIT


@pytest.mark.parametrize("design", ["systematic", "pivotal"])
def test_fixed_size_draws_keep_the_formula_where_gradients_are_orthogonal(design, branches):
    # cross terms vanish with ⟨G_i, G_j⟩ = 0, whatever the joint inclusion probabilities
    importance, probabilities = branches
    rng = np.random.default_rng(2)
    found = []
    for _ in range(NUM_DRAWS):
        if design == "systematic":
            kept = systematic(probabilities, start=rng.random(), order_N=rng.random(12))
        else:
            kept = pivotal(probabilities, decide=lambda p: rng.random() < p, order_N=rng.random(12))
        found.append(second_moments(importance, kept, probabilities))
    expected = (variance_inflation(importance, probabilities) - 1) * (importance**2).sum()
    assert abs(z_score(found, expected)) < LIMIT


def test_fixed_size_draws_vary_less_where_gradients_are_alike(branches):
    importance, probabilities = branches
    rng = np.random.default_rng(3)
    totals = {"poisson": [], "systematic": []}
    for _ in range(NUM_DRAWS):
        kept = {
            "poisson": poisson(probabilities, uniforms_N=rng.random(12)),
            "systematic": systematic(probabilities, start=rng.random(), order_N=rng.random(12)),
        }
        for name, mask in kept.items():
            totals[name].append(float((importance / probabilities)[mask].sum()))
    for values in totals.values():
        assert abs(z_score(values, importance.sum())) < LIMIT
    assert np.var(totals["systematic"]) < 0.5 * np.var(totals["poisson"])


def test_telescoped_gradients_have_the_mean_and_second_moment_of_the_formula():
    design = PrefixDesign(survival=uniform_floor(5, 0.3))
    rng = np.random.default_rng(4)
    gradients = np.cumsum(rng.normal(size=(5, 8)), axis=0)  # ∇ℓ_1 … ∇ℓ_5; ∇ℓ_0 = 0
    increments = np.diff(gradients, axis=0, prepend=np.zeros((1, 8)))
    levels = draw_levels(rng.random(NUM_DRAWS), design)
    estimates = telescoping_weights(levels, design.survival) @ gradients
    for entry in range(8):
        assert abs(z_score(estimates[:, entry], gradients[-1, entry])) < LIMIT
    expected = second_moment(increments @ increments.T, design.survival)
    assert abs(z_score((estimates**2).sum(axis=1), expected)) < LIMIT


def test_draws_of_different_steps_and_stages_are_uncorrelated():
    draw = StepDraw(options=Pruning(), history=PruningHistory(), seed=11, step=0)
    numbers = np.array(
        [
            [draw.uniforms(1, pair_id, stage)[0] for stage in Stage]
            for pair_id in range(NUM_DRAWS // 2)
        ]
    )
    correlations = np.corrcoef(numbers.T)[np.triu_indices(len(Stage), 1)]
    limit = NormalDist().inv_cdf(1 - 1e-4 / 2 / len(correlations)) / np.sqrt(len(numbers))
    assert np.abs(correlations).max() < limit
