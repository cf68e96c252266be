"""Cut levels, survival functions and telescoping weights, worked out by hand and enumerated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo_scale.estimator.prefixes import (
    PrefixDesign,
    block_lengths,
    cut_lengths,
    draw_levels,
    geometric,
    second_moment,
    telescoping_weights,
    token_survival,
    uniform_floor,
)


def test_levels_keep_the_ceiling_of_their_fraction():
    design = PrefixDesign(survival=(1.0, 0.5, 0.25))
    cuts = cut_lengths(np.array([7, 1, 0]), design)
    assert cuts.tolist() == [[0, 3, 5, 7], [0, 1, 1, 1], [0, 0, 0, 0]]


def test_levels_may_be_token_counts():
    design = PrefixDesign(survival=(1.0, 0.5, 0.25), token_counts=(2, 5))
    assert cut_lengths(np.array([9, 4, 1]), design).tolist() == [
        [0, 2, 5, 9],
        [0, 2, 4, 4],
        [0, 1, 1, 1],
    ]


def test_survival_shapes():
    assert uniform_floor(4, 0.2) == pytest.approx((1.0, 0.8, 0.6, 0.4))
    assert geometric(4, 0.5) == (1.0, 0.5, 0.25, 0.125)
    assert uniform_floor(1, 0.3) == geometric(1, 0.3) == (1.0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"survival": ()}, "must start with S_1 = 1"),
        ({"survival": (0.9, 0.5)}, "must start with S_1 = 1"),
        ({"survival": (1.0, 0.5, 0.6)}, "must not increase"),
        ({"survival": (1.0, 0.0)}, "must stay positive"),
        ({"survival": (1.0, 0.5), "token_counts": (1, 2)}, "need 1 token counts"),
        ({"survival": (1.0, 0.5, 0.5), "token_counts": (4, 4)}, "must increase"),
        ({"survival": (1.0, 0.5), "token_counts": (0,)}, "must increase from 1 on"),
        ({"survival": (1.0, float("nan"))}, "must stay positive"),
        ({"survival": (1.0, float("nan"), 0.5)}, "must not increase"),
    ],
)
def test_designs_that_would_be_biased_or_unclear_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PrefixDesign(**options)


@pytest.mark.parametrize("shape", [uniform_floor, geometric])
@pytest.mark.parametrize(("levels", "parameter"), [(0, 0.5), (3, 0.0), (3, 1.5)])
def test_shapes_out_of_range_are_refused(shape, levels, parameter):
    with pytest.raises(ValueError, match=r"must be (at least 1|in \(0, 1\])"):
        shape(levels, parameter)


def test_a_level_is_drawn_with_its_survival_probability():
    design = PrefixDesign(survival=(1.0, 0.7, 0.2))
    uniforms = np.array([0.999, 0.7, 0.6999, 0.2, 0.1999, 0.0])
    assert draw_levels(uniforms, design).tolist() == [1, 1, 2, 2, 3, 3]


def test_weights_telescope():
    survival = (1.0, 0.5, 0.25)
    weights = telescoping_weights(np.array([1, 2, 3]), survival)
    assert weights.tolist() == [[1, 0, 0], [1 - 2, 2, 0], [1 - 2, 2 - 4, 4]]
    losses = np.array([3.0, 5.0, 4.0])  # and ℓ_0, which must not matter
    for start in (0.0, 0.7):
        increments = np.diff(losses, prepend=start) / np.array(survival)
        assert weights @ losses == pytest.approx(start + np.cumsum(increments))


survivals = st.lists(st.floats(0.05, 1.0), min_size=0, max_size=6).map(
    lambda values: (1.0, *sorted(values, reverse=True))
)


@given(survivals)
def test_a_level_is_reached_on_an_interval_as_long_as_its_survival(survival):
    design = PrefixDesign(survival=survival)
    levels, ends = np.arange(1, len(survival) + 1), np.array(survival)
    # levels fall as u grows, so that {u: T ≥ k} begins at 0; it ends at S_k, to the last bit
    grid = np.sort(np.concatenate([np.linspace(0, 1, 50, endpoint=False), ends[ends < 1]]))
    assert (np.diff(draw_levels(grid, design)) <= 0).all()
    assert draw_levels(np.zeros(1), design).tolist() == [len(survival)]
    assert (draw_levels(np.nextafter(ends, 0), design) >= levels).all()
    assert (draw_levels(ends, design) < levels).all()


@given(survivals)
def test_the_expected_weight_of_every_level_but_the_last_is_0(survival):
    edges = np.array([*survival, 0.0])
    probabilities = -np.diff(edges)
    weights = telescoping_weights(np.arange(1, len(survival) + 1), survival)
    expected = probabilities @ weights
    assert expected == pytest.approx([0.0] * (len(survival) - 1) + [1.0], abs=1e-9)
    assert weights.sum(axis=1) == pytest.approx(np.ones(len(survival)))  # ℓ ≡ 1 is estimated as 1


@given(survivals, st.integers(0, 10_000))
def test_the_second_moment_is_that_of_all_outcomes(survival, seed):
    increments = np.random.default_rng(seed).normal(size=(len(survival), 3))
    gradients = np.cumsum(increments, axis=0)
    probabilities = -np.diff(np.array([*survival, 0.0]))
    estimates = telescoping_weights(np.arange(1, len(survival) + 1), survival) @ gradients
    expected = float(probabilities @ (estimates**2).sum(axis=1))
    found = second_moment(increments @ increments.T, survival)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_blocks_and_survival_of_executed_tokens():
    design = PrefixDesign(survival=(1.0, 0.5, 0.25))
    cuts = cut_lengths(np.array([7, 2]), design)
    executed = np.array([5, 2])
    assert block_lengths(cuts, executed).tolist() == [[3, 2, 0], [1, 1, 0]]
    survival = token_survival(cuts, executed, design.survival)
    assert survival.tolist() == [1, 1, 1, 0.5, 0.5, 1, 0.5]
