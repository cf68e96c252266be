"""Ranks agree on what fits, sharded or not, and a sharded run takes what was measured before."""

import json
from pathlib import Path

import pytest
import yaml

from tests.distributed.test_training_on_ranks import run_on_ranks
from tests.helpers.runs import options, read_lines, save_model, text_rows, write_rows

pytestmark = pytest.mark.distributed
BUDGET = "2MiB"


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    write_rows(folder / "train.jsonl", text_rows(40))
    data = {"model": folder / "model", "train_dataset": folder / "train.jsonl", "max_steps": 2}
    auto = {"max_tokens": "auto", "train_batch_size": "auto", "memory_budget": BUDGET}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(options(folder, **data, **auto)))
    return path


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_ranks_agree_on_what_fits_and_train_with_it(
    backend: str, config_path: Path, tmp_path: Path
):
    path = tmp_path / "config.yaml"
    settings = yaml.safe_load(config_path.read_text())
    path.write_text(yaml.safe_dump({**settings, "output_dir": str(tmp_path / "output")}))
    run_on_ranks(backend, path, TUNES=str(tmp_path / "found"))
    first, second = (json.loads((tmp_path / f"found.{rank}").read_text()) for rank in (0, 1))
    assert first == second
    saved = json.loads((tmp_path / "output" / "tuned.json").read_text())
    kind = {"ddp": "none", "fsdp2": "FSDP"}[backend]
    assert saved["valid_for"]["sharding"] == f"{kind}, 2 ranks"
    assert saved["max_tokens"] == first["max_tokens"] >= 68
    assert saved["peak_bytes"] <= saved["budget_bytes"] == 2 * 2**20
    lines = read_lines(tmp_path / "output" / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
