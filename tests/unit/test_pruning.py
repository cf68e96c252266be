"""Options of pruning: presets, what is refused, what a budget means."""

import numpy as np
import pytest

from sdpo_scale.estimator.branches import variance_inflation
from sdpo_scale.pruning import PRESETS, Pruning

BRANCHES = {"branches": "importance", "variance_inflation": 1.5}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid(preset):
    assert Pruning.from_options(preset, {}).is_active == (preset != "off")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branches": "best", "keep_fraction": 0.5}, "'best' is not importance or uniform"),
        ({"branch_unit": "token"}, "'token' is not pair or response"),
        ({"branch_sampling": "simple"}, "'simple' is not systematic or pivotal"),
        ({"branch_execution": "twice"}, "'twice' is not auto or two_pass or checkpoint"),
        ({"positions": "best"}, "'best' is not importance or uniform"),
        ({"min_probability": 0.0}, r"min_probability must be in \(0, 1\]"),
        ({"min_probability": float("nan")}, r"min_probability must be in \(0, 1\]"),
        ({"branches": "importance", "keep_fraction": 0.0}, r"keep_fraction must be in \(0, 1\]"),
        ({"position_fraction": 1.5}, r"position_fraction must be in \(0, 1\]"),
        ({**BRANCHES, "variance_inflation": 0.5}, "at least 1, got 0.5"),
        ({**BRANCHES, "keep_fraction": 0.5}, "two forms of one budget"),
        ({"branches": "importance"}, "needs variance_inflation or keep_fraction"),
        ({"presample": True}, "needs variance_inflation or keep_fraction"),
        ({**BRANCHES, "variance_inflation": float("nan")}, "at least 1, got nan"),
        ({"keep_fraction": 0.5}, "neither is on"),
        ({"prefix": "geometric", "variance_inflation": 1.5}, "neither is on"),
        ({"presample": True, "branches": "uniform", "keep_fraction": 0.5}, "by importance"),
        ({**BRANCHES, "branch_unit": "response", "train_prefix": "geometric"}, "cuts pairs"),
        ({"prefix": "linear"}, "survival 'linear' is unknown; choose uniform_floor, geometric"),
        ({"prefix": (1.0, 2.0)}, "must not increase"),
        ({"prefix": "geometric", "prefix_parameter": 0.0}, r"ratio must be in \(0, 1\]"),
        ({"prefix": "geometric", "prefix_levels": 0}, "at least 1"),
        ({"train_prefix": "linear"}, "survival 'linear' is unknown"),
        ({"prefix": (1.0, 0.5), "prefix_levels": (8, 16)}, "need 1 token counts"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Pruning(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presample", "no"),  # YAML 1.2: text, and true where only truth is asked for
        ("prefix_levels", 2.5),
        ("prefix_levels", (1.5, 3)),
        ("keep_fraction", "half"),
    ],
)
def test_values_of_the_wrong_type_are_refused_with_their_option(name, value):
    given = {"prefix": "geometric", "branches": "importance", "keep_fraction": 0.5, name: value}
    with pytest.raises(ValueError, match=name):
        Pruning(**given)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="'fast' is unknown; choose one of off, exact-budget"):
        Pruning.from_options("fast", {})
    with pytest.raises(ValueError, match="option 'keep_fracton', did you mean 'keep_fraction'"):
        Pruning.from_options("memory", {"keep_fracton": 0.5})
    with pytest.raises(ValueError, match=r"unknown pruning option 'xyz'$"):
        Pruning.from_options("memory", {"xyz": 1})


def test_one_form_of_the_budget_replaces_the_other():
    found = Pruning.from_options("exact-budget", {"keep_fraction": 0.4})
    assert (found.keep_fraction, found.variance_inflation) == (0.4, None)
    found = Pruning.from_options("memory", {"variance_inflation": 1.1})
    assert (found.keep_fraction, found.variance_inflation) == (None, 1.1)
    with pytest.raises(ValueError, match="two forms of one budget"):
        Pruning.from_options("memory", {"variance_inflation": 1.1, "keep_fraction": 0.5})


def test_a_presets_other_fields_stay():
    found = Pruning.from_options("fastest", {"keep_fraction": 0.6})
    assert found.presample
    assert (found.prefix, found.position_fraction) == ("uniform_floor", 0.5)


def test_lists_from_a_file_are_survivals_and_token_counts():
    found = Pruning.from_options("off", {"prefix": [1.0, 0.5, 0.2], "prefix_levels": [64, 256]})
    assert found.prefix_design.survival == (1.0, 0.5, 0.2)
    assert found.prefix_design.token_counts == (64, 256)
    named = Pruning(prefix="geometric", prefix_levels=(64, 256), prefix_parameter=0.5)
    assert named.prefix_design.survival == (1.0, 0.5, 0.25)


@pytest.mark.parametrize(
    ("options", "recomputes", "execution"),
    [
        ({}, True, "single"),
        ({"prefix": "geometric"}, True, "single"),
        (BRANCHES, True, "checkpoint"),
        (BRANCHES, False, "two_pass"),
        ({**BRANCHES, "branch_execution": "two_pass"}, True, "two_pass"),
        ({**BRANCHES, "branch_execution": "checkpoint"}, False, "checkpoint"),
        ({"train_prefix": "geometric"}, True, "checkpoint"),
    ],
)
def test_the_backward_is_pruned_by_recomputation_where_there_is_one(options, recomputes, execution):
    assert Pruning(**options).execution(recomputes=recomputes) == execution


def test_two_stages_share_the_budget():
    rng = np.random.default_rng(0)
    importance, cost = rng.lognormal(size=20), np.full(20, 100.0)
    alone = Pruning(branches="importance", variance_inflation=1.44)
    shared = Pruning(presample=True, branches="importance", variance_inflation=1.44)
    for options, expected in ((alone, 1.44), (shared, 1.2)):
        scale = options.scale(importance, cost)
        probabilities = options.probabilities(importance, cost, scale=scale)
        found = variance_inflation(importance, probabilities)
        assert found == pytest.approx(expected, rel=1e-6)


def test_two_stages_share_the_kept_fraction_and_one_alone_has_all_of_it():
    importance, cost = np.random.default_rng(0).lognormal(size=20), np.full(20, 100.0)
    for stages, expected in (
        ({"branches": "importance"}, 0.36),
        ({"presample": True}, 0.36),
        ({"presample": True, "branches": "importance"}, 0.6),
    ):
        options = Pruning(**stages, keep_fraction=0.36)
        scale = options.scale(importance, cost)
        found = options.probabilities(importance, cost, scale=scale)
        assert found.mean() == pytest.approx(expected, rel=1e-6)


def test_uniform_inclusion_keeps_the_same_budget():
    importance, cost = np.array([1.0, 5.0]), np.array([10.0, 20.0])
    options = Pruning(branches="uniform", variance_inflation=1.25)
    assert options.probabilities(importance, cost, scale=1.0).tolist() == [0.8, 0.8]
    options = Pruning(branches="uniform", keep_fraction=0.3)
    assert options.probabilities(importance, cost, scale=1.0).tolist() == [0.3, 0.3]


def test_without_pruning_of_the_backward_the_other_stages_stay():
    full = Pruning(presample=True, prefix="geometric", position_fraction=0.5, **BRANCHES)
    found = full.without_backward_pruning()
    assert found.presample
    assert found.variance_inflation == 1.5
    assert found.prefix_design == full.prefix_design
    assert not found.prunes_backward
    assert Pruning(**BRANCHES).without_backward_pruning().variance_inflation is None
