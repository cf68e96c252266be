"""Probabilities of positions: within a pair, proportional to size, between the floor and 1."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdpo_scale.estimator.positions import position_probabilities


def probabilities(sizes, lengths, fraction=0.5, floor=0.1):
    return position_probabilities(
        torch.tensor(sizes, dtype=torch.float64),
        torch.tensor(lengths),
        keep_fraction=fraction,
        floor=floor,
    )


def test_the_expected_share_is_kept_in_proportion_to_size():
    found = probabilities([1.0, 2.0, 3.0, 2.0], [4])
    assert found.tolist() == pytest.approx([0.25, 0.5, 0.75, 0.5])


def test_each_pair_is_normalized_by_itself():
    alone = probabilities([1.0, 2.0, 3.0], [3])
    assert probabilities([1.0, 2.0, 3.0, 500.0, 100.0], [3, 2])[:3].tolist() == alone.tolist()
    assert probabilities([7.0, 14.0, 21.0], [3]).tolist() == pytest.approx(alone.tolist())


def test_probabilities_are_capped_and_floored():
    found = probabilities([1.0, 1.0, 100.0, 0.0], [4], fraction=0.9, floor=0.2)
    assert found.tolist() == pytest.approx([0.2, 0.2, 1.0, 0.2])


@given(st.integers(0, 10_000), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_at_most_the_share_is_kept_above_the_floor_and_no_position_is_impossible(
    seed, fraction, floor
):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, 4)
    sizes = rng.lognormal(0, 2, lengths.sum()) * (rng.random(lengths.sum()) < 0.8)
    found = probabilities(sizes.tolist(), lengths.tolist(), fraction, floor).numpy()
    assert (found >= floor).all()
    assert (found <= 1).all()
    ends = np.cumsum(lengths)[:-1]
    for size, p in zip(np.split(sizes, ends), np.split(found, ends), strict=True):
        share = fraction * (size > 0).sum()
        assert p[p > floor].sum() <= share * (1 + 1e-12)  # the floor comes on top
        if ((p > floor) & (p < 1))[size > 0].all():
            assert p[size > 0].sum() == pytest.approx(share)


def test_equal_sizes_give_a_uniform_design():
    assert probabilities([3.0] * 5, [5], fraction=0.3).tolist() == pytest.approx([0.3] * 5)


def test_positions_without_weight_take_no_share_from_the_others():
    found = probabilities([1.0, 0.0, 1.0, 0.0], [4])
    assert found[[0, 2]].tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("lengths", [[1, 1], [2]])
def test_sizes_of_zero_are_no_division_by_zero(lengths):
    assert probabilities([0.0, 0.0], lengths).tolist() == [0.1, 0.1]


def test_a_single_position_is_kept_with_the_fraction():
    assert probabilities([5.0], [1], fraction=0.4).tolist() == pytest.approx([0.4])


def test_responses_of_one_token_share_the_fraction_of_their_pair():
    found = probabilities([3.0, 1.0, 1.0, 1.0], [2, 2], fraction=0.4)
    assert found.tolist() == pytest.approx([0.6, 0.2, 0.4, 0.4])
