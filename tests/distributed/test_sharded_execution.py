"""What sharding costs and keeps: host memory while loading, buffers, collectives, clipping."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.benchmarks.loading import buffer_digest
from tests.distributed.test_training_on_ranks import changes_of, deepspeed_config, files
from tests.helpers.gradients import relative_error
from tests.helpers.runs import options

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]
_ = files  # a fixture


def torchrun(num_ranks: int, *arguments: str, **environment: str) -> str:
    """What a script on ranks prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(num_ranks), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
def test_MEM_02_SHD_02_one_copy_is_read_and_buffers_are_those_of_a_plain_load(
    backend: str, tmp_path: Path
):
    """A model of 29M parameters; `tests/benchmarks/loading.py` says what 482M take."""
    script = ("tests/benchmarks/loading.py", str(tmp_path), backend, "1")
    output = torchrun(4, *script, MALLOC_MMAP_THRESHOLD_="1000000")
    (line,) = (line for line in output.splitlines() if line.startswith("{"))
    found = json.loads(line)
    # what preparing data takes, and one or two of the largest parameters, of 24 MiB each
    model, shard, overhead = found["model"], max(found["held"]), 80 * 2**20
    assert shard < model * 0.27  # the head and last norm stay whole after a forward
    assert found["read"][0] < model + shard + overhead
    assert max(found["read"][1:]) < (shard if backend == "zero3" else 0) * 1.1 + overhead
    plain = buffer_digest(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    assert found["buffers"] == [plain] * 4


def train(backend: str, folder: Path, changes: dict[str, Any], **environment: str) -> Path:
    """Output folder of a run on two ranks."""
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(options(folder, **changes)))
    torchrun(2, "tests/helpers/train_on_ranks.py", backend, str(path), **environment)
    return folder / "output"


def test_pruned_checkpointing_needs_no_more_collectives_than_ordinary_checkpointing(
    files: Path, tmp_path: Path
):
    counts = {}
    for mode in ("dense", "branch_checkpoint"):
        changes = {**changes_of(mode, files), "activation_checkpointing": True, "max_steps": 2}
        changes["eval_dataset"] = None
        log = tmp_path / f"{mode}.json"
        train("fsdp2", tmp_path / mode, changes, COLLECTIVES=str(log))
        first, second = (json.loads(Path(f"{log}.{rank}").read_text()) for rank in range(2))
        assert first == second, "both ranks call the same collectives in the same order"
        counts[mode] = {name: first.count(name) for name in set(first)}
    assert counts["dense"]["all_gather_single"] > 0
    for name in ("all_gather_single", "reduce_scatter_single"):
        assert counts["branch_checkpoint"][name] <= counts["dense"][name]


def test_gradients_may_be_reduced_once_per_step(files: Path, tmp_path: Path):
    saved, counts = {}, {}
    for reduction in ("micro_batch", "last"):
        changes = {**changes_of("branch_checkpoint", files), "gradient_reduction": reduction}
        log = tmp_path / f"{reduction}.json"
        output = train("fsdp2", tmp_path / reduction, changes, COLLECTIVES=str(log))
        saved[reduction] = load_file(output / "model.safetensors")
        counts[reduction] = json.loads(Path(f"{log}.0").read_text()).count("reduce_scatter_single")
    assert counts["last"] < counts["micro_batch"]
    assert relative_error(saved["last"], saved["micro_batch"]) < 1e-5


def test_OPT_07_gradients_are_clipped_though_deepspeeds_file_does_not_say_so(
    files: Path, tmp_path: Path
):
    moved = {}
    for name, norm in (("clipped", 1e-9), ("free", 0.0)):
        deepspeed = deepspeed_config(3)
        del deepspeed["gradient_clipping"]
        deepspeed["train_micro_batch_size_per_gpu"] = 1
        changes = {**changes_of("dense", files), "deepspeed": deepspeed, "max_steps": 1}
        changes |= {"max_grad_norm": norm, "optim": "sgd", "learning_rate": 1.0}
        output = train("zero3", tmp_path / name, changes)
        weights = load_file(output / "model.safetensors")
        before = load_file(files / "model" / "model.safetensors")
        moved[name] = max(float((weights[n] - before[n]).abs().max()) for n in weights)
    assert moved["free"] > 1e-3
    assert moved["clipped"] <= torch.finfo(torch.float32).eps * 4
