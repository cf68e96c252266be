"""Options of adapters, and what is done with a model that has one."""

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from sdpo_scale.config import SDPOConfig
from sdpo_scale.modeling.adapted import (
    adapter_off,
    base_model_of,
    base_state,
    is_adapted,
    numel,
    prepare_checkpointing,
    skeleton_of,
)
from sdpo_scale.modeling.adapters import plan_adapter
from sdpo_scale.modeling.export import merged_model
from sdpo_scale.modeling.loading import matmul_parameters, model_fingerprint
from tests.helpers.adapters import adapted
from tests.helpers.tiny_models import build

EXTRA = {"modules_to_save": ["lm_head", "norm"]}


def config(tmp_path: Any, **options: Any) -> SDPOConfig:
    return SDPOConfig(output_dir=str(tmp_path), report_to="none", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"use_peft": True, "lora_dropout": 0.05},
            "lora_dropout = 0.05 is refused",
        ),
        ({"use_peft": True, "lora_r": 0}, "lora_r must be at least 1, got 0"),
        ({"use_peft": True, "lora_alpha": 0}, "lora_alpha must be at least 1, got 0"),
        ({"lora_r": 8}, "lora_r = 8 has no effect without use_peft: true"),
        ({"use_dora": True}, "use_dora = True has no effect without use_peft: true"),
        ({"adapter_reference": "off"}, "adapter_reference 'off' is unknown; choose start or base"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type 'int4' is unknown; choose nf4"),
        ({"load_in_8bit": True}, "load_in_8bit = True is refused: .* use load_in_4bit"),
        ({"load_in_4bit": True, "merge_adapter": True}, "merge_adapter = True is refused with"),
    ],
)
def test_options_that_contradict_are_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Any
):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_options_become_the_config_of_the_same_meaning(tmp_path: Any):
    options = config(
        tmp_path,
        use_peft=True,
        lora_r=4,
        lora_alpha=8,
        lora_target_modules=["all-linear"],
        lora_modules_to_save=["norm"],
        use_rslora=True,
    )
    adapter = plan_adapter(options, build("llama"))
    assert adapter is not None
    found = adapter.config
    assert (found.r, found.lora_alpha, found.target_modules) == (4, 8, "all-linear")
    assert (found.modules_to_save, found.use_rslora, found.use_dora) == (["norm"], True, False)
    assert found.lora_dropout == 0
    assert adapter.is_off_in_reference
    assert adapter.starts_at_reference
    assert plan_adapter(config(tmp_path), build("llama")) is None


def test_the_same_adapter_is_described_alike(tmp_path: Any):
    options = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj", "up_proj"]}
    plans = [plan_adapter(config(tmp_path, **options), build("llama")) for _ in range(2)]
    assert plans[1] is not None
    plans[1].config.base_model_name_or_path = "elsewhere"
    options["lora_r"] = 3
    plans.append(plan_adapter(config(tmp_path, **options), build("llama")))
    first, second, other = [plan.description for plan in plans if plan is not None]
    assert first == second != other
    assert "['q_proj', 'up_proj', 'v_proj']" in first


def test_the_state_without_the_adapter_is_that_of_the_base_model():
    plain = build("llama").state_dict()
    model = adapted(build("llama"), **EXTRA)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(1.0)
    found = base_state(model)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], weight) for name, weight in plain.items())
    assert base_state(build("llama")).keys() == plain.keys()


def test_a_fingerprint_has_the_adapter_or_not():
    plain = model_fingerprint(build("llama"))
    model = adapted(build("llama"), **EXTRA)
    assert model_fingerprint(model, with_adapter=False) == plain
    own = model_fingerprint(model)
    assert own == model_fingerprint(adapted(build("llama"), **EXTRA)) != plain
    assert own != model_fingerprint(adapted(build("llama"), **EXTRA, lora_alpha=9))
    with torch.no_grad():
        model.get_base_model().model.layers[0].mlp.up_proj.lora_A["default"].weight[0, 0] += 1e-3
    assert own != model_fingerprint(model)


