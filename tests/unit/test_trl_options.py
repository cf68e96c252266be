"""Every option of TRL's DPOConfig: the same here, without effect, or refused by name."""

import dataclasses
import logging
from typing import Any

import pytest
import trl
from transformers import BitsAndBytesConfig

from sdpo_scale import SDPOTrainer
from sdpo_scale.config import SDPOConfig
from sdpo_scale.options import read_config
from sdpo_scale.trl_options import (
    _ARGUMENTS,
    _ONLY,
    _REFUSED,
    _WITHOUT_EFFECT,
    REMOVED,
    pairs_per_step,
    take_quantization,
)

# Of objectives, which have a table of their own.
OF_OBJECTIVES = {"loss_weights", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef"}
OF_OBJECTIVES |= {"use_weighting", "discopop_tau"}


def config(tmp_path: Any, **options: Any) -> SDPOConfig:
    return SDPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, **options)


def test_every_option_of_trl_is_known():
    ours = {field.name for field in dataclasses.fields(SDPOConfig)}
    theirs = {field.name for field in dataclasses.fields(trl.DPOConfig)}
    assert theirs - ours <= OF_OBJECTIVES


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL's
def test_trls_defaults_are_accepted_and_nothing_is_said(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
):
    theirs = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    given = {
        field.name: getattr(theirs, field.name)
        for field in dataclasses.fields(trl.DPOConfig)
        if field.init and field.name not in OF_OBJECTIVES
    }
    for name in ("gradient_accumulation_steps", "per_device_train_batch_size"):
        del given[name]
    del given["per_device_eval_batch_size"]
    with caplog.at_level(logging.WARNING, logger="sdpo_scale"):
        found = SDPOConfig(**given)
    assert caplog.records == []
    assert (found.loss_type, found.beta, found.max_length) == ("sigmoid", 0.1, 1024)
    assert found.activation_checkpointing is True


WITHOUT_EFFECT = [
    ("padding_free", True),
    ("pad_to_multiple_of", 8),
    ("pad_token", "<pad>"),
    ("precompute_ref_log_probs", True),
    ("precompute_ref_batch_size", 4),
    ("per_device_eval_batch_size", 4),
    ("eval_accumulation_steps", 2),
    ("dataset_num_proc", 4),
]


def test_every_option_without_effect_is_tried():
    assert {name for name, _ in WITHOUT_EFFECT} == _WITHOUT_EFFECT.keys()


@pytest.mark.parametrize(("name", "value"), WITHOUT_EFFECT)
def test_what_has_no_effect_is_said_once(
    name: str, value: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, logger="sdpo_scale"):
        config(tmp_path, **{name: value})
    (record,) = caplog.records
    assert record.getMessage().startswith(f"option {name} = {value!r} has no effect: ")


REFUSED = [
    ("use_liger_kernel", True, "already chunked"),
    ("disable_dropout", False, "functions of the parameters alone"),
    ("router_aux_loss_coef", 0.01, "no mixture of experts"),
    ("activation_offloading", True, "lower max_tokens"),
    ("sync_ref_model", True, "train in rounds instead"),
    ("ref_model_mixup_alpha", 0.5, "train in rounds instead"),
    ("ref_model_sync_steps", 64, "train in rounds instead"),
    ("dataloader_drop_last", True, "every pair of an epoch"),
    ("prediction_loss_only", True, "metrics only"),
    ("auto_find_batch_size", True, "lower max_tokens"),
    ("label_smoothing_factor", 0.1, "set label_smoothing"),
    ("neftune_noise_alpha", 5.0, "differ from the reference"),
    ("torch_compile", True, "compiled packs are not tested"),
    ("train_sampling_strategy", "group_by_length", "no grouping by length; choose 'random'"),
]


def test_every_refused_option_is_tried():
    assert {name for name, _, _ in REFUSED} == _REFUSED.keys() | _ONLY.keys()


@pytest.mark.parametrize(("name", "value", "advice"), REFUSED)
def test_what_cannot_be_honoured_is_refused_with_what_to_do(
    name: str, value: Any, advice: str, tmp_path: Any
):
    with pytest.raises(ValueError, match=rf"option {name} = .* is refused: .*{advice}"):
        config(tmp_path, **{name: value})


@pytest.mark.parametrize("name", REMOVED)
def test_names_that_trl_has_given_up_are_refused_with_what_replaced_them(name: str, tmp_path: Any):
    message = rf"option '{name}' is refused: \w+"
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **{name: 1})
    path = tmp_path / "run.yaml"
    path.write_text(f"{name}: 1\n")
    with pytest.raises(ValueError, match=message):
        read_config(str(path))


