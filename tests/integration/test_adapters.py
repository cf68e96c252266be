"""LoRA runs in one process, from files to what is saved; cases LOR, and CKP-01's plain half."""

import importlib.util
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TrainerCallback

from sdpo_scale import SDPOTrainer
from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from tests.helpers.adapters import adapted, save_adapter
from tests.helpers.gradients import gradients, relative_error
from tests.helpers.oracle import dpo_loss, log_ratio_sum, response_logprobs
from tests.helpers.runs import (
    AtStep,
    config,
    read_lines,
    save_model,
    steps_of,
    text_rows,
    write_rows,
)
from tests.helpers.tolerances import FLOAT32_STEP_INVARIANCE

LORA: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
IDS = torch.randint(8, 104, (2, 30), generator=torch.Generator().manual_seed(0))
Make = Callable[..., SDPOTrainer]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    save_model(folder / "tied", tie_word_embeddings=True)
    save_adapter(folder / "adapter", folder / "model", modules_to_save=["norm"])
    write_rows(folder / "train.jsonl", text_rows(10))
    return folder


@pytest.fixture
def make(files: Path, tmp_path: Path) -> Make:
    def build(folder: Path = tmp_path, arguments: Any = None, **changes: Any) -> SDPOTrainer:
        options = {"model": files / "model", "train_dataset": files / "train.jsonl", **changes}
        return SDPOTrainer(args=config(folder, **options), **(arguments or {}))

    return build


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """By the norm: a merge rounds weights, and single logits are near 0."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("reference", ["start", "base"])
def test_the_gradient_of_an_adapter_is_that_of_plain_dpo(
    reference: str, files: Path, make: Make, tmp_path: Path
):
    trainer = make(model=files / "adapter", adapter_reference=reference, max_tokens=130)
    trainer.score()
    model = trainer.model
    pairs, logprobs = next(iter(trainer.get_train_dataloader()))
    trainer.run_pairs(model, (pairs, logprobs), weight=1.0)
    found = gradients(model)

    plain = AutoModelForCausalLM.from_pretrained(files / "model")
    oracle = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(files / "model"), files / "adapter", is_trainable=True
    )
    reference_model = plain
    if reference == "start":
        reference_model = peft.PeftModel.from_pretrained(plain, files / "adapter")
    for pair in pairs:
        sums = [
            log_ratio_sum(oracle, reference_model, pair.prompt_ids.tolist(), response.tolist())
            for response in (pair.chosen_ids, pair.rejected_ids)
        ]
        (dpo_loss("sigmoid", *sums) / len(pairs)).backward()
    expected = gradients(oracle)
    assert all("lora" in name or "modules_to_save" in name for name in expected)
    assert relative_error(found, expected) < FLOAT32_STEP_INVARIANCE


def test_LOR_04_the_loss_starts_at_ln_2_against_the_adapter_that_is_continued(
    files: Path, make: Make
):
    reference: list[float] = []

    def read(_model: Any) -> None:
        _, logprobs = next(iter(trainer.get_train_dataloader()))
        reference.append(float(sum(part.sum() for pair in logprobs for part in pair)))

    trainer = make(model=files / "adapter", max_steps=3, learning_rate=1e-2)
    for step in (1, 2, 3):
        trainer.add_callback(AtStep(step, read))
    trainer.train()
    losses = [line["loss"] for line in steps_of(trainer.state.log_history)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[1] != pytest.approx(math.log(2), abs=1e-4)
    assert len(set(reference)) == 1
    # the norm that trains as well has moved, and the reference has not followed
    before = load_file(files / "adapter" / "adapter_model.safetensors")
    norm = trainer.model.state_dict()["base_model.model.model.norm.modules_to_save.default.weight"]
    assert not torch.equal(norm, before["base_model.model.model.norm.weight"])


def test_LOR_04_the_base_model_is_the_reference_where_that_is_asked_for(files: Path, make: Make):
    trainer = make(model=files / "adapter", adapter_reference="base", max_steps=1)
    trainer.train()
    (line,) = steps_of(trainer.state.log_history)
    assert line["loss"] != pytest.approx(math.log(2), abs=1e-3)
    (pair, *_), (logprobs, *_) = next(iter(trainer.get_train_dataloader()))
    plain = AutoModelForCausalLM.from_pretrained(files / "model")
    expected = response_logprobs(plain, pair.prompt_ids.tolist(), pair.chosen_ids.tolist())
    torch.testing.assert_close(torch.tensor(logprobs[0]), expected, rtol=1e-5, atol=1e-5)


def test_a_new_adapter_and_the_model_share_one_reference(make: Make, files: Path):
    assert make().score()["scored"] == 10
    for changes in ({}, {"lora_r": 2, "seed": 5}, {"lora_modules_to_save": ["lm_head"]}):
        assert make(**{**LORA, **changes}).score() == {"pairs": 10, "scored": 0}
    # a continued one has its own, another for other weights
    assert make(model=files / "adapter").score()["scored"] == 10
    assert make(model=files / "adapter").score()["scored"] == 0
    assert make(model=files / "adapter", adapter_reference="base").score()["scored"] == 0


def test_switching_the_adapter_off_leaves_no_trace(files: Path, make: Make):
    trainer = make(model=files / "adapter", adapter_reference="base")
    before = logits(trainer.model)
    frozen = [n for n, p in trainer.model.named_parameters() if not p.requires_grad]
    trainer.score()
    assert torch.equal(logits(trainer.model), before)
    assert [n for n, p in trainer.model.named_parameters() if not p.requires_grad] == frozen


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpointing": False},
        {"activation_checkpointing": True},
        {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": True},
        },
        {"activation_checkpointing": True, "pruning": "fastest"},
    ],
    ids=["stored", "checkpointing", "reentrant", "pruned recomputation"],
)
def test_LOR_01_every_adapted_layer_learns_in_the_first_step(
    changes: dict[str, Any], make: Make, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "sdpo_scale")
    trainer = make(**LORA, **changes, max_steps=1)
    trainer.train()
    lora_b = [p for n, p in trainer.model.named_parameters() if "lora_B" in n]
    assert len(lora_b) == 2 * 7
    assert all(p.abs().max() > 0 for p in lora_b)
    assert "check: all 14 trained weights of the adapter changed" in caplog.text


def test_LOR_01_a_layer_without_gradient_stops_the_run_after_its_first_step(make: Make):
    trainer = make(**LORA, max_steps=4)
    layer = trainer.model.get_base_model().model.layers[1].mlp.up_proj
    layer.lora_B["default"].weight.register_hook(torch.zeros_like)
    with pytest.raises(RuntimeError, match=r"1 of 14 .* step 1: .*layers\.1\.mlp\.up_proj\.lora_B"):
        trainer.train()


def test_LOR_01_an_adapter_that_never_moves_stops_the_run(make: Make):
    trainer = make(**LORA, max_steps=5)
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            parameter.register_hook(torch.zeros_like)
    with pytest.raises(RuntimeError, match="14 of 14 trained weights did not change in step 3"):
        trainer.train()


def test_a_warm_up_that_starts_at_0_is_no_missing_gradient(
    make: Make, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "sdpo_scale")
    make(**LORA, max_steps=2, lr_scheduler_type="linear", warmup_steps=1).train()
    assert "check: all 14 trained weights of the adapter changed" in caplog.text


class _SeesGradients(TrainerCallback):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.names = {n for n, p in kwargs["model"].named_parameters() if p.grad is not None}


@pytest.mark.parametrize("pruning", ["off", "fastest"])
def test_LOR_05_frozen_weights_get_no_gradient(pruning: str, make: Make):
    seen = _SeesGradients()
    trainer = make(
        **LORA,
        pruning=pruning,
        activation_checkpointing=True,
        max_steps=1,
        arguments={"callbacks": [seen]},
    )
    trainer.train()
    assert len(seen.names) == 2 * 14
    assert all("lora_" in name for name in seen.names)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"lora_modules_to_save": ["lm_head", "norm"]},
        {"lora_modules_to_save": ["embed_tokens"]},
    ],
    ids=lambda changes: next(iter(changes), "lora"),
)
def test_the_adapter_and_the_merged_model_have_the_logits_of_the_trained_one(
    changes: dict[str, Any], files: Path, make: Make
):
    options = {**LORA, "learning_rate": 1e-2, "max_steps": 2, **changes}
    trainer = make(**options, merge_adapter=True, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    output = trainer.args.output_path
    plain = AutoModelForCausalLM.from_pretrained(files / "model")
    expected = logits(trainer.model)
    assert not torch.allclose(expected, logits(plain), atol=1e-3)

    merged, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert {name: set(keys) for name, keys in info.items() if keys} == {}
    assert type(merged) is type(plain)
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert distance(logits(merged), expected) < 1e-5

    loaded = peft.PeftModel.from_pretrained(plain, output / "checkpoint-2")
    assert torch.equal(logits(loaded), expected)
    # merging beside it has not touched the live model
    assert torch.equal(logits(trainer.model), expected)


def test_CKP_01_what_was_not_written_whole_is_noticed(make: Make, monkeypatch: Any):
    trainer = make(**LORA)
    shrink = lambda tensors, keeps: {n: t[:0].clone() for n, t in tensors.items()}  # noqa: E731
    monkeypatch.setattr(trainer._sharding, "gather", shrink)
    with pytest.raises(RuntimeError, match="28 of 28 tensors were written, 28 of them without"):
        trainer.save_model()

    trainer = make()
    state = {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}
    state["lm_head.weight"] = state["lm_head.weight"][:0]
    trainer.args.output_path.mkdir(exist_ok=True)
    write = lambda *_args: save_file(state, trainer.args.output_path / "model.safetensors")  # noqa: E731
    monkeypatch.setattr("transformers.Trainer.save_model", write)
    with pytest.raises(RuntimeError, match=r"1 have another shape; lm_head\.weight is \(0, 32\)"):
        trainer.save_model()
    del state["lm_head.weight"]
    with pytest.raises(RuntimeError, match=r"1 tensors are missing"):
        trainer.save_model()


def test_a_full_run_after_an_adapter_leaves_no_adapter_on_top(make: Make):
    trainer = make(**LORA, max_steps=1, learning_rate=1e-2)
    trainer.train()
    trainer.save_model()
    assert (trainer.args.output_path / "adapter_config.json").is_file()
    full = make(max_steps=1)
    full.train()
    full.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(full.args.output_path)
    assert torch.equal(logits(loaded), logits(full.model))


def test_a_resumed_adapter_run_equals_one_that_was_never_stopped(make: Make, tmp_path: Path):
    options = {**LORA, "max_steps": 4, "learning_rate": 1e-2, "pruning": "exact-budget"}
    options.update(save_strategy="steps", save_steps=2, activation_checkpointing=True)
    whole = make(tmp_path / "a", **options)
    whole.train()
    resumed = make(tmp_path / "b", **options)
    resumed.train(str(tmp_path / "a" / "output" / "checkpoint-2"))
    lines = [steps_of(read_lines(tmp_path / f / "output" / "metrics.jsonl")) for f in "ab"]
    assert [line["step"] for line in lines[1]] == [3, 4]
    assert [line["loss"] for line in lines[1]] == [line["loss"] for line in lines[0][2:]]
    expected = {n: p for n, p in whole.model.state_dict().items() if "lora_" in n}
    found = resumed.model.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_training_continues_from_a_saved_run_by_its_folder(make: Make, tmp_path: Path):
    first = make(tmp_path / "a", **LORA, max_steps=2, learning_rate=1e-2)
    first.train()
    first.save_model()
    second = make(tmp_path / "b", model=tmp_path / "a" / "output", max_steps=1)
    assert torch.equal(logits(second.model), logits(first.model))
    assert second.inputs.tokenizer.get_vocab() == first.inputs.tokenizer.get_vocab()
    second.train()
    (line,) = steps_of(second.state.log_history)
    assert line["loss"] == pytest.approx(math.log(2), abs=1e-6)
    second.create_model_card()
    card = ModelCard((second.args.output_path / "README.md").read_text("utf-8")).data
    assert (card.library_name, card.base_model) == ("peft", str(first.args.model))


def test_a_peft_config_gives_the_same_run_as_the_options(make: Make, tmp_path: Path):
    given = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.05
    )
    runs = [
        make(tmp_path / "a", arguments={"peft_config": given}, max_steps=2),
        make(tmp_path / "b", **LORA, max_steps=2),
    ]
    for trainer in runs:
        trainer.train()
    losses = [[line["loss"] for line in steps_of(run.state.log_history)] for run in runs]
    assert losses[0] == losses[1]
    runs[0].save_model()
    saved = json.loads((runs[0].args.output_path / "adapter_config.json").read_text("utf-8"))
    assert saved["lora_dropout"] == 0.05  # off while training, not forgotten


def test_dropout_of_a_given_adapter_is_off_and_said_so(
    make: Make, caplog: pytest.LogCaptureFixture
):
    given = peft.LoraConfig(target_modules="all-linear", lora_dropout=0.5)
    trainer = make(arguments={"peft_config": given}, max_steps=2)
    trainer.train()  # policy and reference agree at the first step, which it checks itself
    assert "lora_dropout 0.5 is off" in caplog.text


def test_the_work_of_a_frozen_model_is_counted_without_its_weights_gradients(make: Make):
    counts = {}
    for name, options in {"full": {}, "lora": LORA}.items():
        trainer = make(**options, max_steps=1)
        trainer.train()
        counts[name] = trainer.step_log.num_flops
        sizes = trainer.step_log.sizes
    assert sizes["trained_head_parameters"] == 0
    assert 0 < sizes["trained_body_parameters"] < sizes["body_parameters"]
    assert 0.6 < counts["lora"] / counts["full"] < 0.9


def test_a_tied_model_trains_with_an_adapter_elsewhere(files: Path, make: Make):
    trainer = make(model=files / "tied", **LORA, max_steps=1, merge_adapter=True)
    trainer.train()
    trainer.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(trainer.args.output_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert distance(logits(loaded), logits(trainer.model)) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_target_modules": ["q_proj", "lm_head"]},
        {"lora_target_modules": ["q_proj", "embed_tokens"]},
        {"lora_modules_to_save": ["lm_head"]},
        {"lora_modules_to_save": ["embed_tokens"]},
    ],
    ids=lambda changes: "-".join(map(str, next(iter(changes.items())))),
)
def test_LOR_03_an_adapted_head_of_a_tied_model_is_refused_before_training(
    changes: dict[str, Any], files: Path, make: Make
):
    with pytest.raises(ValueError, match=r"(lm_head|embed_tokens) is adapted, but .* one weight"):
        make(model=files / "tied", **{**LORA, **changes})


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_low_rank_head_or_embedding_is_refused_with_the_other_way(module: str, make: Make):
    with pytest.raises(ValueError, match=rf"lora_modules_to_save: \[.*{module}\]"):
        make(**{**LORA, "lora_target_modules": ["q_proj", module]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": "all"}, "bias = 'all' is refused"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is refused"),
        ({"init_lora_weights": False}, "init_lora_weights = False is refused"),
        ({"target_parameters": ["x"]}, r"target_parameters = \['x'\] is refused"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [(0, 1)]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"lora_bias": True}, "lora_bias = True is refused"),
        ({"target_modules": ["no_such_module"]}, "no_such_module"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_adapter_that_cannot_be_honoured_is_refused_by_name(
    changes: dict[str, Any], message: str, make: Make
):
    given = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **changes})
    with pytest.raises(ValueError, match=message):
        make(arguments={"peft_config": given})


def test_other_adapters_than_lora_are_refused_by_name(make: Make):
    given = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match=r"PROMPT_TUNING are not tested here; use peft"):
        make(arguments={"peft_config": given})


def test_two_descriptions_of_an_adapter_are_refused(make: Make, files: Path):
    given = peft.LoraConfig(target_modules=["q_proj"])
    with pytest.raises(ValueError, match="peft_config and use_peft: true both"):
        make(**LORA, arguments={"peft_config": given})
    with pytest.raises(ValueError, match="is an adapter already"):
        make(model=files / "adapter", arguments={"peft_config": given})
    with pytest.raises(ValueError, match="model_init_kwargs: revision could mean"):
        make(model=files / "adapter", model_init_kwargs={"revision": "main"})


def test_a_given_peft_model_must_be_one_that_trains_and_is_saved_whole(files: Path, make: Make):
    def plain() -> Any:
        return AutoModelForCausalLM.from_pretrained(files / "model")

    def refused(model: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make(arguments={"model": model})

    refused(
        peft.PeftModel.from_pretrained(plain(), files / "adapter"),
        r"the adapter is frozen: load it with .*is_trainable=True",
    )
    outside = adapted(plain())
    outside.get_base_model().model.norm.weight.requires_grad_()
    refused(outside, r"model\.norm\.weight \(one of 1\) is trained but not part of the adapter")
    several = adapted(plain())
    several.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"]))
    refused(several, r"several adapters \(default, other\)")
    native = plain()
    native._hf_peft_config_loaded = True  # as its add_adapter does
    refused(native, r"added by transformers: use peft\.get_peft_model")


def test_a_quantized_model_is_refused_where_the_package_is_missing(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    _hide(monkeypatch, "bitsandbytes")
    monkeypatch.setattr("sdpo_scale.inputs.load_model", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(ValueError, match="load_in_4bit needs the package bitsandbytes"):
        make(**LORA, load_in_4bit=True)


def test_a_missing_peft_is_named(make: Make, files: Path, monkeypatch: pytest.MonkeyPatch):
    _hide(monkeypatch, "peft")
    with pytest.raises(ValueError, match=r"adapters need the package peft: pip install"):
        make(**LORA)
    with pytest.raises(ValueError, match=r"adapter.* needs the package peft: pip install"):
        make(model=files / "adapter")


def _hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )


def test_options_of_quantization_reach_the_loader(make: Make, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: name == "bitsandbytes" or find(name, *a)
    )
    asked: dict[str, Any] = {}

    def load(_name: str, **kwargs: Any) -> Any:
        asked.update(kwargs)
        raise InterruptedError

    monkeypatch.setattr("sdpo_scale.inputs.load_model", load)
    with pytest.raises(InterruptedError):
        make(**LORA, load_in_4bit=True, use_bnb_nested_quant=True, bf16=True)
    quantized = asked["quantization_config"]
    assert quantized.load_in_4bit
    assert (quantized.bnb_4bit_quant_type, quantized.bnb_4bit_use_double_quant) == ("nf4", True)
    assert quantized.bnb_4bit_compute_dtype == quantized.bnb_4bit_quant_storage == torch.bfloat16
    assert asked["dtype"] == torch.bfloat16


@pytest.mark.parametrize("nested", [False, True])
def test_an_adapter_trains_on_a_model_in_4_bits(
    nested: bool, files: Path, make: Make, caplog: pytest.LogCaptureFixture
):
    pytest.importorskip("bitsandbytes")
    caplog.set_level(logging.INFO, "sdpo_scale")
    changes = {"use_bnb_nested_quant": nested, "activation_checkpointing": True}
    trainer = make(**LORA, load_in_4bit=True, **changes, max_steps=2, pruning="exact-budget")
    trainer.train()
    assert "check: all 14 trained weights of the adapter changed" in caplog.text
    sizes, full = trainer.step_log.sizes, make(**LORA).step_log.sizes
    assert sizes["body_parameters"] == full["body_parameters"]
    trainer.save_model()
    base = AutoModelForCausalLM.from_pretrained(
        files / "model", quantization_config=trainer.model.config.quantization_config
    )
    loaded = peft.PeftModel.from_pretrained(base, trainer.args.output_path)
    assert torch.equal(logits(loaded), logits(trainer.model))


def test_a_model_that_is_read_already_cannot_be_quantized(files: Path, make: Make):
    model = AutoModelForCausalLM.from_pretrained(files / "model")
    with pytest.raises(ValueError, match="load_in_4bit acts when a model is read"):
        make(**LORA, load_in_4bit=True, arguments={"model": model})


def test_a_model_that_was_quantized_elsewhere_is_not_merged(files: Path, make: Make):
    model = AutoModelForCausalLM.from_pretrained(files / "model")
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match="merge_adapter = True is refused with a quantized model"):
        make(**LORA, merge_adapter=True, arguments={"model": model})


@pytest.mark.parametrize("option", ["load_in_4bit", "merge_adapter"])
def test_options_of_adapters_need_one(option: str, make: Make):
    with pytest.raises(ValueError, match=f"{option} = True needs an adapter: set use_peft"):
        make(**{option: True})


def test_pruned_recomputation_of_an_adapted_model_equals_plain_autograd(files: Path):
    model = adapted(AutoModelForCausalLM.from_pretrained(files / "model"))
    base = model.get_base_model()
    recompute = PrunedRecompute.bind(base)
    found = []
    for recomputes in (False, True):
        if recomputes:
            recompute.begin()
        model(IDS).logits.log_softmax(-1)[..., 5].sum().backward()
        if recomputes:
            recompute.keep(None)
        found.append(gradients(model))
    assert len(found[0]) == 28
    assert relative_error(found[1], found[0]) < 1e-6
