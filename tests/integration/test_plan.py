"""`plan`: memory and what fits, for GPUs that are not there."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

import sdpo_scale.inputs
from sdpo_scale.cli import main
from sdpo_scale.memory.architectures import ARCHITECTURES
from sdpo_scale.modeling.loading import empty_model
from sdpo_scale.options import read_options
from sdpo_scale.reporting.plan import plan as make_plan
from sdpo_scale.reporting.plan import planner_of, plot
from sdpo_scale.reporting.planner import Machine
from tests.helpers.runs import options, save_model, text_rows, write_rows

SMALL = "qwen2.5-0.5b"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A known architecture on 8 GPUs, its whole model simulated as well."""
    options = {**read_options(SMALL), "max_tokens": 32768}
    return make_plan(options, gpu_memory="24GiB", world_size=8, sharding="fsdp2", simulates=True)


def row(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(variant for variant in result["variants"] if variant["name"] == name)


def test_a_known_architecture_is_planned_from_its_name(planned: dict[str, Any]):
    assert planned["model"]["parameters"] == pytest.approx(494e6, rel=0.001)
    assert planned["model"]["layers"] == 24
    assert planned["machine"] == {"memory": 24 * 2**30, "world_size": 8, "sharding": "FSDP2"}
    parts = row(planned, "checkpointing")["bytes"]
    assert parts["parameters"] == pytest.approx(4 * 494e6 / 8, rel=0.001)
    assert parts["optimizer"] == 2 * parts["parameters"]


def test_the_model_agrees_with_a_simulation_of_all_layers(planned: dict[str, Any]):
    variant = row(planned, "checkpointing")
    assert variant["total_bytes"] == pytest.approx(variant["simulated_bytes"], rel=0.01)


def test_what_fits_grows_with_checkpointing_and_with_two_passes(planned: dict[str, Any]):
    stored, dense = row(planned, "no checkpointing"), row(planned, "checkpointing")
    assert stored["largest_max_tokens"] < dense["largest_max_tokens"]
    once, twice = row(planned, "memory, checkpointing"), row(planned, "memory, two passes")
    for variant in (once, twice):
        assert variant["largest_max_tokens"] == dense["largest_max_tokens"]
    pairs = dense["pairs_per_micro_batch"]
    assert once["pairs_per_step_of_one_micro_batch"] == 8 * pairs
    assert twice["pairs_per_step_of_one_micro_batch"] == 2 * 8 * pairs
    assert once["flops_per_step"] == dense["flops_per_step"] * (1 + 3 / 2) / 4
    assert twice["flops_per_step"] == dense["flops_per_step"] * (1 + 4 / 2) / 4


def test_the_usual_peak_is_lower_where_kept_rows_are_recomputed(planned: dict[str, Any]):
    for name in ("memory", "fastest", "paper"):
        variant = row(planned, f"{name}, checkpointing")
        assert variant["expected_bytes"] < variant["total_bytes"]
    exact = row(planned, "exact-budget, checkpointing")
    assert exact["expected_bytes"] == exact["total_bytes"]


def test_the_largest_size_is_the_largest(planned: dict[str, Any]):
    machine = Machine(memory=24 * 2**30, world_size=8, sharding="FSDP2")
    curve = planner_of(read_options(SMALL), machine).curve("pruned")
    most = row(planned, "checkpointing")["largest_max_tokens"]
    assert curve.footprint(int(0.98 * most)).total <= machine.memory
    assert curve.footprint(int(1.02 * most)).total > machine.memory


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_architectures_have_the_parameters_of_their_names(name: str):
    shape = dict(ARCHITECTURES[name])
    model = empty_model(AutoConfig.for_model(shape.pop("model_type"), **shape))
    parameters = {id(p): p.numel() for p in model.parameters()}
    size = float(name.rsplit("-", 1)[1].removesuffix("b"))
    assert sum(parameters.values()) / 1e9 == pytest.approx(size, rel=0.11)


def test_a_config_is_planned_with_the_lengths_of_its_pairs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sdpo_scale.inputs, "load_model", lambda *_, **__: pytest.fail("weights"))
    write_rows(tmp_path / "train.jsonl", text_rows(20))
    path = tmp_path / "config.yaml"
    values = options(tmp_path, model=model, train_dataset=tmp_path / "train.jsonl")
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    arguments = ("--max_tokens", "1000", "--train_batch_size", "64", "--world-size", "2")
    result = plan(capsys, str(path), *arguments, "--gpu-memory", "1GiB")
    assert result["machine"]["sharding"] == "DDP"
    tokens = sum(result["pairs"].values())
    assert 20 < tokens < 80
    for variant in result["variants"]:
        assert variant["fits"]
        assert variant["pairs_per_micro_batch"] == variant["largest_max_tokens"] // tokens
    assert row(result, "checkpointing")["micro_batches_per_step"] == 1
    assert not (tmp_path / "output").exists()


def test_without_json_a_table_a_bar_and_the_nearest_change(capsys: pytest.CaptureFixture[str]):
    arguments = ("--world-size", "1", "--gpu-memory", "12GiB", "--max_tokens", "65536")
    assert main(["plan", SMALL, *arguments]) == 0
    out = capsys.readouterr().out
    assert "0.49B parameters, 24 layers; 1 × 12.0 GiB, none" in out
    assert "stored activations" in out
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    assert "max_tokens 65536 needs" in text
    assert "set max_tokens to" in text


def test_a_model_that_fits_nowhere_is_said_what_to_do(capsys: pytest.CaptureFixture[str]):
    result = plan(capsys, SMALL, "--world-size", "1", "--gpu-memory", "4GiB")
    (warning,) = result["warnings"]
    assert "shard over more GPUs (FSDP2 or ZeRO-3), or train an adapter" in warning
    assert all(variant["largest_max_tokens"] == 0 for variant in result["variants"])


def test_a_plot_is_written(planned: dict[str, Any], tmp_path: Path):
    plot(planned, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plot", "plan.bmp"), "--plot 'plan.bmp' must end with .png"),
        (("--plot", "nowhere/plan.png"), "--plot 'nowhere/plan.png': there is no folder 'nowhere'"),
        (("--gpu-memory", "80"), "--gpu-memory '80' is no size: write 80GiB"),
        (("--gpu-memory", "manyGiB"), "--gpu-memory 'manyGiB' is no size"),
        (("--world-size", "0"), "--world-size must be at least 1, got 0"),
        (("--sharding", "zero4"), "--sharding 'zero4' is unknown; choose one of none, DDP"),
    ],
)
def test_wrong_options_are_named(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", SMALL, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_name_that_is_neither_file_nor_architecture(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "llama-9"]) == 2
    assert "llama-9" in capsys.readouterr().err
