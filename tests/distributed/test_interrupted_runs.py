"""Runs that are killed, moved to another number of ranks, or meet a full disk, go on as one run.

SDPO_TEST_KILLS=25 kills more often than the default, which keeps the suite quick.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.distributed.test_training_on_ranks import BUDGET, deepspeed_config
from tests.helpers.gradients import relative_error
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
ROOT = Path(__file__).resolve().parents[2]
NUM_KILLS = int(os.environ.get("SDPO_TEST_KILLS", "3"))
OF_THE_MACHINE = ("_per_second", "_runtime", "_memory_gib")
OF_ONE_START = ("train_loss", "total_flos")  # Trainer counts them from the last start on


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    # the head has one row more than a multiple of the ranks, a norm fewer elements than some
    save_model(folder / "model")
    write_rows(folder / "train.jsonl", text_rows(31))
    return folder


@pytest.fixture(scope="module")
def calm(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Number of ranks → output of a run that nothing happens to: one process, FSDP2 on two."""
    folder = tmp_path_factory.mktemp("calm")
    phases = []
    for world_size, backend in ((1, "ddp"), (2, "fsdp2")):
        path = write_config(folder / f"{world_size}.yaml", files)
        phases.append({"config": path, "world_size": world_size, "backend": backend})
    reports = run_forked(folder, *phases)
    assert [report["codes"] for report in reports] == [[0], [0, 0]], reports
    return {world_size: folder / str(world_size) / "output" for world_size in (1, 2)}


def assert_same(output: Path, expected: Path) -> None:
    """Metrics and weights are equal to the bit."""
    assert lines_of(output) == lines_of(expected)
    weights = [load_file(folder / "model.safetensors") for folder in (output, expected)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def write_config(path: Path, files: Path, **changes: Any) -> str:
    """20 steps in four epochs, pruned by what past steps have shown."""
    run = {
        "model": files / "model",
        "train_dataset": files / "train.jsonl",
        "num_train_epochs": 4,
        "max_steps": 20,
        "train_batch_size": 6,
        "max_tokens": 130,
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "resume_from_checkpoint": "auto",
        **BUDGET,
        **changes,
    }
    path.write_text(yaml.safe_dump(options(path.with_suffix(""), **run)))
    return str(path)


def lines_of(output: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if not k.endswith(OF_THE_MACHINE) and k not in OF_ONE_START}
        for line in read_lines(output / "metrics.jsonl")
    ]


@pytest.mark.parametrize(("backend", "world_size"), [("ddp", 1), ("fsdp2", 2)])
def test_a_run_that_is_killed_at_random_moments_ends_as_if_it_was_not(
    backend: str, world_size: int, files: Path, tmp_path: Path, calm: dict[int, Path]
):
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    path = write_config(tmp_path / "killed.yaml", files, **saves)
    phase = {"config": path, "world_size": world_size, "backend": backend}
    (report,) = run_forked(tmp_path, {**phase, "kills": NUM_KILLS, "seed": 1})
    assert report["codes"] == [0] * world_size, report["log"]
    output = tmp_path / "killed" / "output"
    assert_same(output, calm[world_size])
    assert {path.name for path in output.glob("check*")} == {"checkpoint-19", "checkpoint-20"}


@pytest.mark.parametrize(
    ("backend", "world_sizes"),
    [("ddp", (2, 1, 4)), ("fsdp2", (4, 1, 3)), ("zero2", (1, 2)), ("zero3", (2, 1))],
)
def test_CKP_06_SHD_07_a_run_goes_on_with_another_number_of_ranks(
    backend: str,
    world_sizes: tuple[int, ...],
    files: Path,
    tmp_path: Path,
    calm: dict[int, Path],
):
    changes = {}
    if backend.startswith("zero"):
        changes["deepspeed"] = deepspeed_config(int(backend[-1]))
    path = write_config(tmp_path / "moved.yaml", files, **changes)
    phases = [
        {"config": path, "world_size": size, "backend": backend, "stop_at": 7 * number}
        for number, size in enumerate(world_sizes, start=1)
    ]
    phases[-1]["stop_at"] = 0
    reports = run_forked(tmp_path, *phases)
    assert [report["codes"] for report in reports] == [[0] * size for size in world_sizes]
    output = tmp_path / "moved" / "output"
    expected, found = steps_of(lines_of(calm[1])), steps_of(lines_of(output))
    assert [line["step"] for line in found] == list(range(1, 21))
    for name in ("loss", "grad_norm", "learning_rate", "pruning/backward_fraction", "epoch"):
        values = [line[name] for line in found]
        assert values == pytest.approx([line[name] for line in expected], rel=1e-4), name
    saved, weights = (load_file(folder / "model.safetensors") for folder in (output, calm[1]))
    assert relative_error(saved, weights) < 1e-5


def test_a_full_disk_loses_nothing_that_was_saved_and_is_named(
    files: Path, tmp_path: Path, calm: dict[int, Path]
):
    path = write_config(tmp_path / "full.yaml", files, save_strategy="steps", save_steps=4)
    run = {"config": path, "world_size": 2, "backend": "fsdp2"}
    phases = {**run, "stop_at": 6}, {**run, "file_bytes": 20_000}, run
    first, full, again = run_forked(tmp_path, *phases)
    assert (first["codes"], full["codes"], again["codes"]) == ([0, 0], [1, 1], [0, 0]), full["log"]
    assert "the checkpoint of step 8 could not be written by rank" in full["log"]
    assert "checkpoint-6, and resume_from_checkpoint: auto goes on from it" in full["log"]
    assert_same(tmp_path / "full" / "output", calm[2])


def test_DST_07_ranks_end_together_and_the_next_start_takes_smaller_micro_batches(
    files: Path, tmp_path: Path, calm: dict[int, Path]
):
    path = write_config(tmp_path / "hit.yaml", files, save_strategy="steps", save_steps=4)
    run = {"config": path, "world_size": 2, "backend": "fsdp2"}
    hit, again = run_forked(tmp_path, {**run, "out_of_memory_at": 6}, run)
    assert hit["codes"] == [1, 1]
    assert "step 6 ran out of memory with micro-batches of 130 tokens" in hit["log"]
    assert again["codes"] == [0, 0], again["log"]
    assert "not 130: an earlier start ran out of memory" in again["log"]
    found = steps_of(lines_of(tmp_path / "hit" / "output"))
    expected = steps_of(lines_of(calm[2]))
    assert [line["step"] for line in found] == list(range(1, 21))
    for name in ("loss", "grad_norm", "pruning/backward_fraction"):
        values = [line[name] for line in found]
        assert values == pytest.approx([line[name] for line in expected], rel=1e-4), name
