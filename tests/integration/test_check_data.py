"""`check-data`: what a run would train on, counted and shown, with no weights read."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import sdpo_scale.inputs
from sdpo_scale.cli import main
from sdpo_scale.reporting.check_data import PADDED_PAIRS
from tests.helpers.runs import options, save_model, text_rows, write_rows

Check = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture
def write(model: Path, tmp_path: Path) -> Callable[..., str]:
    def write_config(rows: list[dict[str, Any]], **changes: Any) -> str:
        write_rows(tmp_path / "train.jsonl", rows)
        path = tmp_path / "config.yaml"
        changes = {"model": model, "train_dataset": tmp_path / "train.jsonl", **changes}
        values = options(tmp_path, **changes)
        path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
        return str(path)

    return write_config


@pytest.fixture
def check(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Check:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(sdpo_scale.inputs, "load_model", refuse)

    def run(rows: list[dict[str, Any]], *arguments: str, **changes: Any) -> Any:
        code = main(["check-data", write(rows, **changes), "--json", *arguments])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_tokens_are_counted_as_packs_and_as_padded_batches(check: Check):
    # one token per character, and an end token for each response
    rows = [{"prompt": "p" * 10, "chosen": "c" * n, "rejected": "r" * 5} for n in range(1, 12)]
    code, result = check(rows)
    assert code == 0
    packing = result["train"]["packing"]
    chosen = range(2, 13)
    packed = sum(10 + n + 6 for n in chosen)
    longest = [10 + max(n, 6) for n in chosen]
    padded = 2 * (PADDED_PAIRS * max(longest[:PADDED_PAIRS]) + 3 * max(longest[PADDED_PAIRS:]))
    whole = packed + 10 * len(rows)
    assert (packing["packed_tokens"], packing["padded_tokens"]) == (packed, padded)
    assert packing["shared_prompt_fraction"] == pytest.approx(1 - packed / whole)
    assert packing["saved_fraction"] == pytest.approx(1 - packed / padded)
    assert sum(bar["count"] for bar in result["train"]["lengths"]) == 2 * len(rows)
    assert result["train"]["lengths"][-1]["to"] >= 22


def test_duplicates_are_pairs_with_the_same_tokens_and_prompts_that_come_again(check: Check):
    row = {"prompt": "ask: ", "chosen": "yes", "rejected": "no"}
    rows = [row, {**row, "chosen": "maybe"}, row, {**row, "prompt": "other: "}, row]
    _, result = check(rows)
    assert result["train"]["duplicates"] == {"pairs": 2, "prompts": 3}


def test_decoded_pairs_give_back_the_text(check: Check):
    rows = text_rows(4)
    _, result = check(rows, "--rows", "2")
    shown = result["train"]["pairs"]
    assert [pair["row"] for pair in shown] == [0, 1]
    for pair, row in zip(shown, rows, strict=False):
        assert pair["prompt"] == row["prompt"]
        assert "".join(pair["chosen"][:-1]) == row["chosen"]
        assert pair["rejected"][-1] == "</s>"


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_refused_rows_are_all_counted_and_make_the_exit_code_1(on_bad_row: str, check: Check):
    bad = [{"prompt": "p", "chosen": None, "rejected": "r"}] * 30
    code, result = check([*text_rows(5), *bad], on_bad_row=on_bad_row)
    assert code == 1
    assert result["refused_rows"] == 30
    assert result["train"]["report"]["kept"] == 5


def test_nothing_usable_is_an_error(write: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    path = write([{"prompt": "p", "chosen": None, "rejected": "r"}])
    assert main(["check-data", path]) == 2
    assert "no pair left of 1 rows" in capsys.readouterr().err


def test_the_terminal_shows_a_plot_and_coloured_tokens(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows = text_rows(20)
    assert main(["check-data", write(rows, eval_holdout=4), "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    for text in ("train data: ", "eval data: ", "█", "duplicates: ", "refused rows", "\x1b["):
        assert text in shown


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_pairs(write: Callable[..., str], tmp_path: Path):
    """Per pair about 100 bytes are held: its lengths, number and digest, not its rows or tokens."""
    peaks = {}
    for count in (10_000, 40_000):
        rows = [{"prompt": f"{i}: ", "chosen": "yes", "rejected": "no"} for i in range(count)]
        path = write(rows, cache_dir=tmp_path / f"cache-{count}")
        script = (
            "import resource, sys; from sdpo_scale.cli import main; "
            f"assert main(['check-data', {path!r}, '--json']) == 0; "
            "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        peaks[count] = 1024 * int(done.stdout.split()[-1])
    assert (peaks[40_000] - peaks[10_000]) / 30_000 < 500
