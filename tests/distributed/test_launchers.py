"""Runs on two CPU processes, started as users start them, and how they end."""

import base64
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.helpers.runs import options, read_lines, save_model, steps_of, text_rows, write_rows

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    write_rows(folder / "train.jsonl", text_rows(16))
    return folder


def write_config(files: Path, folder: Path, **changes: Any) -> str:
    values = options(
        folder,
        model=files / "model",
        train_dataset=files / "train.jsonl",
        optim="adamw_torch",
        **{"max_steps": 3, **changes},
    )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def environment(**variables: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"PATH": path, "PYTHONPATH": str(ROOT), "NPROC_PER_NODE": "2", **variables}
    return {**os.environ, "OMP_NUM_THREADS": "1", **given}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in steps_of(read_lines(folder / "output" / "metrics.jsonl"))]


def until(line_start: str, lines: Iterable[str]) -> None:
    next(line for line in lines if line.startswith(line_start))


def test_torchrun_script_trains_and_at_SIGTERM_saves_and_ends_with_143(files: Path, tmp_path: Path):
    config = write_config(files, tmp_path, max_steps=100_000)
    with subprocess.Popen(
        ["bash", "launch/torchrun.sh", config],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        command = job.stdout.readline()
        until("step 2/", job.stderr)
        job.terminate()
        _, rest = job.communicate(timeout=PATIENCE)
    assert job.returncode == 143
    assert command.startswith("torchrun --nnodes 1 --nproc-per-node 2 ")
    assert "--world-size 2" in command
    (saved,) = (tmp_path / "output").glob("checkpoint-*")
    step = int(saved.name.removeprefix("checkpoint-"))
    assert steps(tmp_path) == list(range(1, step + 1))
    assert rest.count(f"stopped by SIGTERM after step {step}") == 1


def test_accelerate_launch_with_the_shipped_file_shards_by_FSDP2(files: Path, tmp_path: Path):
    config = write_config(files, tmp_path)
    command = ["accelerate", "launch", "--config_file", "ds_configs/fsdp2.yaml"]
    command += ["--num_processes", "2", "--main_process_port", "0"]
    done = run(*command, "tests/helpers/train_on_ranks.py", "fsdp2", config)
    assert done.returncode == 0, done.stderr[-6000:]
    assert steps(tmp_path) == [1, 2, 3]


def test_deepspeed_launcher_with_the_shipped_file_shards_by_ZeRO_3(files: Path, tmp_path: Path):
    config = write_config(files, tmp_path, deepspeed=ROOT / "ds_configs/zero3.json")
    command = ["deepspeed", "--hostfile", "none", "--num_gpus", "2", "--no_local_rank"]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    done = run(*command, "--master_port", port, "tests/helpers/train_on_ranks.py", "zero3", config)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert steps(tmp_path) == [1, 2, 3]


def test_LCH_03_what_DeepSpeed_hands_to_pdsh(files: Path, tmp_path: Path):
    for name, text in (("ssh", "echo 10.0.0.1"), ("pdsh", 'echo "$PDSH_SSH_ARGS_APPEND|$*"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = run(
        *("bash", "launch/deepspeed.sh", write_config(files, tmp_path)),
        PATH=f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        HOSTFILE="tests/cases/LCH-03/hostfile",
        PDSH_SSH_ARGS_APPEND="-i key",
        NCCL_SOCKET_IFNAME="ib0",
        HF_HOME="/data/hf",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        SDPO_RUN="a b",
    )
    assert done.returncode == 0, done.stderr
    ssh, _, command = done.stdout.splitlines()[-1].partition("|")
    assert ssh == "-i key -o BatchMode=yes"
    for variable in ("NCCL_SOCKET_IFNAME=ib0", "HF_HOME=/data/hf", 'SDPO_RUN="a b"'):
        assert f"export {variable};" in command
    assert "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True;" in command
    world = json.loads(base64.urlsafe_b64decode(re.findall(r"--world_info=(\S+)", command)[0]))
    assert {name: len(slots) for name, slots in world.items()} == {"node-a": 8, "node-b": 4}
    assert "--world-size 12" in command
    assert "--expect-variables HF_HOME," in command


def test_CKP_15_an_error_in_the_config_is_printed_once_and_not_tried_again(
    files: Path, tmp_path: Path
):
    done = run("bash", "launch/torchrun.sh", write_config(files, tmp_path), "--beta", "-1")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "beta must be positive" in line]
    assert len(said) == 1, done.stderr
    assert re.fullmatch(r"error on rank [01]: beta must be positive, got -1.0", said[0])


def test_a_rank_that_is_killed_ends_the_job_with_one_error(files: Path, tmp_path: Path):
    config = write_config(files, tmp_path, max_steps=100_000)
    with subprocess.Popen(
        ["bash", "launch/torchrun.sh", config],
        cwd=ROOT,
        env=environment(MAX_RESTARTS="0"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stderr is not None
        ranks = psutil.Process(job.pid)
        until("step 2/", job.stderr)
        (victim,) = (
            process
            for process in ranks.children(recursive=True)
            if process.environ().get("RANK") == "1" and "sdpo_scale" in process.cmdline()
        )
        victim.kill()
        _, rest = job.communicate(timeout=PATIENCE)
    assert job.returncode == 1
    assert rest.count("Traceback (most recent call last)") == 1  # torchrun's own, of its report
    cause = rest[rest.index("Root Cause") :]
    assert "(local_rank: 1)" in cause
    assert "Signal 9 (SIGKILL)" in cause
    assert "onnection closed" not in rest
    assert "onnection reset" not in rest
