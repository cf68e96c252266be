"""A pack of shared-prompt pairs computes what the model computes on each sequence alone."""

import pytest
import torch

from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.packing.layout import build_layout
from tests.helpers.gradients import gradients, relative_error
from tests.helpers.oracle import response_logprobs
from tests.helpers.pairs import random_pairs
from tests.helpers.tiny_models import FAMILIES, build
from tests.helpers.tolerances import FLOAT32_PACKED_AGAINST_SEPARATE


def separate_logprobs(model, pairs):
    return torch.cat(
        [
            response_logprobs(model, pair.prompt_ids.tolist(), response.tolist())
            for pair in pairs
            for response in (pair.chosen_ids, pair.rejected_ids)
        ]
    )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_gradients_equal_separate_ones(family, checkpointing):
    model = build(family).train()
    pairs = random_pairs(6)
    expected = separate_logprobs(model, pairs)
    weights = torch.randn(len(expected))
    (expected * weights).sum().backward()
    expected_gradients = gradients(model)

    bind_logprob_forward(model, backend="sdpa")
    if checkpointing:
        model.activation_checkpointing_enable()
    layout = build_layout([pair.tokens for pair in pairs])
    found, statistics, _ = model(pack=layout)
    (found * weights).sum().backward()

    assert statistics is None
    scale = expected.abs().max()
    assert (found - expected).abs().max() < FLOAT32_PACKED_AGAINST_SEPARATE * scale
    assert relative_error(gradients(model), expected_gradients) < FLOAT32_PACKED_AGAINST_SEPARATE


@pytest.mark.parametrize("family", FAMILIES)
def test_case_pck_01_pairs_of_a_pack_do_not_see_each_other(family):
    model = build(family)
    bind_logprob_forward(model, backend="sdpa")
    pairs = [pair.tokens for pair in random_pairs(4, longest=12)]
    scored = [len(pair[1]) + len(pair[2]) for pair in pairs]
    changed = [tuple((part + 1) % 100 + 3 for part in pairs[0]), *pairs[1:]]
    with torch.no_grad():
        before = model(pack=build_layout(pairs)).logprobs_R.split(scored)
        after = model(pack=build_layout(changed)).logprobs_R.split(scored)
        order = [2, 0, 3, 1]
        permuted = model(pack=build_layout([pairs[k] for k in order])).logprobs_R
    assert not torch.equal(before[0], after[0])
    for left, right in zip(before[1:], after[1:], strict=True):
        assert torch.equal(left, right)
    torch.testing.assert_close(permuted, torch.cat([before[k] for k in order]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ordinary_forward_stays_what_it_was(family):
    model = build(family).eval()
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    mask = (ids > 0).long()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        bind_logprob_forward(model, backend="sdpa")
        model(pack=build_layout([pair.tokens for pair in random_pairs(2)]))
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
        generated = model.generate(ids[:1], max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > ids.shape[1]


def test_bfloat16_error_is_at_most_twice_the_plain_models():
    pairs = random_pairs(8)
    layout = build_layout([pair.tokens for pair in pairs])
    with torch.no_grad():
        exact = separate_logprobs(build("llama"), pairs)
        plain = separate_logprobs(build("llama", dtype=torch.bfloat16), pairs)
        model = build("llama", dtype=torch.bfloat16)
        bind_logprob_forward(model, backend="sdpa")
        packed = model(pack=layout).logprobs_R
    assert packed.dtype == torch.float32
    assert (packed - exact).abs().mean() <= 2 * (plain - exact).abs().mean()
