"""`train --dry-run`: what a run would do, with nothing loaded and nothing started."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

import sdpo_scale.inputs
from sdpo_scale.cli import main
from sdpo_scale.reporting.planner import sharding_of
from tests.helpers.runs import options, save_model, text_rows, write_rows

ROOT = Path(__file__).resolve().parents[2]
Write = Callable[..., str]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    write_rows(folder / "train.jsonl", text_rows(41))
    return folder


@pytest.fixture
def write_config(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(sdpo_scale.inputs, "load_model", refuse)

    def write(**changes: Any) -> str:
        changes = {"model": files / "model", "train_dataset": files / "train.jsonl", **changes}
        path = tmp_path / "config.yaml"
        values = options(tmp_path, **changes)
        path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
        return str(path)

    return write


def dry_run(capsys: pytest.CaptureFixture[str], path: str, *arguments: str) -> dict[str, Any]:
    assert main(["train", path, "--dry-run", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_options_model_data_and_plan_of_the_intended_ranks(
    files: Path, tmp_path: Path, write_config: Write, capsys: pytest.CaptureFixture[str]
):
    path = write_config(train_batch_size=20, max_tokens=130, num_train_epochs=2, bf16=True)
    zero3 = str(ROOT / "ds_configs/zero3.json")
    result = dry_run(capsys, path, "--world-size", "4", "--beta", "0.2", "--deepspeed", zero3)
    assert result["options"]["beta"] == 0.2
    assert result["options"]["bf16"] is True
    assert "label_smoothing" not in result["options"]
    model = AutoModelForCausalLM.from_pretrained(files / "model")
    assert result["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    data, plan = result["data"], result["plan"]
    assert (data["training_pairs"], data["evaluation_pairs"]) == (41, 0)
    assert (plan["ranks"], plan["sharding"], plan["pairs_per_step"]) == (4, "ZeRO-3", 20)
    assert (plan["steps_per_epoch"], plan["steps"]) == (3, 6)
    assert plan["tokens_per_step"] * 3 == pytest.approx(data["tokens"])
    assert 1 < plan["micro_batches_per_step_and_rank"] <= plan["most_micro_batches"]
    assert 1 <= plan["balance"] <= plan["worst_balance"]
    memory = result["memory"]
    assert memory["peak_gib"] == pytest.approx(sum(memory.values()) - memory["peak_gib"])
    assert memory["context_gib"] < memory["peak_gib"] < 3
    assert not (tmp_path / "output").exists()


def test_more_ranks_need_fewer_micro_batches_each(
    write_config: Write, capsys: pytest.CaptureFixture[str]
):
    path = write_config(train_batch_size=20, max_tokens=130, max_steps=5)
    alone, many = (dry_run(capsys, path, "--world-size", n)["plan"] for n in ("1", "8"))
    assert alone["steps"] == many["steps"] == 5
    assert alone["tokens_per_step"] == many["tokens_per_step"]
    assert alone["most_micro_batches"] > many["most_micro_batches"]


def test_sizes_per_device_are_multiplied_with_the_intended_ranks(
    write_config: Write, capsys: pytest.CaptureFixture[str]
):
    path = write_config(train_batch_size=None, per_device_train_batch_size=2)
    arguments = ("--gradient_accumulation_steps", "3", "--world-size", "4")
    assert dry_run(capsys, path, *arguments)["plan"]["pairs_per_step"] == 24


def test_without_json_sections_are_printed(write_config: Write, capsys: pytest.CaptureFixture[str]):
    assert main(["train", write_config(), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        *("options:", "model:", "data:", "plan:", "memory:")
    ]
    assert "  ranks: 1" in lines
    assert "  learning_rate: 0.001" in lines


def test_what_the_run_would_refuse_is_refused(
    write_config: Write, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", write_config(max_tokens=10), "--dry-run"]) == 2
    assert "raise max_tokens or lower max_length" in capsys.readouterr().err
    assert main(["train", write_config(), "--dry-run", "--deepspeed", "nowhere.json"]) == 2
    assert "error: deepspeed 'nowhere.json' cannot be read" in capsys.readouterr().err


def test_a_run_of_another_size_than_was_meant_does_not_start(
    write_config: Write, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", write_config(), "--world-size", "16"]) == 2
    assert "meant to have 16 ranks" in capsys.readouterr().err
    assert main(["train", write_config(), "--expect-variables", "NOWHERE"]) == 2
    assert "NOWHERE was set where the job was launched" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "variables", "name"),
    [
        ({}, {}, "none"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, {}, "ZeRO-2"),
        ({"deepspeed": {"bf16": {"enabled": True}}}, {}, "none"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, "FSDP2"),
        ({"fsdp": True}, {}, "FSDP2"),
    ],
)
def test_how_parameters_would_be_sharded(
    options: dict[str, Any],
    variables: dict[str, str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert sharding_of(options) == name
