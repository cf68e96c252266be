"""Step plans: every pair once, within the budget, refused with numbers where impossible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo_scale.packing.plan import pair_costs, plan_ranks, plan_step


@given(
    st.lists(st.integers(3, 100), min_size=1, max_size=60),
    st.integers(100, 400),
)
def test_every_pair_is_in_exactly_one_micro_batch_within_the_budget(pair_tokens, max_tokens):
    plan = plan_step(pair_tokens, max_tokens=max_tokens)
    positions = [p for m in plan.micro_batches for p in m.positions]
    assert sorted(positions) == list(range(len(pair_tokens)))
    assert plan.num_pairs == len(pair_tokens)
    assert plan.num_tokens == sum(pair_tokens)
    for micro_batch in plan.micro_batches:
        assert micro_batch.positions
        assert micro_batch.num_tokens == sum(pair_tokens[p] for p in micro_batch.positions)
        assert micro_batch.num_tokens <= max_tokens
    # best-fit never leaves two packs that would fit into one
    sizes = sorted(m.num_tokens for m in plan.micro_batches)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > max_tokens


def test_the_largest_pack_runs_first_and_the_plan_is_a_function_of_lengths():
    pair_tokens = [10, 90, 20, 60, 60]
    plan = plan_step(pair_tokens, max_tokens=100)
    sizes = [m.num_tokens for m in plan.micro_batches]
    assert sizes == sorted(sizes, reverse=True)
    assert plan == plan_step(list(pair_tokens), max_tokens=100)


def test_case_pck_03_a_pair_over_the_budget_is_refused_with_numbers():
    with pytest.raises(ValueError, match=r"pair 1 of the step has 88 tokens, max_tokens is 64"):
        plan_step([7, 88, 7], max_tokens=64)


def test_a_step_without_pairs_is_refused():
    with pytest.raises(ValueError, match="at least one pair"):
        plan_step([], max_tokens=64)


# All ranks.


@given(
    st.lists(st.integers(3, 100), min_size=1, max_size=60),
    st.integers(100, 400),
    st.integers(1, 9),
)
def test_every_pair_is_on_one_rank_and_all_ranks_have_as_many_micro_batches(
    pair_tokens, max_tokens, world_size
):
    costs = [n + n * n / 500 for n in pair_tokens]
    plans = plan_ranks(pair_tokens, costs, max_tokens=max_tokens, world_size=world_size)
    assert len(plans.micro_batches) == world_size
    assert len({len(batches) for batches in plans.micro_batches}) == 1
    found = [m for batches in plans.micro_batches for m in batches if m is not None]
    assert sorted(p for m in found for p in m.positions) == list(range(len(pair_tokens)))
    for micro_batch in found:
        assert micro_batch.positions
        assert micro_batch.num_tokens == sum(pair_tokens[p] for p in micro_batch.positions)
        assert micro_batch.num_tokens <= max_tokens
    assert plans.balance >= 1 - 1e-9


def test_one_rank_has_the_packs_of_a_step():
    pair_tokens = [10, 90, 20, 60, 60]
    plans = plan_ranks(pair_tokens, pair_tokens, max_tokens=100, world_size=1)
    expected = plan_step(pair_tokens, max_tokens=100).micro_batches
    assert plans.micro_batches == (expected,)


def test_a_rank_without_pairs_is_idle():
    plans = plan_ranks([10], [10.0], max_tokens=100, world_size=3)
    assert [batches[0] is None for batches in plans.micro_batches] == [False, True, True]


def test_64_ranks_are_balanced_on_lengths_like_dialogues():
    rng = np.random.default_rng(0)
    prompts = (rng.gamma(2.2, 550, 512) + 50).astype(int)
    responses = (rng.gamma(3, 150, (512, 2)) + 10).astype(int)
    costs = pair_costs(prompts, responses, 4096)
    tokens = prompts + responses.sum(axis=1)
    plans = plan_ranks(tokens, costs, max_tokens=16_384, world_size=64)
    totals = [
        sum(costs[p] for m in batches if m for p in m.positions) for batches in plans.micro_batches
    ]
    assert max(totals) / np.mean(totals) < 1.05
    assert plans.balance < 1.05  # even though ranks wait for each other at every micro-batch


def test_a_pair_over_the_budget_is_refused_on_any_number_of_ranks():
    with pytest.raises(ValueError, match="max_tokens is 64"):
        plan_ranks([7, 88, 7], [7, 88, 7], max_tokens=64, world_size=2)


def test_attention_makes_long_pairs_dearer_than_their_tokens():
    short, long = pair_costs(np.array([10, 1000]), np.array([[10, 10], [1000, 1000]]), 64)
    assert long > 100 * short * 1.5
    assert short == pytest.approx(30, rel=0.05)
