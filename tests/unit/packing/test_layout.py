"""Pack layouts: the drawn example, and what every layout must satisfy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdpo_scale.packing.layout import build_layout, select_rows

# (prompt, chosen, rejected) tokens of a pair, at least one of the responses not empty
LENGTHS = st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 4)).filter(
    lambda lengths: lengths[1] + lengths[2] > 0
)


def ids(*values):
    return np.array(values, dtype=np.int32)


def test_the_example_drawn_in_the_module():
    layout = build_layout([(ids(10, 11, 12), ids(20, 21), ids(30, 31))])
    assert layout.input_ids_T.tolist() == [10, 11, 12, 20, 21, 30, 31]
    assert layout.position_ids_T.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert layout.cu_seqlens_q.tolist() == [0, 5, 7]
    assert layout.cu_seqlens_k.tolist() == [0, 5, 10]
    assert layout.kv_index_K.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6]
    assert layout.hidden_index_R.tolist() == [2, 3, 2, 5]
    assert layout.target_ids_R.tolist() == [20, 21, 30, 31]
    assert layout.is_chosen_R.tolist() == [True, True, False, False]
    assert (max(layout.lengths_q), max(layout.lengths_k)) == (5, 5)


def numbered_pairs(lengths):
    """Pairs in which no token id occurs twice."""
    counter = iter(range(10_000))
    return [tuple(ids(*(next(counter) for _ in range(n))) for n in triple) for triple in lengths]


@given(st.lists(LENGTHS, min_size=1, max_size=6))
def test_each_scored_token_is_predicted_by_its_predecessor_in_its_own_sequence(lengths):
    pairs = numbered_pairs(lengths)
    layout = build_layout(pairs)
    predecessors = layout.input_ids_T[layout.hidden_index_R].tolist()
    expected = []
    for prompt, chosen, rejected in pairs:
        for response in (chosen, rejected):
            sequence = [*prompt, *response]
            expected += sequence[len(prompt) - 1 : -1]
    assert predecessors == expected
    assert layout.num_pairs == len(pairs)
    assert layout.num_tokens == sum(map(sum, lengths))


@given(st.lists(LENGTHS, min_size=1, max_size=6))
def test_case_pck_04_boundaries_are_int32_and_strictly_increasing(lengths):
    layout = build_layout([tuple(ids(*range(n)) for n in triple) for triple in lengths])
    for boundaries, end in (
        (layout.cu_seqlens_q, layout.num_tokens),
        (layout.cu_seqlens_k, len(layout.kv_index_K)),
    ):
        assert boundaries.dtype == torch.int32
        assert boundaries[0] == 0
        assert boundaries[-1] == end
        assert (boundaries.diff() > 0).all()


def test_case_num_06_no_token_is_predicted_across_a_border():
    pairs = [(ids(1, 2), ids(3, 4, 5), ids(6, 7, 5)), (ids(8), ids(9, 5), ids(10, 5))]
    layout = build_layout(pairs)
    assert layout.chosen_length_P.tolist() == [3, 2]
    assert layout.rejected_length_P.tolist() == [3, 2]
    assert layout.input_ids_T[layout.hidden_index_R].tolist() == [2, 3, 4, 2, 6, 7, 8, 9, 8, 10]


def test_an_empty_rejected_response_has_no_segment():
    layout = build_layout([(ids(1, 2), ids(3, 4), ids()), (ids(5), ids(6), ids(7))])
    assert layout.input_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert layout.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1, 1]
    assert layout.cu_seqlens_q.tolist() == [0, 4, 6, 7]
    assert layout.cu_seqlens_k.tolist() == [0, 4, 6, 8]
    assert layout.kv_index_K.tolist() == [0, 1, 2, 3, 4, 5, 4, 6]
    assert layout.hidden_index_R.tolist() == [1, 2, 4, 4]
    assert layout.prompt_length_P.tolist() == [2, 1]
    assert layout.chosen_length_P.tolist() == [2, 1]
    assert layout.rejected_length_P.tolist() == [0, 1]


def test_an_empty_chosen_response_leaves_the_segment_of_the_prompt():
    layout = build_layout([(ids(1, 2), ids(), ids(3, 4))])
    assert layout.cu_seqlens_q.tolist() == [0, 2, 4]
    assert layout.cu_seqlens_k.tolist() == [0, 2, 6]
    assert layout.kv_index_K.tolist() == [0, 1, 0, 1, 2, 3]
    assert layout.hidden_index_R.tolist() == [1, 2]
    assert layout.is_chosen_R.tolist() == [False, False]
    assert (max(layout.lengths_q), max(layout.lengths_k)) == (2, 4)
    assert layout.chosen_length_P.tolist() == [0]


@pytest.mark.parametrize("lengths", [(0, 1, 1), (1, 0, 0)])
def test_a_pair_without_a_prompt_or_without_responses_is_refused(lengths):
    with pytest.raises(AssertionError):
        build_layout([tuple(ids(*range(n)) for n in lengths)])


def test_the_selection_drawn_at_its_class():
    layout = build_layout([(ids(10, 11, 12), ids(20, 21), ids(30, 31))])
    selection = select_rows(layout, [(1, 1)])
    assert selection.rows_T.tolist() == [0, 1, 2, 3, 5]
    assert selection.cu_seqlens_q.tolist() == [0, 4, 5]
    assert selection.cu_seqlens_k.tolist() == [0, 4, 8]
    assert selection.kv_index_K.tolist() == [0, 1, 2, 3, 0, 1, 2, 4]


@given(st.data(), st.lists(LENGTHS, min_size=1, max_size=6))
def test_a_selection_is_the_pack_of_the_prefixes(data, lengths):
    pairs = numbered_pairs(lengths)
    kept = [(data.draw(st.integers(0, n[1])), data.draw(st.integers(0, n[2]))) for n in lengths]
    layout = build_layout(pairs)
    selection = select_rows(layout, kept)
    cut = [
        (prompt, chosen[:n_chosen], rejected[:n_rejected])
        for (prompt, chosen, rejected), (n_chosen, n_rejected) in zip(pairs, kept, strict=True)
        if n_chosen or n_rejected
    ]
    if not cut:
        assert selection.rows_T.tolist() == [0]
        assert selection.cu_seqlens_q.tolist() == [0, 1]
        assert selection.cu_seqlens_k.tolist() == [0, 1]
        assert selection.kv_index_K.tolist() == [0]
        return
    expected = build_layout(cut)
    assert selection.rows_T.dtype == selection.kv_index_K.dtype == torch.int64
    assert (selection.rows_T.diff() > 0).all()
    assert torch.equal(layout.input_ids_T[selection.rows_T], expected.input_ids_T)
    assert torch.equal(layout.position_ids_T[selection.rows_T], expected.position_ids_T)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_index_K"):
        found, right = getattr(selection, name), getattr(expected, name)
        assert found.dtype == right.dtype
        assert torch.equal(found, right)


@pytest.mark.parametrize("kept", [[(3, 0)], [(0, 3)], [(-1, 1)], [], [(1, 1), (1, 1)]])
def test_a_selection_that_does_not_fit_is_refused(kept):
    layout = build_layout([(ids(1), ids(2, 3), ids(4, 5))])
    with pytest.raises(AssertionError):
        select_rows(layout, kept)
