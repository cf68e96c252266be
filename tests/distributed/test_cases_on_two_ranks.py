"""Situations in which engines on two ranks were seen to go wrong, in runs of a few steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed.test_training_on_ranks import deepspeed_config
from tests.helpers.runs import (
    options,
    read_lines,
    run_forked,
    save_model,
    steps_of,
    text_rows,
    write_rows,
)

pytestmark = pytest.mark.distributed
WHOLE, HALVES, QUARTERS = 1000, 150, 70
"""Tokens of a micro-batch that split a rank's four pairs of a step into 1, 2 and 4 or so."""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all runs of this module, by name, which one start of Python has made."""
    folder = tmp_path_factory.mktemp("runs")
    model, rows = save_model(folder / "model"), write_rows(folder / "rows.jsonl", text_rows(16))

    def phase(name: str, backend: str, world_size: int = 2, **changes: Any) -> dict[str, Any]:
        stop_at = changes.pop("stop_at", 0)
        given = {"model": model, "train_dataset": rows, "train_batch_size": 8, "max_steps": 4}
        given |= {"optim": "adamw_torch", "lr_scheduler_type": "linear", **changes}
        if backend == "zero3":
            given["deepspeed"] = deepspeed_config(3)
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(options(folder / name, **given)))
        run = {"config": str(path), "world_size": world_size, "backend": backend}
        return {**run, "stop_at": stop_at}

    phases = [phase("alone", "ddp", 1, max_tokens=WHOLE)]
    for backend in ("fsdp2", "zero3"):
        for max_tokens in (WHOLE, HALVES, QUARTERS):
            phases.append(phase(f"{backend}-{max_tokens}", backend, max_tokens=max_tokens))
        saves = {"max_tokens": HALVES, "save_strategy": "steps", "save_steps": 4}
        phases.append(phase(f"{backend}-calm", backend, **saves))
        saves["resume_from_checkpoint"] = "auto"
        phases.append(phase(f"{backend}-resumed", backend, stop_at=3, **saves))
        phases.append({**phases[-1], "stop_at": 0})
    for done, asked in zip(run_forked(folder, *phases), phases, strict=True):
        assert done["codes"] == [0] * asked["world_size"], done["log"]
    return folder


def steps(outputs: Path, name: str) -> list[dict[str, Any]]:
    return steps_of(read_lines(outputs / name / "output" / "metrics.jsonl"))


@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
@pytest.mark.parametrize("max_tokens", [WHOLE, HALVES, QUARTERS])
def test_OPT_03_loss_and_gradient_norm_do_not_depend_on_the_number_of_micro_batches(
    max_tokens: int, backend: str, outputs: Path
):
    expected, found = steps(outputs, "alone"), steps(outputs, f"{backend}-{max_tokens}")
    for name in ("loss", "grad_norm"):
        values = [line[name] for line in found]
        assert values == pytest.approx([line[name] for line in expected], rel=1e-5), name


@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
def test_LOG_02_accuracy_is_the_mean_over_the_pairs_of_all_ranks_and_micro_batches(
    backend: str, outputs: Path
):
    def accuracies(name: str) -> list[float]:
        return [line["rewards/accuracies"] for line in steps(outputs, name)[1:]]

    found = accuracies(f"{backend}-{QUARTERS}")
    assert found == accuracies("alone")
    assert all((8 * value).is_integer() for value in found)
    assert any(0 < value < 1 for value in found)


def optimizer_state(checkpoint: Path) -> list[torch.Tensor]:
    """All tensors of the optimizer's state, in the order of their files and names."""
    paths = sorted(checkpoint.glob("global_step*/*_optim_states.pt"))
    if not paths:
        paths = [checkpoint / "whole.pt"]
        dcp_to_torch_save(checkpoint / "optimizer_0", paths[0])

    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        values = value.values() if isinstance(value, dict) else value
        return [t for v in values for t in tensors(v)] if isinstance(value, dict | list) else []

    return [t for p in paths for t in tensors(torch.load(p, weights_only=False))]


@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
def test_CKP_07_the_step_after_a_resume_has_the_moments_of_the_unkilled_run(
    backend: str, outputs: Path
):
    calm, resumed = (outputs / f"{backend}-{name}" / "output" for name in ("calm", "resumed"))
    assert (resumed / "checkpoint-3").is_dir()
    expected, found = (load_file(folder / "model.safetensors") for folder in (calm, resumed))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    expected, found = (optimizer_state(folder / "checkpoint-4") for folder in (calm, resumed))
    assert any(tensor.count_nonzero() > 1 for tensor in expected)
    assert len(found) == len(expected)
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
