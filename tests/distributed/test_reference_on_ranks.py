"""References under sharding: scoring leaves no trace in how the policy is sharded, and a second
model is never run in shards: its log-probabilities come from a run in one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdpo_scale import SDPOTrainer
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

ROOT = Path(__file__).resolve().parents[2]
SHARDED = {"ddp": None, "fsdp2": "FSDP", "zero3": "ZeRO-3"}
"""Backend → what the refusal calls it, where a second model would have to be sharded."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    save_model(folder / "other", initializer_range=0.03)
    write_rows(folder / "train.jsonl", text_rows(8))
    return folder


def run_options(files: Path, place: Path, **changes: Any) -> dict[str, Any]:
    names = {"model": files / "model", "train_dataset": files / "train.jsonl"}
    return options(place, **names, max_steps=2, bf16=False, **changes)


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def run_on_ranks(backend: str, *paths: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "tests/helpers/train_on_ranks.py"]
    return subprocess.run(
        [*command, backend, *map(str, paths)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def losses(place: Path) -> list[float]:
    return [line["loss"] for line in steps_of(read_lines(place / "output" / "metrics.jsonl"))]


def test_REF_07_scoring_before_training_leaves_the_sharding_as_it_is(files: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    paths = []
    for name in ("scores", "finds"):
        (tmp_path / name).mkdir()
        values = run_options(files, tmp_path / name, cache_dir=cache)
        paths.append(write(tmp_path / f"{name}.yaml", values))
    done = run_on_ranks("fsdp2", *paths, UNITS=str(tmp_path / "units"))
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        with_scoring, without = read_lines(tmp_path / f"units.{rank}")
        assert with_scoring == without
        assert sum(".layers." in name for name in without["units"]) == 2
    assert losses(tmp_path / "scores") == losses(tmp_path / "finds")


@pytest.mark.parametrize("backend", SHARDED)
def test_SHD_04_a_reference_apart_on_ranks_is_that_of_one_process(
    backend: str, files: Path, tmp_path: Path
):
    one = tmp_path / "one"
    trainer = SDPOTrainer(args=config(one, **run_options(files, one, ref_model=files / "other")))
    trainer.train()
    many = tmp_path / "many"
    many.mkdir()
    values = run_options(files, many, ref_model=files / "other")
    if backend == "zero3":
        values["deepspeed"] = str(ROOT / "ds_configs" / "zero3.json")
    path = write(many / "run.yaml", values)
    done = run_on_ranks(backend, path)
    if SHARDED[backend] is not None:
        assert done.returncode != 0
        assert f"ref_model is refused under {SHARDED[backend]} while 8 pairs are not" in done.stderr
        done = run_on_ranks(backend, write(path, {**values, "cache_dir": str(one / "cache")}))
    assert done.returncode == 0, done.stderr[-4000:]
    assert losses(many) == pytest.approx(losses(one), abs=1e-5)