def test_a_name_that_nobody_knows_stays_a_type_error(tmp_path: Any):
    with pytest.raises(TypeError, match="unexpected keyword argument 'betta'"):
        config(tmp_path, betta=1)


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ((None, None, None), 4, 32),
        ((64, None, None), 4, 64),
        ((None, 2, 8), 4, 64),
        ((None, 4, None), 2, 8),
        ((None, None, 4), 1, 32),  # 8 per device, as TRL's default says
        ((64, 2, 8), 4, 64),
    ],
)
def test_pairs_per_step(given: Any, ranks: int, expected: int):
    assert pairs_per_step(*given, ranks=ranks) == expected


def test_sizes_per_device_and_of_the_step_that_contradict_are_refused(tmp_path: Any):
    with pytest.raises(
        ValueError, match=r"train_batch_size is 64, but per_device_train_batch_size 2 × .* = 16"
    ):
        config(
            tmp_path,
            train_batch_size=64,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=8,
        )


def test_sizes_per_device_are_multiplied_and_said(tmp_path: Any, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="sdpo_scale"):
        found = config(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=8)
    assert found.train_batch_size == 16
    assert found.gradient_accumulation_steps == 1  # of the transformers loop
    assert "2 × gradient_accumulation_steps 8 × 1 rank = 16" in caplog.text


def test_a_quantization_config_becomes_options(tmp_path: Any):
    found = config(tmp_path, use_peft=True)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    take_quantization(found, four, "a/model")
    assert (found.load_in_4bit, found.bnb_4bit_quant_type) == (True, "nf4")
    with pytest.raises(ValueError, match="acts when a model is read"):
        take_quantization(found, four, object())
    with pytest.raises(ValueError, match=r"quantization_config is a dict; only BitsAndBytesConfig"):
        take_quantization(found, {"load_in_4bit": True}, "a/model")
    with pytest.raises(ValueError, match="load_in_8bit = True is refused"):
        take_quantization(found, BitsAndBytesConfig(load_in_8bit=True), "a/model")


def test_trackers_are_told_every_option(tmp_path: Any):
    told = config(tmp_path, use_peft=True, lora_r=4).to_dict()
    assert told.keys() == {field.name for field in dataclasses.fields(SDPOConfig)}
    assert (told["use_peft"], told["lora_r"]) == (True, 4)


ARGUMENTS = [
    ("beta", 0.1, r"it is an option: SDPOConfig\(beta=\.\.\.\)"),
    ("max_length", 512, r"it is an option: SDPOConfig\(max_length=\.\.\.\)"),
    ("loss_type", "ipo", r"it is an option: SDPOConfig\(loss_type=\.\.\.\)"),
    ("max_prompt_length", 128, "max_length bounds prompt . response"),
    ("max_target_length", 128, "max_length bounds prompt . response"),
    ("label_pad_token_id", -100, "there is no padding"),
    ("padding_value", 0, "there is no padding"),
    ("generate_during_eval", True, "a script of your own"),
    ("ref_adapter_name", "ref", "set adapter_reference"),
    ("tokenizer", "a", "it is called processing_class"),
    ("data_collator", len, "packs are made by the step itself"),
    ("compute_metrics", len, "its metrics are TRL's"),
    ("preprocess_logits_for_metrics", len, "evaluation holds no logits"),
    ("model_init", len, "give model"),
    ("formatting_func", len, "one of TRL's preference formats"),
]


def test_every_refused_argument_is_tried():
    assert _ARGUMENTS.keys() <= {name for name, _, _ in ARGUMENTS}


@pytest.mark.parametrize(("name", "value", "advice"), ARGUMENTS)
def test_case_cfg_03_arguments_of_older_trainers_are_refused_with_their_new_place(
    name: str, value: Any, advice: str, tmp_path: Any
):
    args = config(tmp_path)
    with pytest.raises(ValueError, match=rf"argument {name} of SDPOTrainer is refused: .*{advice}"):
        SDPOTrainer(model="no/such/model", args=args, **{name: value})
    with pytest.raises(ValueError, match=r"no/such/model|train_dataset"):  # None says nothing
        SDPOTrainer(model="no/such/model", args=args, **{name: None})


def test_an_argument_that_nobody_knows_is_a_type_error(tmp_path: Any):
    with pytest.raises(TypeError, match="SDPOTrainer has no argument 'betta'"):
        SDPOTrainer(model="no/such/model", args=config(tmp_path), betta=0.1)
