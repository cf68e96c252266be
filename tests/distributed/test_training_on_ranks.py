"""Runs on two ranks, started by torchrun, against the same run in one process."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from sdpo_scale import SDPOTrainer
from tests.helpers.gradients import relative_error
from tests.helpers.runs import (
    config,
    options,
    read_lines,
    run_forked,
    save_model,
    steps_of,
    text_rows,
    write_rows,
)

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("ddp", "fsdp2", "zero2", "zero3")
BUDGET = {"pruning": "exact-budget", "keep_fraction": 0.6}
MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    "prefix": {"pruning_kwargs": {"prefix": "uniform_floor"}},
    "branch_two_pass": {**BUDGET, "pruning_kwargs": {"branch_execution": "two_pass"}},
    "branch_checkpoint": {**BUDGET, "activation_checkpointing": True},
    "position": {"pruning_kwargs": {"position_fraction": 0.5}},
    "all": {"pruning": "fastest", "activation_checkpointing": True},
}
# enough for packs of unequal size, a rank without a pair in the last step, and two epochs
RUN = {"num_train_epochs": 2, "train_batch_size": 5, "max_tokens": 130, "optim": "adamw_torch"}
BY_GRADIENTS = {
    "optim": "sgd",
    "learning_rate": 0.2,
    "max_grad_norm": 0.0,
    "num_train_epochs": 1,
}
"""The update of a run is then the sum of its steps' gradients; at a larger rate the rounding of one
step grows in the next ones."""
TOLERANCE = 1e-5
"""Distance of that sum over the 3 steps of an epoch, by its norm, each parameter, float32."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    write_rows(folder / "train.jsonl", text_rows(11))
    write_rows(folder / "eval.jsonl", text_rows(3, seed=1))
    return folder


def deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": False,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def run_on_ranks(backend: str, *paths: Path, **environment: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "tests/helpers/train_on_ranks.py"]
    done = subprocess.run(
        [*command, backend, *map(str, paths)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def test_torchrun_starts_the_command(files: Path, tmp_path: Path):
    changes = {"model": str(files / "model"), "train_dataset": str(files / "train.jsonl"), **RUN}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(options(tmp_path, **changes, max_steps=2)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "sdpo_scale", "train", str(path), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    assert json.loads(line)["steps"] == 2
    assert done.stderr.count("step 2/2") == 1


@pytest.mark.parametrize("stage", [2, 3])
def test_the_shipped_deepspeed_configurations_train(stage: int, files: Path, tmp_path: Path):
    changes = {"model": str(files / "model"), "train_dataset": str(files / "train.jsonl"), **RUN}
    changes["deepspeed"] = str(ROOT / "ds_configs" / f"zero{stage}.json")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(options(tmp_path, **changes, max_steps=2)))
    run_on_ranks(f"zero{stage}", path)
    saved = load_file(tmp_path / "output" / "model.safetensors")
    assert all(tensor.numel() > 0 for tensor in saved.values())


@pytest.fixture(scope="module")
def on_ranks(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(backend, mode) → the folder of that run on two ranks.

    torchrun runs all modes in one start, except under DeepSpeed, which starts once in a process:
    there ranks are forked for each mode.
    """
    known: dict[tuple[str, str], Path] = {}

    def run(backend: str, mode: str) -> Path:
        if (backend, mode) not in known:
            folder = tmp_path_factory.mktemp(backend)
            paths = []
            for name in MODES:
                changes = changes_of(name, files)
                if backend.startswith("zero"):
                    changes["deepspeed"] = deepspeed_config(int(backend[-1]))
                paths.append(folder / f"{name}.yaml")
                paths[-1].write_text(yaml.safe_dump(options(folder / name, **changes)))
                known[backend, name] = folder / name / "output"
            if backend.startswith("zero"):
                phase = {"world_size": 2, "backend": backend}
                reports = run_forked(folder, *({**phase, "config": str(p)} for p in paths))
                assert [report["codes"] for report in reports] == [[0, 0]] * len(paths), reports
            else:
                run_on_ranks(backend, *paths)
        return known[backend, mode]

    return run


@pytest.fixture(scope="module")
def alone(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SDPOTrainer]:
    """Mode → its run in one process."""
    known: dict[str, SDPOTrainer] = {}

    def run(mode: str) -> SDPOTrainer:
        if mode not in known:
            folder = tmp_path_factory.mktemp(mode)
            known[mode] = SDPOTrainer(args=config(folder, **changes_of(mode, files)))
            known[mode].train()
        return known[mode]

    return run


def changes_of(mode: str, files: Path) -> dict[str, Any]:
    return {
        "model": str(files / "model"),
        "train_dataset": str(files / "train.jsonl"),
        "eval_dataset": str(files / "eval.jsonl"),
        **RUN,
        **BY_GRADIENTS,
        **MODES[mode],
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_train_as_one_process_does(
    mode: str, backend: str, on_ranks: Any, alone: Any, files: Path
):
    expected = steps_of(alone(mode).state.log_history)
    output = on_ranks(backend, mode)
    found = steps_of(read_lines(output / "metrics.jsonl"))
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for name in ("loss", "grad_norm", "rewards/margins", "logps/chosen", "learning_rate"):
        values = [line[name] for line in found]
        assert values == pytest.approx([line[name] for line in expected], rel=1e-4, abs=1e-5), name
    saved = load_file(output / "model.safetensors")
    weights = {n: w.clone() for n, w in alone(mode).model.state_dict().items() if n in saved}
    assert saved.keys() == weights.keys()
    assert all(tensor.numel() > 0 for tensor in saved.values())
    before = load_file(files / "model" / "model.safetensors")
    update, expected_update = (
        {name: after[name].double() - before[name].double() for name in before}
        for after in (saved, weights)
    )
    for name, expected_part in expected_update.items():
        distance = float((update[name] - expected_part).norm() / expected_part.norm())
        assert distance < TOLERANCE, name
    assert all(line["load_balance"] >= 1 for line in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_CKP_10_the_exported_model_computes_what_the_trained_one_did(
    backend: str, on_ranks: Any, files: Path, tmp_path: Path
):
    output = on_ranks(backend, "dense")
    live = [line for line in read_lines(output / "metrics.jsonl") if "eval_logps/chosen" in line]
    data = {name: str(files / f"{name}.jsonl") for name in ("train", "eval")}
    exported = SDPOTrainer(
        args=config(tmp_path, train_dataset=data["train"], eval_dataset=data["eval"], model=output)
    ).evaluate()
    for name in ("logps/chosen", "logps/rejected", "entropy"):
        assert exported[f"eval_{name}"] == pytest.approx(live[-1][f"eval_{name}"], rel=1e-6), name


@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
def test_PRN_01_a_rank_that_keeps_nothing_does_not_stop_the_others(
    backend: str, files: Path, tmp_path: Path
):
    changes = {**changes_of("branch_checkpoint", files), "max_steps": 2}
    if backend == "zero3":
        changes["deepspeed"] = deepspeed_config(3)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(options(tmp_path, **changes)))
    run_on_ranks(backend, path, DROPS_EVERYTHING="1")
    lines = steps_of(read_lines(tmp_path / "output" / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2]
    assert 0 < lines[0]["pruning/backward_fraction"] < 1
    assert all(math.isfinite(line["grad_norm"]) for line in lines)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_run_on_two_ranks_equals_one_that_was_never_stopped(
    backend: str, files: Path, tmp_path: Path
):
    changes = {"model": str(files / "model"), "train_dataset": str(files / "train.jsonl"), **RUN}
    changes.update(MODES["branch_checkpoint"], save_strategy="steps", save_steps=4)
    if backend.startswith("zero"):
        changes["deepspeed"] = deepspeed_config(int(backend[-1]))
    path = tmp_path / "config.yaml"
    output = tmp_path / "output"
    path.write_text(yaml.safe_dump(options(tmp_path, **changes)))
    run_on_ranks(backend, path)
    expected = steps_of(read_lines(output / "metrics.jsonl"))
    weights = load_file(output / "model.safetensors")
    shutil.rmtree(output / "checkpoint-6")

    changes["resume_from_checkpoint"] = str(output / "checkpoint-4")
    path.write_text(yaml.safe_dump(options(tmp_path, **changes)))
    run_on_ranks(backend, path)
    found = steps_of(read_lines(output / "metrics.jsonl"))
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm", "learning_rate", "pruning/backward_fraction"):
        values = [line[name] for line in found]
        assert values == pytest.approx([line[name] for line in expected], rel=1e-6), name
    assert relative_error(load_file(output / "model.safetensors"), weights) < 1e-6


def test_ranks_with_different_pairs_are_refused_before_anything_is_computed(
    files: Path, tmp_path: Path
):
    write_rows(tmp_path / "train.jsonl", text_rows(11, seed=5))
    path = tmp_path / "config.yaml"
    changes = changes_of("dense", files)
    path.write_text(yaml.safe_dump(options(tmp_path, **changes)))
    other = tmp_path / "other.yaml"
    changes["train_dataset"], changes["seed"] = str(tmp_path / "train.jsonl"), 7
    other.write_text(yaml.safe_dump(options(tmp_path, **changes)))
    script = tmp_path / "each.sh"
    script.write_text(
        f'exec {sys.executable} -m sdpo_scale train "$([ "$RANK" = 0 ] && echo {path} || '
        f'echo {other})"\n'
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--no-python", "bash", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0
    assert "ranks were started with different seed, training pairs" in done.stderr
    assert not (tmp_path / "output" / "metrics.jsonl").exists()
