"""The invariants that a run checks on itself fail when they should."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sdpo_scale.checks import AdapterCheck, check_first_step, check_packed_pair, longest_pack
from sdpo_scale.metrics import PAIR_COLUMNS, MetricSums
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.objectives import OBJECTIVES
from sdpo_scale.step import StepOptions
from tests.helpers.pairs import random_pairs
from tests.helpers.tiny_models import build

OPTIONS = StepOptions(
    objective=OBJECTIVES["sigmoid"], beta=0.1, label_smoothing=0.0, max_tokens=100
)


def test_longest_pack_is_the_fullest_within_tokens_and_pairs():
    sizes = np.array([10, 70, 30, 25, 5])
    assert longest_pack(sizes, max_tokens=100, max_pairs=9) == (1, 2)
    assert longest_pack(sizes, max_tokens=1000, max_pairs=2) == (1, 2)
    assert longest_pack(sizes, max_tokens=96, max_pairs=9) == (1, 3)


def test_a_packed_pair_that_differs_is_an_error():
    model = build("llama")
    bind_logprob_forward(model, backend="sdpa")
    pairs = tuple(random_pairs(2))

    def forward(layout):
        return model(pack=layout).logprobs_R

    check_packed_pair(model, pairs, forward=forward, dtype=torch.float32)
    with pytest.raises(
        RuntimeError, match="row 1 has other log-probabilities in a pack than alone"
    ):
        check_packed_pair(
            model,
            pairs,
            forward=lambda layout: forward(layout) + layout.num_pairs,
            dtype=torch.float32,
        )
    with pytest.raises(RuntimeError, match="than in the plain model"):
        check_packed_pair(
            model, pairs, forward=lambda layout: forward(layout) + 1, dtype=torch.float32
        )


def sums(per_token):
    return MetricSums(
        num_pairs=2,
        pair_sums={**dict.fromkeys(PAIR_COLUMNS, 0.0), "absolute_log_ratio": per_token * 4},
        token_counts=(0, 0),
        token_sums={},
    )


def test_a_first_step_away_from_margin_zero_is_an_error():
    check_first_step(sums(1e-5), options=OPTIONS, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"policy differs from the reference .* of 0\.693147"):
        check_first_step(sums(0.01), options=OPTIONS, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="policy differs"):
        check_first_step(sums(float("nan")), options=OPTIONS, dtype=torch.bfloat16)


@pytest.mark.parametrize(("fp16", "patience"), [(False, 3), (True, 30)])
def test_an_adapter_that_stands_still_is_an_error_after_some_steps(fp16, patience):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    check = AdapterCheck(lambda tensor: tensor)
    arguments = (SimpleNamespace(fp16=fp16), SimpleNamespace(global_step=7), None)

    def step():
        check.on_step_begin(*arguments, model=model, optimizer=optimizer)
        check.on_step_end(*arguments, model=model)

    for _ in range(patience - 1):
        step()
    with pytest.raises(RuntimeError, match=r"2 of 2 .* in step 7: .*: weight, bias"):
        step()


def test_an_update_that_goes_up_as_often_as_down_is_seen():
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0, 0.5]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    check = AdapterCheck(lambda tensor: tensor)
    arguments = (SimpleNamespace(fp16=False), SimpleNamespace(global_step=1), None)
    check.on_step_begin(*arguments, model=model, optimizer=optimizer)
    model.weight.data.add_(torch.tensor([[0.25, -0.25]]))
    for _ in range(5):  # done after the first
        check.on_step_end(*arguments, model=model)
        check.on_step_begin(*arguments, model=model, optimizer=optimizer)