def test_within_adapter_off_the_base_model_answers():
    ids = torch.randint(8, 104, (1, 20))
    with torch.no_grad():
        expected = build("llama").eval()(ids).logits
        model = adapted(build("llama"), **EXTRA).eval()
        trained = model(ids).logits
        marks = [p.requires_grad for p in model.parameters()]
        with adapter_off(model):
            assert torch.equal(model(ids).logits, expected)
            assert [p.requires_grad for p in model.parameters()] == marks
        assert torch.equal(model(ids).logits, trained)
    assert [p.requires_grad for p in model.parameters()] == marks
    assert not torch.equal(trained, expected)


def test_matrix_parameters_are_counted_once_and_the_trained_ones_apart():
    plain = matmul_parameters(build("llama"))
    assert plain["trained_body_parameters"] == plain["body_parameters"]
    assert plain["trained_head_parameters"] == plain["head_parameters"]
    model = adapted(build("llama"), **EXTRA)
    found = matmul_parameters(model)
    factors = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm.modules_to_save" in n)
    assert found["body_parameters"] == plain["body_parameters"] + factors
    assert found["trained_body_parameters"] == factors + norms
    assert found["head_parameters"] == found["trained_head_parameters"] == plain["head_parameters"]
    assert matmul_parameters(adapted(build("llama")))["trained_head_parameters"] == 0
    tied = matmul_parameters(build("llama", tie_word_embeddings=True))
    assert tied == plain


def test_four_bit_weights_count_as_what_they_stand_for():
    class Params4bit(torch.Tensor):
        pass

    assert numel(torch.zeros(6, dtype=torch.uint8).as_subclass(Params4bit)) == 12
    assert numel(torch.zeros(6, dtype=torch.bfloat16).as_subclass(Params4bit)) == 24


def test_a_skeleton_has_names_and_shapes_and_no_numbers():
    model = build("llama")
    found = skeleton_of(model.config).state_dict()
    assert {n: t.shape for n, t in found.items()} == {
        n: t.shape for n, t in model.state_dict().items()
    }
    assert all(tensor.is_meta for tensor in found.values())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
def test_every_family_merges_to_the_logits_of_its_adapted_model(family: str):
    model = adapted(build(family)).eval()
    ids = torch.randint(8, 60, (1, 20))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(ids).logits
        merged = merged_model(model, state)
        plain = type(merged)(merged.config).eval()
        plain.load_state_dict(merged.state_dict())
        found = plain(ids).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert type(merged) is type(base_model_of(model))
    assert not is_adapted(merged)


@pytest.mark.parametrize("zero3", [False, True])
def test_reentrant_checkpointing_gets_inputs_that_ask_for_gradients(
    zero3: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sdpo_scale.modeling.adapted.is_deepspeed_zero3_enabled", lambda: zero3)
    for given, expected in (
        (None, {"use_reentrant": True} if zero3 else None),
        ({"use_reentrant": False}, {"use_reentrant": False}),
        ({"use_reentrant": True}, {"use_reentrant": True}),
    ):
        args: Any = SimpleNamespace(
            activation_checkpointing=True, activation_checkpointing_kwargs=given
        )
        model = adapted(build("llama"))
        prepare_checkpointing(model, args)
        assert args.activation_checkpointing_kwargs == expected
        embedded = model.get_input_embeddings()(torch.tensor([[9]]))
        assert embedded.requires_grad == bool((expected or {}).get("use_reentrant"))
    args = SimpleNamespace(activation_checkpointing=False, activation_checkpointing_kwargs=None)
    prepare_checkpointing(adapted(build("llama")), args)
    assert args.activation_checkpointing_kwargs is None


def test_an_adapter_of_a_plain_model_is_none():
    assert not is_adapted(build("llama"))
    assert is_adapted(peft.get_peft_model(build("llama"), peft.LoraConfig(task_type="CAUSAL_LM")))
