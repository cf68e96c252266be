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
    found, statistics, *_ = model(pack=layout)
    (found * weights).sum().backward()

    assert statistics is None
    scale = expected.abs().max()
    assert (found - expected).abs().max() < FLOAT32_PACKED_AGAINST_SEPARATE * scale
    assert relative_error(gradients(model), expected_gradients) < FLOAT32_PACKED_AGAINST_SEPARATE


DETAILS = {
    "mistral_sliding": {"sliding_window": None},
    "gemma2": {"attn_logit_softcapping": None},
    "gemma3_text": {"final_logit_softcapping": None},
    "phi": {"without": "lm_head.bias"},
    "phi3": {"sliding_window": None},
    "phi3_longrope": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gpt2": {"without": "transformer.wpe.weight"},
    "granite": {"logits_scaling": 1.0},
    "smollm3": {"no_rope_layers": [1, 1, 1]},
    "starcoder2": {"sliding_window": None},
    "cohere2": {"logit_scale": 1.0},
    "mixtral": {"num_experts_per_tok": 1},
    "qwen3_moe": {"num_experts_per_tok": 1},
    "gpt_oss": {"without": "sinks"},
    "deepseek_v3": {"without": "e_score_correction_bias"},
}
"""Family → a detail that is taken away; parameters `without` which it is computed are set to 0."""


@pytest.mark.parametrize("family", DETAILS)
def test_a_forgotten_detail_would_be_noticed(family):
    """So the tests above and below mean something."""
    pairs = random_pairs(6)
    layout = build_layout([pair.tokens for pair in pairs])
    model = build(family)
    with torch.no_grad():
        expected = separate_logprobs(model, pairs)
        options = dict(DETAILS[family])
        name = options.pop("without", None)
        twin = build(family, **options)
        twin.load_state_dict(model.state_dict())
        for key, tensor in twin.state_dict().items():
            if name is not None and key.endswith(name):
                tensor.zero_()
        bind_logprob_forward(twin, backend="sdpa")
        found = twin(pack=layout).logprobs_R
    assert (found - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["gpt2", "phi", "starcoder2", "mixtral"])
def test_NUM_08_noise_is_off_in_the_policy(family):
    noise = {
        "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        "phi": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1},
        "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1},
        "mixtral": {"router_jitter_noise": 0.1, "attention_dropout": 0.1},
    }[family]
    model = build(family, **noise).train()
    pairs = random_pairs(3)
    with torch.no_grad():
        expected = separate_logprobs(build(family).eval(), pairs)
        bind_logprob_forward(model, backend="sdpa")
        found = model(pack=build_layout([pair.tokens for pair in pairs])).logprobs_R
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, size in noise.items():
        assert getattr(model.config, name) == size


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
