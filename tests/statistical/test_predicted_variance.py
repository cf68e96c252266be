"""Variances and means over many draws are those of the formulas: fixed seeds, stated error rate."""

from statistics import NormalDist

import numpy as np
import pytest
import torch

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
from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.objectives import OBJECTIVES
from sdpo_scale.packing.layout import build_layout
from sdpo_scale.pruning import Pruning
from sdpo_scale.reporting.verify import t_threshold
from sdpo_scale.step import StepOptions, run_step
from tests.helpers.gradients import gradients
from tests.helpers.pairs import random_pairs
from tests.helpers.tiny_models import build
from tests.helpers.tolerances import FLOAT64_ENUMERATION

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


@pytest.fixture(scope="module")
def orthogonal(branches):
    """Gradients of the given norms in random directions that are orthogonal to each other."""
    importance, _ = branches
    directions, _ = np.linalg.qr(np.random.default_rng(6).normal(size=(20, 12)))
    return importance[:, None] * directions.T


def estimate(vectors, kept, probabilities):
    """Ĝ, the weighted sum of the kept gradients."""
    return np.where(kept, 1 / probabilities, 0.0) @ vectors


@pytest.mark.parametrize("design", ["poisson", "systematic", "pivotal"])
def test_draws_have_the_second_moment_of_the_formula_where_gradients_are_orthogonal(
    design, branches, orthogonal
):
    # cross terms vanish with ⟨G_i, G_j⟩ = 0, whatever the joint inclusion probabilities
    importance, probabilities = branches
    rng = np.random.default_rng(2)
    draws = {
        "poisson": lambda: poisson(probabilities, uniforms_N=rng.random(12)),
        "systematic": lambda: systematic(probabilities, start=rng.random(), order_N=rng.random(12)),
        "pivotal": lambda: pivotal(
            probabilities, decide=lambda p: rng.random() < p, order_N=rng.random(12)
        ),
    }
    found = np.array(
        [estimate(orthogonal, draws[design](), probabilities) for _ in range(NUM_DRAWS)]
    )
    second = float((importance**2 / probabilities).sum())
    assert abs(z_score((found**2).sum(axis=1), second)) < LIMIT
    dense = orthogonal.sum(axis=0)
    noise = (variance_inflation(importance, probabilities) - 1) * (importance**2).sum()
    assert abs(z_score(((found - dense) ** 2).sum(axis=1), noise)) < LIMIT


@pytest.mark.parametrize("seed", range(3))
def test_systematic_draws_in_a_fixed_order_have_it_exactly(seed, branches, orthogonal):
    importance, probabilities = branches
    order = np.random.default_rng(seed).random(12)
    # the sample changes only where start meets the end of an interval on the line
    line = np.where(probabilities < 1, probabilities, 0.0)[np.argsort(order)]
    edges = np.unique(np.r_[0.0, np.cumsum(line) % 1.0, 1.0])
    estimates = np.array(
        [
            estimate(orthogonal, systematic(probabilities, start=s, order_N=order), probabilities)
            for s in (edges[1:] + edges[:-1]) / 2
        ]
    )
    mean = np.diff(edges) @ estimates
    assert np.abs(mean - orthogonal.sum(axis=0)).max() < FLOAT64_ENUMERATION * importance.max()
    second = np.diff(edges) @ (estimates**2).sum(axis=1)
    expected = (importance**2 / probabilities).sum()
    assert second == pytest.approx(expected, rel=FLOAT64_ENUMERATION)


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


# The gradient of a pruned step on a model, in float32.

NUM_STEPS = 300
NUM_PROJECTIONS = 64
FALSE_ALARMS = 1e-3
"""Probability that the largest of all projections' |z| exceeds its limit though nothing is biased:
Bonferroni's bound, whatever their correlation."""
EXECUTIONS = {
    "exact-budget": "checkpoint",
    "memory": "two_pass",
    "fastest": "checkpoint",
    "paper": "two_pass",
}


class Projected:
    """Steps on a tiny model, each as random projections of its gradient."""

    def __init__(self):
        self.model = build("llama", num_hidden_layers=1)
        bind_logprob_forward(self.model, backend="sdpa")
        self.recompute = PrunedRecompute.bind(self.model)
        self.pairs = random_pairs(8, longest=8)
        size = sum(p.numel() for p in self.model.parameters())
        generator = torch.Generator().manual_seed(8)
        self.directions = torch.randn(size, NUM_PROJECTIONS, generator=generator) / size**0.5
        # near the policy, so that the loss is not flat; unequal, so that coefficients differ
        rng = np.random.default_rng(9)
        with torch.no_grad():
            found = [self.model(pack=build_layout([p.tokens])).logprobs_R for p in self.pairs]
        self.reference = [
            tuple(np.split(x.numpy() + rng.normal(0, 0.5, len(x)), [len(pair.chosen_ids)]))
            for x, pair in zip(found, self.pairs, strict=True)
        ]

    def step(self, draw=None, *, execution="two_pass"):
        result = run_step(
            self.pairs,
            self.reference,
            options=StepOptions(
                objective=OBJECTIVES["sigmoid"], beta=0.5, label_smoothing=0.0, max_tokens=200
            ),
            forward=lambda layout, is_last, **kwargs: self.model(pack=layout, **kwargs),
            backward=lambda loss, _is_last: loss.backward(),
            draw=draw,
            recompute=self.recompute if draw is not None and execution == "checkpoint" else None,
        )
        flat = torch.cat([g.reshape(-1) for g in gradients(self.model).values()])
        return result, (flat @ self.directions).double().numpy()

    def history(self):
        """What a step that keeps everything has shown; draws do not change it."""
        history = PruningHistory()
        options = Pruning(branches="importance", variance_inflation=1.0)
        draw = StepDraw(options=options, history=history, seed=0, step=0)
        history.observe(self.step(draw, execution="checkpoint")[0].observations)
        return history


def largest_z(projections, dense):
    errors = projections.std(axis=0, ddof=1) / np.sqrt(len(projections))
    return float(np.abs((projections.mean(axis=0) - dense) / errors).max())


@pytest.mark.parametrize("preset", EXECUTIONS)
def test_the_mean_gradient_of_pruned_steps_is_the_dense_one(preset):
    rig, execution = Projected(), EXECUTIONS[preset]
    _, dense = rig.step()
    history = rig.history()
    options = Pruning.from_options(preset, {"branch_execution": execution})
    steps = [
        rig.step(StepDraw(options=options, history=history, seed=0, step=k), execution=execution)
        for k in range(1, NUM_STEPS + 1)
    ]
    projections = np.array([projected for _, projected in steps])
    assert (projections.std(axis=0) > 0).all()
    limit = t_threshold(NUM_PROJECTIONS, NUM_STEPS, FALSE_ALARMS)
    assert largest_z(projections, dense) < limit
    # so many draws are enough to see a gradient that is off by three tenths
    assert largest_z(1.3 * projections, dense) > limit
    assert largest_z(0.7 * projections, dense) > limit
