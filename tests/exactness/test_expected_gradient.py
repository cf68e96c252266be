"""The expected gradient of a pruned step is the dense one: every outcome enumerated, in float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import sdpo_scale.draws
import sdpo_scale.weighting
from sdpo_scale.config import SDPOConfig
from sdpo_scale.draws import PruningHistory, StepDraw
from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.objective_options import objective_of
from sdpo_scale.objectives import OBJECTIVES
from sdpo_scale.packing.layout import build_layout
from sdpo_scale.pruning import Pruning
from sdpo_scale.step import StepOptions, run_step
from tests.helpers.enumerate import Choose, expectation, script_draws
from tests.helpers.gradients import gradients, relative_error
from tests.helpers.pairs import pair_of_lengths
from tests.helpers.tiny_models import build
from tests.helpers.tolerances import FLOAT64_ENUMERATION

PAIRS = [pair_of_lengths(k, lengths) for k, lengths in enumerate([(3, 4, 3), (2, 1, 3), (4, 5, 2)])]
SURVIVAL: dict[str, dict[str, Any]] = {
    "uniform_floor": {"prefix": "uniform_floor", "prefix_levels": 3, "prefix_parameter": 0.3},
    "geometric": {"prefix": "geometric", "prefix_levels": 3, "prefix_parameter": 0.6},
    "list": {"prefix": (1.0, 0.7, 0.2), "prefix_levels": 3},
    "token_counts": {"prefix": "geometric", "prefix_levels": (1, 3)},
    "more_levels_than_tokens": {"prefix": "uniform_floor", "prefix_levels": 7},
}
BRANCHES: dict[str, dict[str, Any]] = {
    "pair": {"branches": "importance"},
    "response": {"branches": "importance", "branch_unit": "response"},
    "pivotal": {"branches": "importance", "branch_sampling": "pivotal"},
    "uniform": {"branches": "uniform"},
}
EXECUTIONS = ("two_pass", "checkpoint")
OPTIONS: dict[str, dict[str, Any]] = {
    "rpo": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "ld_alpha": {"ld_alpha": 0.3},
    "weighting": {"use_weighting": True},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_ipo": {"f_divergence_type": "js_divergence", "loss_type": "ipo"},
    "alpha": {"f_divergence_type": "alpha_divergence"},
    "all": {
        "loss_type": ["apo_zero", "sigmoid_norm"],
        "loss_weights": [0.3, 2.0],
        "ld_alpha": 0.5,
        "use_weighting": True,
    },
    "rpo_ld": {"loss_type": ["hinge", "sft"], "ld_alpha": 0.0},
}


class Rig:
    """A tiny float64 model, its pairs and their reference, and steps on them."""

    def __init__(self, loss_type: str = "sigmoid", options: Any = None) -> None:
        self.model = build("llama", dtype=torch.float64, num_hidden_layers=1, hidden_size=16)
        bind_logprob_forward(self.model, backend="sdpa")
        self.recompute = PrunedRecompute.bind(self.model)
        # away from the policy, so that coefficients differ between pairs and levels, but not so
        # far that the hinge is flat
        rng = np.random.default_rng(3)
        with torch.no_grad():
            logprobs = [self.model(pack=build_layout([p.tokens])).logprobs_R.numpy() for p in PAIRS]
        shifted = [(x + rng.normal(0, 0.4, len(x))).astype(np.float32) for x in logprobs]
        self.reference = [
            tuple(np.split(x, [len(pair.chosen_ids)]))
            for x, pair in zip(shifted, PAIRS, strict=True)
        ]
        objective = objective_of(SDPOConfig(**options)) if options else OBJECTIVES[loss_type]
        self.options = StepOptions(
            objective=objective,
            beta=0.5,
            label_smoothing=0.1 if objective.takes_label_smoothing else 0.0,
            max_tokens=25,
        )

    def step(self, draw: StepDraw | None = None, *, execution: str = "two_pass", count: int = 3):
        return run_step(
            PAIRS[:count],
            self.reference[:count],
            options=self.options,
            forward=lambda layout, is_last, **kwargs: self.model(pack=layout, **kwargs),
            backward=lambda loss, _is_last: loss.backward(),
            draw=draw,
            recompute=self.recompute if execution == "checkpoint" else None,
        )

    def gradient(self, draw: StepDraw | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        metrics = self.step(draw, **kwargs).metrics
        found = gradients(self.model)
        found["loss"] = torch.tensor([metrics.loss], dtype=torch.float64)
        means = metrics.means(beta=0.5)
        names = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/rejected")
        found["metrics"] = torch.tensor([means[n] for n in names], dtype=torch.float64)
        return found

    def history(self, **options: Any) -> PruningHistory:
        """What a step that keeps everything has shown, made unequal so that thresholds matter."""
        history = PruningHistory()
        pruning = Pruning(branches="importance", variance_inflation=1.0, **options)
        draw = StepDraw(options=pruning, history=history, seed=0, step=0)
        seen = self.step(draw, execution="checkpoint").observations
        self.model.zero_grad()
        history.observe(seen)
        return history


@pytest.fixture
def scripted() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


def expected_gradient(
    rig: Rig, scripted: pytest.MonkeyPatch, pruning: Pruning, history: Any, **kwargs: Any
) -> tuple[dict[str, torch.Tensor], int]:
    if kwargs.get("execution", "two_pass") == "two_pass" and pruning.prunes_backward:
        pruning = replace(pruning, branch_execution="two_pass")
    draw = StepDraw(options=pruning, history=history, seed=1, step=5)

    def run(choose: Choose) -> dict[str, torch.Tensor]:
        with scripted.context() as patched:
            script_draws(patched, choose)
            return rig.gradient(draw, **kwargs)

    return expectation(run)


def error(rig: Rig, scripted: pytest.MonkeyPatch, pruning: Pruning, history: Any, **kwargs: Any):
    count = kwargs.get("count", 3)
    found, outcomes = expected_gradient(rig, scripted, pruning, history, **kwargs)
    assert outcomes > 1
    return relative_error(found, rig.gradient(count=count))


@pytest.mark.parametrize("loss_type", OBJECTIVES)
@pytest.mark.parametrize("survival", SURVIVAL)
def test_prefixes(survival, loss_type, scripted):
    rig = Rig(loss_type)
    pruning = Pruning(**SURVIVAL[survival])
    assert error(rig, scripted, pruning, PruningHistory()) < FLOAT64_ENUMERATION


@pytest.mark.parametrize("loss_type", OBJECTIVES)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("unit", BRANCHES)
def test_branches(unit, execution, loss_type, scripted):
    rig = Rig(loss_type)
    pruning = Pruning(**BRANCHES[unit], keep_fraction=0.5)
    history = rig.history(branch_unit=pruning.branch_unit)
    assert error(rig, scripted, pruning, history, execution=execution) < FLOAT64_ENUMERATION


@pytest.mark.parametrize("loss_type", OBJECTIVES)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("survival", ["uniform_floor", "token_counts"])
def test_prefixes_of_the_train_pass(survival, execution, loss_type, scripted):
    rig = Rig(loss_type)
    pruning = Pruning(**{f"train_{name}": value for name, value in SURVIVAL[survival].items()})
    found = error(rig, scripted, pruning, rig.history(), execution=execution)
    assert found < FLOAT64_ENUMERATION


@pytest.mark.parametrize("loss_type", OBJECTIVES)
@pytest.mark.parametrize("positions", ["importance", "uniform"])
def test_positions(positions, loss_type, scripted):
    rig = Rig(loss_type)
    pruning = Pruning(positions=positions, position_fraction=0.6)
    assert error(rig, scripted, pruning, PruningHistory(), count=2) < FLOAT64_ENUMERATION


@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_presampled_pairs(loss_type, scripted):
    rig = Rig(loss_type)
    pruning = Pruning(presample=True, keep_fraction=0.5)
    assert error(rig, scripted, pruning, rig.history()) < FLOAT64_ENUMERATION


@pytest.mark.parametrize("loss_type", OBJECTIVES)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("unit", ["pair", "response"])
def test_all_stages_composed(unit, execution, loss_type, scripted):
    rig = Rig(loss_type)
    pruning = Pruning(
        presample=True,
        prefix="uniform_floor",
        prefix_levels=2,
        branches="importance",
        branch_unit=unit,
        keep_fraction=0.5,
        train_prefix="geometric" if unit == "pair" else None,
        train_prefix_levels=2,
        position_fraction=0.6,
    )
    history = rig.history(branch_unit=unit)
    found = error(rig, scripted, pruning, history, execution=execution, count=1)
    assert found < FLOAT64_ENUMERATION


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_prefixes_and_branches_of_several_pairs_composed(execution, scripted):
    rig = Rig()
    pruning = Pruning(
        prefix="geometric",
        prefix_levels=2,
        branches="importance",
        branch_unit="response",
        variance_inflation=1.5,
    )
    history = rig.history(branch_unit="response")
    found = error(rig, scripted, pruning, history, execution=execution, count=2)
    assert found < FLOAT64_ENUMERATION


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_options_of_the_objective(execution, options, scripted):
    rig = Rig(options=OPTIONS[options])
    pruning = Pruning(
        presample=True,
        prefix="uniform_floor",
        prefix_levels=2,
        branches="importance",
        keep_fraction=0.5,
    )
    found = error(rig, scripted, pruning, rig.history(), execution=execution, count=2)
    assert found < FLOAT64_ENUMERATION


# Wrong weights must be found.


def off_by_one(levels_P, survival):
    shifted = (*survival[1:], survival[-1])  # 1 / S_{k+1} instead of 1 / S_k
    return ORIGINAL_TELESCOPING(levels_P, (1.0, *shifted[1:]))


ORIGINAL_TELESCOPING = sdpo_scale.weighting.telescoping_weights
ORIGINAL_BACKWARD = sdpo_scale.weighting.draw_backward


def mutated_backward(change):
    def draw_backward(*args, **kwargs):
        drawn = ORIGINAL_BACKWARD(*args, **kwargs)
        drawn.factors_R[:] = change(drawn.factors_R)
        return drawn

    return draw_backward


MUTATIONS = {
    "survival_of_the_next_level": (
        ("sdpo_scale.weighting.telescoping_weights", off_by_one),
        {"prefix": "geometric", "prefix_levels": 3},
    ),
    "probability_instead_of_its_inverse": (
        ("sdpo_scale.step.draw_backward", mutated_backward(lambda factors: 1 / factors)),
        {"branches": "importance", "keep_fraction": 0.5},
    ),
    "clipped": (
        ("sdpo_scale.step.draw_backward", mutated_backward(lambda factors: factors.clip(max=1.5))),
        {"branches": "importance", "keep_fraction": 0.5},
    ),
    "weight_left_out": (
        (
            "sdpo_scale.weighting.token_survival",
            lambda cuts, executed, _survival: np.ones(int(executed.sum())),
        ),
        {"train_prefix": "geometric", "train_prefix_levels": 3},
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_weight_is_caught(mutation, scripted):
    (target, replacement), options = MUTATIONS[mutation]
    rig = Rig()
    history = rig.history()
    assert error(rig, scripted, Pruning(**options), history) < FLOAT64_ENUMERATION
    scripted.setattr(target, replacement)
    assert error(rig, scripted, Pruning(**options), history) > 1e-3
