"""Pruned runs of the trainer, from files to metrics, and what a resumed one must repeat."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpo_scale.options import read_config
from sdpo_scale.pruning import PRESETS
from tests.helpers.runs import (
    AtStep,
    Recorder,
    SaveAt,
    config,
    read_lines,
    save_model,
    steps_of,
    text_rows,
    write_rows,
)

ACTIVE = [name for name in PRESETS if name != "off"]
METRICS = {
    "pruning/executed_fraction",
    "pruning/backward_fraction",
    "pruning/scored_fraction",
    "pruning/variance_inflation",
    "pruning/effective_sample_size",
    "pruning/max_weight",
    "pruning/noise_adjusted_speedup",
}
Make = Callable[..., Recorder]


class KilledError(Exception):
    """Stands for the signal that ends a run."""


def kill(_model: Any) -> None:
    raise KilledError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    write_rows(folder / "train.jsonl", text_rows(12))
    return folder


@pytest.fixture
def make(files: Path, tmp_path: Path) -> Make:
    def build(*, folder: Path = tmp_path, arguments: Any = None, **changes: Any) -> Recorder:
        changes = {"num_train_epochs": 3, "max_tokens": 200, **changes}
        args = config(folder, model=files / "model", train_dataset=files / "train.jsonl", **changes)
        return Recorder(args=args, **(arguments or {}))

    return build


def steps(trainer: Recorder) -> list[dict[str, Any]]:
    return steps_of(read_lines(trainer.args.output_path / "metrics.jsonl"))


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "stored"])
@pytest.mark.parametrize("preset", ACTIVE)
def test_every_preset_trains_and_says_what_it_pruned(preset: str, checkpointing: bool, make: Make):
    trainer = make(pruning=preset, activation_checkpointing=checkpointing)
    trainer.train()
    lines = steps(trainer)
    assert len(lines) == 9
    for line in lines:
        assert METRICS | {"clipped_fraction"} <= line.keys()
        largest = line["pruning/max_weight"]  # 0 where nothing of a step was kept
        assert largest == 0 or largest >= 1
        assert line["pruning/variance_inflation"] >= 1 - 1e-6
        assert 0 <= line["pruning/backward_fraction"] <= 1
    if checkpointing or preset != "exact-budget":  # there two passes would not have paid
        assert min(line["pruning/backward_fraction"] for line in lines) < 1
    if preset in ("fastest", "paper"):
        assert min(line["pruning/executed_fraction"] for line in lines) < 1


def test_without_pruning_nothing_is_said_of_it(make: Make):
    trainer = make(max_steps=2)
    trainer.train()
    assert not any(name.startswith("pruning/") for line in steps(trainer) for name in line)


@pytest.mark.parametrize("preset", ["exact-budget", "fastest"])
@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "stored"])
def test_CKP_04_a_resumed_run_makes_the_draws_of_one_that_was_never_killed(
    checkpointing: bool, preset: str, make: Make, tmp_path: Path
):
    options = {"pruning": preset, "activation_checkpointing": checkpointing}
    whole = make(folder=tmp_path / "whole", **options)
    whole.train()
    folder = tmp_path / "killed"
    killed = make(folder=folder, arguments={"callbacks": [SaveAt(4), AtStep(6, kill)]}, **options)
    with pytest.raises(KilledError):
        killed.train()
    resumed = make(folder=folder, **options)
    resumed.train(str(folder / "output" / "checkpoint-4"))
    found, expected = steps(resumed), steps(whole)
    for name in ("loss", "grad_norm", *sorted(METRICS)):
        assert [line[name] for line in found] == [line[name] for line in expected], name
    states = (run.model.state_dict() for run in (resumed, whole))
    first, second = states
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_a_checkpoint_without_history_is_resumed_with_a_warning(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    saved = make(max_steps=3, arguments={"callbacks": [SaveAt(3)]})
    saved.train()
    checkpoint = saved.args.output_path / "checkpoint-3"
    assert not (checkpoint / "pruning_history.npz").exists()
    resumed = make(max_steps=5, pruning="exact-budget")
    resumed.train(str(checkpoint))
    assert f"{checkpoint / 'pruning_history.npz'} is not there" in caplog.text
    assert resumed.state.global_step == 5


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "stored"])
@pytest.mark.parametrize("preset", ACTIVE)
def test_max_tokens_changes_no_draw(preset: str, checkpointing: bool, make: Make, tmp_path: Path):
    runs = []
    for most in (70, 10_000):
        trainer = make(
            folder=tmp_path / str(most),
            pruning=preset,
            activation_checkpointing=checkpointing,
            max_tokens=most,
            max_steps=5,
            learning_rate=1e-4,
        )
        trainer.train()
        runs.append(steps(trainer))
    for name in ("pruning/executed_fraction", "pruning/backward_fraction", "loss", "grad_norm"):
        found, expected = ([line[name] for line in run] for run in runs)
        assert found == pytest.approx(expected, rel=1e-3), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pruning": "exact"}, "pruning 'exact' is unknown; choose one of off, exact-budget"),
        ({"pruning_kwargs": {"branch": "pair"}}, "unknown pruning option 'branch', did you mean"),
        ({"variance_inflation": 1.1}, "act on branches and presample, and neither is on"),
        ({"pruning": "exact-budget", "variance_inflation": 0.9}, "at least 1, got 0.9"),
        ({"pruning": "exact-budget", "keep_fraction": 0.0}, "keep_fraction must be in"),
        ({"score_max_tokens": 100}, "less than max_tokens"),
    ],
)
def test_pruning_options_that_cannot_be_used_are_named(options: Any, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_pruning_options_are_read_from_yaml(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "pruning: exact-budget\nvariance_inflation: 1.5\n"
        "pruning_kwargs: {prefix: [1.0, 0.5], prefix_levels: [128], branch_unit: response}\n"
    )
    pruning = read_config(str(path)).pruning_options
    assert pruning.variance_inflation == 1.5
    assert pruning.prefix_design.token_counts == (128,)
    assert pruning.branch_unit == "response"
