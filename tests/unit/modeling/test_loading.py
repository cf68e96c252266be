"""Loading: refusals by name, fingerprints by contents, dropout off."""

import logging

import pytest
import torch
from transformers import OPTConfig

from sdpo_scale.modeling.families import FAMILIES, check_config, position_limit
from sdpo_scale.modeling.loading import (
    load_config,
    load_model,
    load_tokenizer,
    model_fingerprint,
    prepare_model,
    resolve_model_name,
)
from sdpo_scale.packing.layout import build_layout
from tests.helpers import toy_tokenizers
from tests.helpers.pairs import random_pairs
from tests.helpers.tiny_models import build, config_of, model_types

CPU = torch.device("cpu")


def test_a_family_that_is_not_tested_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"family 'opt'.*supported families: cohere2, deepseek_v3"):
        check_config(OPTConfig(), name="x")
    OPTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="opt"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_routers_loss_is_refused_with_what_to_set(family, tmp_path):
    config = config_of(family, output_router_logits=True, router_aux_loss_coef=0.02)
    with pytest.raises(ValueError, match=r"'x'.*0\.02.*output_router_logits: false"):
        check_config(config, name="x")
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="load-balancing loss"):
        load_config(str(tmp_path))
    assert load_config(str(tmp_path), output_router_logits=False).model_type == family
    check_config(config_of(family, output_router_logits=True, router_aux_loss_coef=0.0), name="x")


def test_a_bidirectional_model_is_refused():
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        check_config(config_of("gemma3_text", use_bidirectional_attention=True), name="x")


def test_limits_of_positions():
    assert position_limit(config_of("llama")) is None
    assert position_limit(config_of("gemma3_text")) is None
    assert position_limit(config_of("gpt_oss")) is None
    assert position_limit(config_of("gpt2")).tokens == 512
    assert position_limit(config_of("phi3_longrope")).tokens == 64
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    limit = position_limit(config_of("llama", rope_parameters=dynamic))
    assert limit.tokens == 512
    assert "longest sequence" in limit.reason


def test_every_supported_family_has_an_exactness_test():
    assert model_types() == set(FAMILIES)


def test_parameters_are_float32_unless_asked_for_otherwise(tmp_path):
    build("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).dtype == torch.float32
    assert load_model(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_end_token_and_chat_template_can_be_given(tmp_path):
    toy_tokenizers.build("nothing").save_pretrained(tmp_path)
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}")
    found = load_tokenizer(str(tmp_path), eos_token="<|im_end|>", chat_template=str(template))
    assert found.eos_token_id == 5
    assert found.chat_template == template.read_text()
    given = load_tokenizer(str(tmp_path), chat_template="{{ messages }}")
    assert given.chat_template == "{{ messages }}"
    with pytest.raises(ValueError, match="eos_token '<none>' is not in the vocabulary"):
        load_tokenizer(str(tmp_path), eos_token="<none>")
    with pytest.raises(ValueError, match=r"chat_template 'no.jinja' is neither a file"):
        load_tokenizer(str(tmp_path), chat_template="no.jinja")


def test_a_fingerprint_follows_contents_not_names(tmp_path):
    model = build("llama")
    fingerprint = model_fingerprint(model)
    assert fingerprint == model_fingerprint(build("llama"))
    model.save_pretrained(tmp_path)
    assert fingerprint == model_fingerprint(load_model(str(tmp_path)))
    assert fingerprint != model_fingerprint(build("llama", seed=1))
    assert fingerprint != model_fingerprint(build("llama", rms_norm_eps=1e-3))
    with torch.no_grad():
        model.lm_head.weight[5, 3] += 1e-3
    assert fingerprint != model_fingerprint(model)
    assert model_fingerprint(build("llama", dtype=torch.bfloat16)) != fingerprint


def test_case_num_08_dropout_is_off_and_the_saved_config_unchanged(tmp_path, caplog):
    model = build("llama", attention_dropout=0.1).train()
    with caplog.at_level(logging.INFO, logger="sdpo_scale"):
        prepare_model(model, device=CPU, compute_dtype=torch.float32)
    assert "attention: sdpa (the model runs on cpu" in caplog.text
    layout = build_layout([pair.tokens for pair in random_pairs(3)])
    with torch.no_grad():
        first, second = (model(pack=layout).logprobs_R for _ in range(2))
    assert torch.equal(first, second)
    model.save_pretrained(tmp_path)
    assert load_config(str(tmp_path)).attention_dropout == 0.1


def test_dropout_modules_are_switched_off():
    model = build("llama")
    model.model.extra = torch.nn.Dropout(0.5)
    prepare_model(model, device=CPU, compute_dtype=torch.float32)
    assert model.model.extra.p == 0.0


def test_a_name_that_is_not_demo_stays_as_it_is(tmp_path):
    assert resolve_model_name("org/name", cache_dir=tmp_path) == "org/name"
