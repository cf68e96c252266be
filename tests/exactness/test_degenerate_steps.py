"""Steps at the edge: one token, one pair, no gradient, nothing kept, values that are not finite."""

from typing import Any

import numpy as np
import pytest
import torch

from sdpo_scale.data.reference import NonFiniteError
from sdpo_scale.draws import PruningHistory, StepDraw
from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.objectives import OBJECTIVES
from sdpo_scale.pruning import Pruning
from sdpo_scale.step import StepOptions, run_step
from tests.helpers.gradients import gradients, relative_error
from tests.helpers.pairs import pair_of_lengths
from tests.helpers.tiny_models import build
from tests.helpers.tolerances import FLOAT64_ENUMERATION

PAIRS = [pair_of_lengths(k, lengths) for k, lengths in enumerate([(3, 1, 1), (4, 6, 2), (1, 2, 9)])]
ALL: dict[str, Any] = {
    "prefix": "uniform_floor",
    "prefix_levels": 16,  # more than any response has tokens
    "branches": "importance",
    "keep_fraction": 0.3,
    "train_prefix": "geometric",
    "position_fraction": 0.5,
}
EXECUTIONS = ("checkpoint", "two_pass")


@pytest.fixture
def rig():
    return Rig()


class Rig:
    def __init__(self) -> None:
        self.model = build("llama", dtype=torch.float64)
        bind_logprob_forward(self.model, backend="sdpa")
        self.recompute = PrunedRecompute.bind(self.model)
        rng = np.random.default_rng(0)
        self.reference = [
            tuple(rng.normal(-5, 1, len(part)).astype(np.float32) for part in pair.tokens[1:])
            for pair in PAIRS
        ]

    def step(
        self,
        pruning: Pruning | None,
        *,
        pairs: Any = PAIRS,
        reference: Any = None,
        execution: str = "checkpoint",
        number: int = 0,
        loss_type: str = "sigmoid",
        history: PruningHistory | None = None,
    ) -> Any:
        draw = None
        if pruning is not None:
            draw = StepDraw(
                options=pruning, history=history or PruningHistory(), seed=0, step=number
            )
        result = run_step(
            pairs,
            self.reference[: len(pairs)] if reference is None else reference,
            options=StepOptions(
                objective=OBJECTIVES[loss_type], beta=0.5, label_smoothing=0.0, max_tokens=30
            ),
            forward=lambda layout, is_last, **kwargs: self.model(pack=layout, **kwargs),
            backward=lambda loss, _is_last: loss.backward(),
            draw=draw,
            recompute=self.recompute if draw is not None and execution == "checkpoint" else None,
        )
        return result, gradients(self.model)


def pruning_of(execution: str, **changes: Any) -> Pruning:
    return Pruning(**{**ALL, **changes}, branch_execution=execution)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_pairs_of_one_token_and_more_levels_than_tokens(execution, rig):
    for number in range(10):
        result, found = rig.step(pruning_of(execution), execution=execution, number=number)
        assert np.isfinite(result.metrics.loss)
        assert all(bool(g.isfinite().all()) for g in found.values())


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_one_pair_in_a_step(execution, rig):
    _, dense = rig.step(None, pairs=PAIRS[1:2], reference=rig.reference[1:2])
    pruning = Pruning(branches="importance", keep_fraction=0.5, branch_execution=execution)
    kept, names = set(), []
    for number in range(12):
        result, found = rig.step(
            pruning,
            pairs=PAIRS[1:2],
            reference=rig.reference[1:2],
            execution=execution,
            number=number,
            history=seen(rig, slice(1, 2)),
        )
        names.append(found.keys())
        if result.counts.backward_tokens:
            weight = float(found["lm_head.weight"].norm() / dense["lm_head.weight"].norm())
            scaled = {n: g * weight for n, g in dense.items()}
            assert relative_error(found, scaled) < FLOAT64_ENUMERATION
            assert weight <= 1 / pruning.min_probability
        else:
            assert all(float(g.abs().max()) == 0 for g in found.values())
        kept.add(result.counts.backward_tokens > 0)
    assert kept == {True, False}
    assert all(found == dense.keys() for found in names)


def seen(rig: Rig, which: slice = slice(None)) -> PruningHistory:
    """A history after which independent coins keep some of the pairs."""
    history = PruningHistory()
    keeps_all = Pruning(branches="importance", variance_inflation=1.0)
    result, _ = rig.step(keeps_all, pairs=PAIRS[which], reference=rig.reference[which])
    history.observe(result.observations)
    return history


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_coefficients_of_zero_leave_a_gradient_of_zero(execution, rig):
    # the hinge is flat where the margin exceeds 1
    far = [(chosen - 50, rejected + 50) for chosen, rejected in rig.reference]
    result, found = rig.step(
        pruning_of(execution), reference=far, execution=execution, loss_type="hinge"
    )
    assert result.metrics.loss == 0
    assert all(float(g.abs().max()) == 0 for g in found.values())
    assert np.isfinite(list(result.counts.means(**SIZES).values())).all()
    history = PruningHistory()
    history.observe(result.observations)
    again, found = rig.step(
        pruning_of(execution),
        reference=far,
        execution=execution,
        loss_type="hinge",
        history=history,
        number=1,
    )
    assert all(float(g.abs().max()) == 0 for g in found.values())
    assert np.isfinite(again.observations.importance_P).all()


SIZES = {"body_parameters": 10, "head_parameters": 2, "recomputes": True}


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_PRN_03_a_step_of_which_nothing_is_kept_has_gradients_of_zero(execution, rig):
    history = seen(rig)
    pruning = Pruning(
        branches="importance",
        keep_fraction=0.1,
        min_probability=0.01,
        branch_execution=execution,
        presample=True,
    )
    _, dense = rig.step(None)
    empty = 0
    for number in range(60):
        result, found = rig.step(pruning, execution=execution, number=number, history=history)
        assert found.keys() == dense.keys()  # the graph stays connected
        assert all(bool(g.isfinite().all()) for g in found.values())
        assert result.metrics.num_pairs == 3  # the denominator does not change
        if result.counts.backward_tokens == 0:
            empty += 1
            assert all(float(g.abs().max()) == 0 for g in found.values())
    assert empty > 0


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_pair_that_is_not_finite_is_named(execution, value, rig):
    broken = [tuple(part.copy() for part in pair) for pair in rig.reference]
    broken[1][0][0] = value
    with pytest.raises(NonFiniteError) as caught:
        rig.step(
            Pruning(branches="importance", keep_fraction=0.5, branch_execution=execution),
            reference=broken,
            execution=execution,
        )
    assert caught.value.pair_ids == (1,)
