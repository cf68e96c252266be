"""Pack layouts: the drawn example, and what every layout must satisfy."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdpo_scale.packing.layout import build_layout


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
    assert (layout.max_seqlen_q, layout.max_seqlen_k) == (5, 5)


@given(st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=6))
def test_each_scored_token_is_predicted_by_its_predecessor_in_its_own_sequence(lengths):
    counter = iter(range(10_000))
    pairs = [tuple(ids(*(next(counter) for _ in range(n))) for n in triple) for triple in lengths]
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


@given(st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=1, max_size=6))
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
