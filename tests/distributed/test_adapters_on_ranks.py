"""LoRA on two ranks, started by torchrun, against the same runs in one process.

Weights are compared after two steps of gradient descent without moments, so that they are gradients
but for a factor; Adam's first step would show signs alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sdpo_scale import SDPOTrainer
from tests.distributed.test_training_on_ranks import MODES, RUN, deepspeed_config, run_on_ranks
from tests.helpers.adapters import save_adapter
from tests.helpers.gradients import relative_error
from tests.helpers.runs import (
    config,
    options,
    read_lines,
    save_model,
    steps_of,
    text_rows,
    write_rows,
)

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5
"""Relative, float32 over two steps: sums in another order."""
NEW = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
SAVES = {"save_strategy": "steps", "save_steps": 1, "merge_adapter": True}
RUNS: dict[str, dict[str, Any]] = {
    # both factors and a norm get gradients at once; the reference is the adapter as it starts
    **{mode: {"model": "adapter", **changes} for mode, changes in MODES.items()},
    # the reference is the base model; frozen embeddings with transformers' checkpointing
    "new": {**NEW, **SAVES, "activation_checkpointing": True},
    "resumed": {**NEW, **SAVES, "activation_checkpointing": True},
    "bfloat16": {**NEW, "model_init_kwargs": {"dtype": "bfloat16"}},
}
ON: dict[str, tuple[tuple[str, ...], ...]] = {
    # one launch runs several, except under DeepSpeed, which starts once in a process
    "ddp": ((*MODES, "new", "resumed"),),
    "fsdp2": ((*MODES, "new", "resumed", "bfloat16"),),
    "zero2": (("all",),),
    "zero3": (("all",), ("new",), ("resumed",)),
}
ALL = [(backend, name) for backend, launches in ON.items() for names in launches for name in names]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    save_adapter(folder / "adapter", folder / "model", modules_to_save=["norm"])
    write_rows(folder / "train.jsonl", text_rows(11))
    return folder


def changes_of(name: str, files: Path) -> dict[str, Any]:
    changes = {"model": "model", **RUN, **RUNS[name]}
    return {
        **changes,
        "model": str(files / changes["model"]),
        "train_dataset": str(files / "train.jsonl"),
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
    }


@pytest.fixture(scope="module")
def on_ranks(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(backend, run) → the folder of that run on two ranks."""
    root = tmp_path_factory.mktemp("ranks")
    done: set[tuple[str, str]] = set()

    def start(backend: str, names: tuple[str, ...]) -> None:
        paths = []
        for name in names:
            changes = changes_of(name, files)
            if backend.startswith("zero"):
                changes["deepspeed"] = deepspeed_config(int(backend[-1]))
            if name == "resumed":
                folder(backend, "new")
                checkpoint = root / backend / "new" / "output" / "checkpoint-1"
                changes["resume_from_checkpoint"] = str(checkpoint)
            paths.append(root / backend / f"{name}.yaml")
            paths[-1].parent.mkdir(exist_ok=True)
            paths[-1].write_text(yaml.safe_dump(options(root / backend / name, **changes)))
            done.add((backend, name))
        run_on_ranks(backend, *paths)

    def folder(backend: str, name: str) -> Path:
        if (backend, name) not in done:
            (names,) = (names for names in ON[backend] if name in names)
            start(backend, names)
        return root / backend / name / "output"

    return folder


@pytest.fixture(scope="module")
def alone(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SDPOTrainer]:
    """The same run in one process."""
    known: dict[str, SDPOTrainer] = {}

    def run(name: str) -> SDPOTrainer:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            known[name] = SDPOTrainer(args=config(folder, **changes_of(name, files)))
            known[name].train()
            known[name].save_model()
        return known[name]

    return run


def adapter_in(output: Path) -> dict[str, torch.Tensor]:
    """The adapter of a run: beside a merged model it is in the last checkpoint."""
    checkpoint = output / "checkpoint-2"
    return load_file((checkpoint if checkpoint.is_dir() else output) / "adapter_model.safetensors")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(8, 100)[None]).logits


@pytest.mark.parametrize(("backend", "name"), [each for each in ALL if each[1] in (*MODES, "new")])
def test_two_ranks_train_an_adapter_as_one_process_does(
    name: str, backend: str, on_ranks: Any, alone: Any
):
    output = on_ranks(backend, name)
    expected = steps_of(alone(name).state.log_history)
    found = steps_of(read_lines(output / "metrics.jsonl"))
    assert [line["step"] for line in found] == [1, 2]
    for metric in ("loss", "grad_norm", "rewards/margins", "logps/chosen"):
        values = [line[metric] for line in found]
        assert values == pytest.approx([line[metric] for line in expected], rel=1e-4, abs=1e-5)
    weights = adapter_in(alone(name).args.output_path)
    assert relative_error(adapter_in(output), weights) < TOLERANCE


def test_the_runs_train_every_weight_and_draw(alone: Any, files: Path):
    start = load_file(files / "adapter" / "adapter_model.safetensors")
    for name in MODES:
        moved = adapter_in(alone(name).args.output_path)
        assert all(not torch.equal(moved[n], start[n]) for n in start)
    line = steps_of(alone("all").state.log_history)[-1]
    assert line["pruning/backward_fraction"] < 1


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero3"])
def test_CKP_01_adapter_and_merged_model_load_in_one_process_with_equal_logits(
    backend: str, on_ranks: Any, alone: Any, files: Path
):
    output = on_ranks(backend, "new")
    merged, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert {name: set(keys) for name, keys in info.items() if keys} == {}
    base = AutoModelForCausalLM.from_pretrained(files / "model")
    plain = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, output / "checkpoint-2"))
    live = logits(alone("new").model)
    assert not torch.allclose(live, plain, atol=1e-3)
    for found in (logits(merged), adapted):
        assert (found - live).abs().max() < 1e-5 * live.abs().max()


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero3"])
def test_a_resumed_adapter_ends_as_one_that_was_never_stopped(backend: str, on_ranks: Any):
    output, whole = on_ranks(backend, "resumed"), on_ranks(backend, "new")
    (found,) = steps_of(read_lines(output / "metrics.jsonl"))
    expected = steps_of(read_lines(whole / "metrics.jsonl"))[1]
    for metric in ("step", "loss", "grad_norm", "learning_rate"):
        assert found[metric] == pytest.approx(expected[metric], rel=1e-6), metric
    assert relative_error(adapter_in(output), adapter_in(whole)) < 1e-6


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero3"])
def test_LOR_01_and_SHD_09_every_layer_learns_under_checkpointing(backend: str, on_ranks: Any):
    adapter = adapter_in(on_ranks(backend, "new"))
    lora_b = {name: weight for name, weight in adapter.items() if "lora_B" in name}
    assert len(lora_b) == 14
    assert all(weight.abs().max() > 0 for weight in lora_b.values())


def test_SHD_03_float32_adapters_train_on_a_bfloat16_model_under_FSDP2(on_ranks: Any, alone: Any):
    output = on_ranks("fsdp2", "bfloat16")
    adapter = load_file(output / "adapter_model.safetensors")
    assert {weight.dtype for weight in adapter.values()} == {torch.float32}
    expected = load_file(alone("bfloat16").args.output_path / "adapter_model.safetensors")
    assert relative_error(adapter, expected) < 0.1  # the base model's products round at 4e-3
    lines = steps_of(read_lines(output / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2]
