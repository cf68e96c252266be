"""Steps at the edge: one token, one pair, no gradient, nothing kept, values that are not finite."""

from itertools import combinations
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
        self.change: Any = lambda _layout, output: output
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
        max_tokens: int = 30,
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
                objective=OBJECTIVES[loss_type],
                beta=0.5,
                label_smoothing=0.0,
                max_tokens=max_tokens,
            ),
            forward=lambda layout, is_last, **kwargs: self.change(
                layout, self.model(pack=layout, **kwargs)
            ),
            backward=lambda loss, _is_last: loss.backward(),
            draw=draw,
            recompute=self.recompute if draw is not None and execution == "checkpoint" else None,
        )
        return result, gradients(self.model)


def pruning_of(execution: str) -> Pruning:
    if execution == "single":  # a step whose backward runs on everything that was executed
        return Pruning(**{n: ALL[n] for n in ("prefix", "prefix_levels", "position_fraction")})
    return Pruning(**ALL, branch_execution=execution)


@pytest.mark.parametrize("execution", [*EXECUTIONS, "single"])
def test_pairs_of_one_token_and_more_levels_than_tokens_stay_finite(execution, rig):
    for number in range(10):
        result, found = rig.step(pruning_of(execution), execution=execution, number=number)
        assert np.isfinite(result.metrics.loss)
        assert np.isfinite(result.counts.max_weight)
        assert all(bool(g.isfinite().all()) for g in found.values())


def test_levels_of_a_response_of_one_token_all_execute_it(rig):
    # all levels but 0 are the whole pair, so that nothing is cut and nothing is noisy
    one, reference = PAIRS[:1], rig.reference[:1]
    expected_result, dense = rig.step(None, pairs=one, reference=reference)
    for number in range(5):
        result, found = rig.step(
            Pruning(prefix="geometric", prefix_levels=16),
            pairs=one,
            reference=reference,
            number=number,
            execution="single",
        )
        assert relative_error(found, dense) < FLOAT64_ENUMERATION
        assert result.metrics.loss == pytest.approx(expected_result.metrics.loss, rel=1e-10)


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


@pytest.mark.parametrize("execution", [*EXECUTIONS, "single"])
def test_coefficients_of_zero_leave_a_gradient_of_zero(execution, rig):
    # the hinge is flat where the margin exceeds 1, here at every cut level
    far = [(chosen - 50, rejected + 50) for chosen, rejected in rig.reference]
    _, dense = rig.step(None, reference=far, loss_type="hinge")
    assert dense.keys() == dict(rig.model.named_parameters()).keys()
    result, found = rig.step(
        pruning_of(execution), reference=far, execution=execution, loss_type="hinge"
    )
    assert result.metrics.loss == 0
    assert found.keys() == dense.keys()
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


def gradients_alone(rig: Rig) -> list[dict[str, torch.Tensor]]:
    """The gradient of each pair's loss, in a step of its own."""
    return [
        rig.step(None, pairs=[pair], reference=[reference])[1]
        for pair, reference in zip(PAIRS, rig.reference, strict=True)
    ]


def weighted(alone: list[dict[str, torch.Tensor]], weights: Any) -> dict[str, torch.Tensor]:
    return {n: sum(w * g[n] for w, g in zip(weights, alone, strict=True)) / 3 for n in alone[0]}


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_PRN_03_a_micro_batch_of_which_nothing_is_kept_adds_nothing(execution, rig):
    alone = gradients_alone(rig)
    pruning = Pruning(branches="uniform", keep_fraction=0.5, branch_execution=execution)
    subsets = [s for n in range(4) for s in combinations(range(3), n)]
    # every kept pair weighs 1/π = 2, and the mean is over all three, kept or not
    expected = [weighted(alone, [2.0 * (p in subset) for p in range(3)]) for subset in subsets]
    seen_subsets = set()
    for number in range(40):
        result, found = rig.step(pruning, execution=execution, number=number, max_tokens=12)
        if execution == "checkpoint":
            assert result.num_micro_batches == 3  # one pair each
        errors = [relative_error(found, gradient) for gradient in expected[1:]]  # none is missing
        if all(float(g.abs().max()) == 0 for g in found.values()):
            assert result.counts.backward_tokens == 0
            seen_subsets.add(())
            continue
        assert min(errors) < FLOAT64_ENUMERATION
        subset = subsets[1 + int(np.argmin(errors))]
        seen_subsets.add(subset)
        sizes = [sum(map(len, PAIRS[p].tokens)) for p in subset]
        assert result.counts.backward_tokens == sum(sizes)
        assert result.counts.max_weight == 2.0
    # independent coins keep anything; a sample of fixed size keeps one or two of three
    some = {s for s in subsets if execution == "checkpoint" or len(s) in (1, 2)}
    assert seen_subsets == some


def test_PRN_03_presampled_pairs_leave_the_denominator_and_the_whole_step_may_be_empty(rig):
    alone, history = gradients_alone(rig), seen(rig)
    pruning = Pruning(presample=True, keep_fraction=0.2, min_probability=0.05)
    cost = np.array([sum(map(len, pair.tokens)) for pair in PAIRS], dtype=float)
    counts = set()
    for number in range(40):
        draw = StepDraw(options=pruning, history=history, seed=0, step=number)
        weights = draw.presample([0, 1, 2], cost)
        result, found = rig.step(pruning, execution="single", number=number, history=history)
        expected = weighted(alone, weights)
        assert relative_error(found, expected) < FLOAT64_ENUMERATION
        assert result.metrics.num_pairs == 3
        assert np.isfinite(result.metrics.loss)
        assert result.counts.executed_tokens == cost[weights > 0].sum()
        assert result.observations.pair_ids == tuple(np.flatnonzero(weights))
        counts.add(int((weights > 0).sum()))
    assert counts == {0, 1}


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("execution", [*EXECUTIONS, "single"])
@pytest.mark.parametrize("source", ["reference", "policy"])
@pytest.mark.parametrize("response", [0, 1], ids=["chosen", "rejected"])
def test_PRN_03_a_pair_that_is_not_finite_is_named(response, source, execution, value, rig):
    prunes = {"branches": "importance", "keep_fraction": 0.5, "branch_execution": execution}
    pruning = Pruning(**prunes) if execution in EXECUTIONS else pruning_of(execution)
    broken = [tuple(part.copy() for part in pair) for pair in rig.reference]
    if source == "reference":
        broken[1][response][0] = value
    else:
        prompt = PAIRS[1].prompt_ids.tolist()

        def change(layout, output):
            lengths = torch.stack([layout.chosen_length_P, layout.rejected_length_P], dim=1)
            row = token = 0
            for n, (chosen, rejected) in zip(layout.prompt_length_P, lengths, strict=True):
                if layout.input_ids_T[row : row + n].tolist() == prompt:
                    is_broken = torch.arange(len(output.logprobs_R)) == token + response * chosen
                    logprobs_R = output.logprobs_R.masked_fill(is_broken, value)
                    return output._replace(logprobs_R=logprobs_R)
                row, token = row + n + chosen + rejected, token + chosen + rejected
            return output

        rig.change = change
    with pytest.raises(NonFiniteError) as caught:
        rig.step(pruning, reference=broken, execution=execution)
    assert caught.value.pair_ids == (1,)
