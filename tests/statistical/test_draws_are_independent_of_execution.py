"""A pruned step is one estimate: how it is packed and ordered changes neither draw nor gradient."""

import numpy as np
import pytest
import torch

from sdpo_scale.draws import StepDraw
from sdpo_scale.pruning import Pruning
from sdpo_scale.record import Ranks
from tests.exactness.test_step_invariance import reference_logprobs
from tests.exactness.test_step_on_ranks import BRANCHES, MODES, PAIRS, history_of, step
from tests.helpers.gradients import relative_error
from tests.helpers.tiny_models import build
from tests.helpers.tolerances import FLOAT64_ENUMERATION

ALL = {name: value for name, value in MODES["all"].items() if name != "branch_execution"}
PRUNED = {
    **{mode: options for mode, options in MODES.items() if options is not None},
    "prefix_and_position": {"prefix": "uniform_floor", "position_fraction": 0.5},
    "response_checkpoint": {
        **BRANCHES,
        "branch_unit": "response",
        "branch_execution": "checkpoint",
    },
    "pivotal_two_pass": {
        **BRANCHES,
        "branch_sampling": "pivotal",
        "branch_execution": "two_pass",
    },
    "all_two_pass": {**ALL, "branch_execution": "two_pass"},
}


@pytest.fixture(scope="module")
def reference():
    return reference_logprobs(build("llama", seed=1, dtype=torch.float64), PAIRS)


def draw_of(mode, reference, *, seed=3, number=7):
    options = Pruning(**PRUNED[mode])
    return StepDraw(options=options, history=history_of(reference), seed=seed, step=number)


@pytest.mark.parametrize("mode", PRUNED)
def test_max_tokens_and_order_within_the_step_change_nothing(mode, reference):
    draw = draw_of(mode, reference)
    expected_result, expected = step(Ranks(), reference, draw, max_tokens=1000)
    sizes = sorted(sum(map(len, pair.tokens)) for pair in PAIRS)
    one_pair, three_pairs = sizes[-1], sum(sizes[-3:])
    order = np.random.default_rng(0).permutation(len(PAIRS))
    shuffled = [PAIRS[p] for p in order], [reference[p] for p in order]
    runs = [
        step(Ranks(), reference, draw, max_tokens=one_pair),
        step(Ranks(), reference, draw, max_tokens=three_pairs),
        step(Ranks(), shuffled[1], draw, pairs=shuffled[0], max_tokens=one_pair),
        step(Ranks(), shuffled[1], draw, pairs=shuffled[0], max_tokens=1000),
    ]
    assert runs[0][0].num_micro_batches > expected_result.num_micro_batches
    for result, found in runs:
        assert relative_error(found, expected) < FLOAT64_ENUMERATION
        assert result.counts.backward_tokens == expected_result.counts.backward_tokens
        assert result.counts.max_weight == pytest.approx(expected_result.counts.max_weight)


@pytest.mark.parametrize("mode", PRUNED)
@pytest.mark.parametrize("others", [[(3, 8), (3, 9)], [(4, 7), (5, 7)]], ids=["step", "seed"])
def test_another_step_or_seed_draws_otherwise(others, mode, reference):
    # of two, since few pairs have few outcomes and one may come twice
    _, expected = step(Ranks(), reference, draw_of(mode, reference))
    found = [
        step(Ranks(), reference, draw_of(mode, reference, seed=seed, number=number))[1]
        for seed, number in others
    ]
    assert max(relative_error(gradient, expected) for gradient in found) > 1e-3
