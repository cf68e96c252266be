"""`sdpo-scale verify` on a small model: right estimators pass, wrong ones do not."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdpo_scale.cli import main
from sdpo_scale.pruning import PRESETS
from tests.exactness.test_expected_gradient import mutated_backward, off_by_one
from tests.helpers.runs import options, save_model, text_rows, write_rows

ACTIVE = [name for name in PRESETS if name != "off"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    write_rows(folder / "train.jsonl", text_rows(24))
    return folder


@pytest.fixture
def run(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def verify(*arguments: str, **changes: Any) -> tuple[int, dict[str, Any]]:
        values = options(
            tmp_path,
            model=str(files / "model"),
            train_dataset=str(files / "train.jsonl"),
            train_batch_size=8,
            **changes,
        )
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        code = main(["verify", str(path), "--json", *arguments])
        lines = capsys.readouterr().out.splitlines()
        return code, json.loads(lines[-1]) if lines else {}

    return verify


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "stored"])
@pytest.mark.parametrize("preset", ACTIVE)
def test_every_preset_is_found_unbiased(preset: str, checkpointing: bool, run: Any):
    code, found = run(pruning=preset, activation_checkpointing=checkpointing)
    assert (code, found["unbiased"]) == (0, True)
    assert found["max_abs_z"] <= found["z_threshold"]
    assert found["num_pairs"] == 8
    assert found["num_draws"] == 100


def test_measured_and_predicted_inflation_agree_for_independent_coins(run: Any):
    _, found = run(
        "--num_draws", "200", pruning="exact-budget", variance_inflation=1.5,
        activation_checkpointing=True,
    )  # fmt: skip
    predicted, measured = (found[f"variance_inflation_{n}"] for n in ("predicted", "measured"))
    assert predicted > 1.1
    # gradients of tokens are neither orthogonal nor equally large in so small a model
    assert measured - 1 == pytest.approx(predicted - 1, rel=0.5)
    assert 0 < found["flops_ratio"] < 1
    assert found["noise_adjusted_speedup"] == pytest.approx(1 / found["flops_ratio"] / measured)


@pytest.mark.parametrize(
    ("target", "replacement", "changes"),
    [
        (
            "sdpo_scale.weighting.telescoping_weights",
            off_by_one,
            {"pruning_kwargs": {"prefix": "geometric", "prefix_levels": 3}},
        ),
        (
            "sdpo_scale.step.draw_backward",
            mutated_backward(lambda factors: 1 / factors),
            {"pruning": "exact-budget", "keep_fraction": 0.4, "activation_checkpointing": True},
        ),
    ],
    ids=["survival_of_the_next_level", "probability_instead_of_its_inverse"],
)
def test_a_wrong_weight_is_found_biased(
    target: str, replacement: Any, changes: Any, run: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(target, replacement)
    code, found = run(**changes)
    assert (code, found["unbiased"]) == (1, False)


def test_nothing_is_written_to_the_output_folder(run: Any, tmp_path: Path):
    run("--num_draws", "20", "--warmup_steps", "1", pruning="memory")
    assert not (tmp_path / "output").exists()


def test_pruning_that_is_off_is_refused(run: Any, capsys: pytest.CaptureFixture[str]):
    assert run()[0] == 2


def test_too_few_draws_are_refused(run: Any):
    assert run("--num_draws", "3", pruning="paper")[0] == 2
