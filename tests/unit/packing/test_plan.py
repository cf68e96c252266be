"""Step plans: every pair once, within the budget, refused with numbers where impossible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo_scale.packing.plan import plan_step


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
