"""Situations in which engines on several ranks were seen to go wrong, on ranks that are threads."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdpo_scale.modeling.logprobs import TokenLogprobs
from sdpo_scale.objectives import Objective
from sdpo_scale.packing.plan import plan_ranks
from sdpo_scale.record import Ranks
from sdpo_scale.step import StepOptions, run_step
from tests.helpers.pairs import pair_of_lengths
from tests.helpers.threads import run_ranks

CASES = Path(__file__).resolve().parents[1] / "cases"


def opt_01(
    ranks: Ranks,
    *,
    max_tokens: int,
    rejected: Sequence[int] = (1, 1, 1, 1),
    on_pack: Callable[[int], None] = lambda _num_pairs: None,
) -> tuple[float, float]:
    """Loss and gradient of pairs whose losses are slope · θ at θ = 1, as the case states them."""
    case = json.loads((CASES / "OPT-01" / "values.json").read_text("utf-8"))
    slopes = [pair["slope"] for pair in case["pairs"]]
    pairs = [pair_of_lengths(k, (2 + k, 1, n)) for k, n in enumerate(rejected)]
    theta = torch.ones((), dtype=torch.float64, requires_grad=True)

    def forward(layout: Any, **_options: Any) -> TokenLogprobs:
        on_pack(layout.num_pairs)
        # the prompt's length says which pair it is; an idle rank's pack has one prompt token
        which = (
            (layout.prompt_length_P - 2)
            .clamp_min(0)
            .repeat_interleave(layout.chosen_length_P + layout.rejected_length_P)
        )
        values = torch.tensor(slopes, dtype=torch.float64)[which] * theta
        return TokenLogprobs(torch.where(layout.is_chosen_R, values, 0.0), None)

    result = run_step(
        pairs,
        None,
        options=StepOptions(
            objective=Objective(
                function=lambda chosen, rejected, **_: chosen + 0 * rejected,
                takes_label_smoothing=False,
            ),
            beta=1.0,
            label_smoothing=0.0,
            max_tokens=max_tokens,
        ),
        forward=forward,
        backward=lambda loss, _is_last: loss.backward(),
        ranks=ranks,
    )
    assert theta.grad is not None
    return result.metrics.loss, float(theta.grad)


@pytest.mark.parametrize("max_tokens", [7, 14, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3, 6])  # with 6 some ranks have no token
def test_OPT_01_a_pair_weighs_the_same_on_whatever_rank_and_in_whatever_micro_batch(
    world_size, max_tokens
):
    results = run_ranks(world_size, lambda ranks: opt_01(ranks, max_tokens=max_tokens))
    assert [loss for loss, _ in results] == pytest.approx([4.0] * world_size)
    assert sum(gradient for _, gradient in results) == pytest.approx(4.0)


@pytest.mark.parametrize(("max_tokens", "sizes"), [(38, [4]), (23, [1, 3])])
def test_OPT_02_micro_batches_of_different_sizes_weigh_by_their_pairs(max_tokens, sizes):
    seen: list[int] = []
    # the pair with loss 10 is as long as the three others together
    found = opt_01(Ranks(), max_tokens=max_tokens, rejected=(1, 1, 1, 17), on_pack=seen.append)
    assert sorted(seen) == sizes
    assert found == pytest.approx((4.0, 4.0))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_DST_01_ranks_run_the_same_number_of_micro_batches_and_each_pair_once(batch_size):
    lines = (CASES / "DST-01" / "train.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    budget = json.loads((CASES / "DST-01" / "expected.json").read_text("utf-8"))["token_budget"]
    # one token per character, and one end token per response
    tokens = np.array([sum(map(len, row.values())) + 2 for row in rows])
    counted = 0
    for start in range(0, len(rows), batch_size):
        step = tokens[start : start + batch_size]
        first, second = plan_ranks(
            step, step.astype(float), max_tokens=budget, world_size=2
        ).micro_batches
        assert len(first) == len(second)
        counted += sum(len(m.positions) for m in (*first, *second) if m is not None)
    assert counted == 7
