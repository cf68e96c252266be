"""The step's gradient, metrics and draws do not depend on how many ranks share it."""

import threading
from typing import Any

import pytest
import torch

from sdpo_scale.data.reference import NonFiniteError
from sdpo_scale.draws import PruningHistory, StepDraw
from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.objectives import OBJECTIVES
from sdpo_scale.pruning import Pruning
from sdpo_scale.record import Ranks
from sdpo_scale.step import StepOptions, run_step
from tests.exactness.test_step_invariance import reference_logprobs
from tests.helpers.gradients import gradients, relative_error
from tests.helpers.pairs import random_pairs
from tests.helpers.threads import run_ranks
from tests.helpers.tiny_models import build
from tests.helpers.tolerances import FLOAT64_ENUMERATION

PAIRS = random_pairs(7)
_BUILDING = threading.Lock()
BRANCHES = {"branches": "importance", "keep_fraction": 0.5}
MODES: dict[str, Any] = {
    "dense": None,
    "prefix": {"prefix": "uniform_floor"},
    "branch_two_pass": {**BRANCHES, "branch_execution": "two_pass"},
    "branch_checkpoint": {**BRANCHES, "branch_execution": "checkpoint"},
    "response_two_pass": {
        **BRANCHES,
        "branch_unit": "response",
        "branch_execution": "two_pass",
    },
    "position": {"position_fraction": 0.5},
    "all": {
        **BRANCHES,
        "presample": True,
        "prefix": "uniform_floor",
        "train_prefix": "geometric",
        "position_fraction": 0.5,
        "branch_execution": "checkpoint",
    },
}


@pytest.fixture(scope="module")
def reference():
    return reference_logprobs(build("llama", seed=1, dtype=torch.float64), PAIRS)


def history_of(reference) -> PruningHistory:
    history = PruningHistory()
    options = Pruning(branches="importance", variance_inflation=1.0)
    draw = StepDraw(options=options, history=history, seed=0, step=0)
    result, _ = step(Ranks(), reference, draw, PAIRS[:5])
    history.observe(result.observations)
    return history


def step(ranks: Ranks, reference, draw=None, pairs=PAIRS, max_tokens=110):
    with _BUILDING:  # the random state that parameters are drawn from is one for all threads
        model = build("llama", dtype=torch.float64)
    bind_logprob_forward(model, backend="sdpa")
    recompute = None
    if draw is not None and draw.options.execution(recomputes=True) == "checkpoint":
        recompute = PrunedRecompute.bind(model)
    result = run_step(
        pairs,
        reference[: len(pairs)],
        options=StepOptions(
            objective=OBJECTIVES["sigmoid"],
            beta=0.3,
            label_smoothing=0.0,
            max_tokens=max_tokens,
            with_statistics=True,
        ),
        forward=lambda layout, is_last, **kwargs: model(pack=layout, **kwargs),
        backward=lambda loss, _is_last: loss.backward(),
        draw=draw,
        recompute=recompute,
        ranks=ranks,
    )
    return result, gradients(model)


@pytest.mark.parametrize("world_size", [2, 3, 9])  # 9: more ranks than pairs
@pytest.mark.parametrize("mode", MODES)
def test_gradients_metrics_and_draws_are_those_of_one_process(mode, world_size, reference):
    draw = None
    if MODES[mode] is not None:
        history = history_of(reference)
        draw = StepDraw(options=Pruning(**MODES[mode]), history=history, seed=3, step=7)
    expected_result, expected = step(Ranks(), reference, draw)
    results = run_ranks(world_size, lambda ranks: step(ranks, reference, draw))
    total = {name: sum(found[name] for _, found in results) for name in expected}
    assert relative_error(total, expected) < FLOAT64_ENUMERATION
    means = expected_result.metrics.means(beta=0.3)
    sizes = {"body_parameters": 10, "head_parameters": 1, "recomputes": True}
    for result, found in results:
        assert found.keys() == expected.keys()  # a rank without a pair has gradients, of 0
        assert result.metrics.loss == pytest.approx(expected_result.metrics.loss, rel=1e-12)
        # token statistics are float32
        assert result.metrics.means(beta=0.3) == pytest.approx(means, rel=1e-6)
        if draw is not None:
            expected_seen = expected_result.observations
            assert result.observations.pair_ids == expected_seen.pair_ids
            assert result.observations.importance_P == pytest.approx(
                expected_seen.importance_P, rel=1e-9
            )
            counted, once = result.counts.means(**sizes), expected_result.counts.means(**sizes)
            for name in ("executed_fraction", "backward_fraction", "variance_inflation"):
                key = f"pruning/{name}"
                assert counted[key] == pytest.approx(once[key], rel=1e-9), name
    assert len({result.num_micro_batches for result, _ in results}) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_pair_that_is_not_finite_is_named_on_every_rank(mode, reference):
    broken = [tuple(part.copy() for part in pair) for pair in reference]
    broken[3][0][0] = float("nan")
    draw = None
    if MODES[mode] is not None:
        options = Pruning(**MODES[mode])
        draw = StepDraw(options=options, history=PruningHistory(), seed=3, step=7)

    def run(ranks: Ranks) -> Any:
        with pytest.raises(NonFiniteError) as caught:
            step(ranks, broken, draw)
        return caught.value.pair_ids

    assert run_ranks(2, run) == [(3,), (3,)]
