"""Small runs from files: a model folder, rows of pairs, a config that learns within 20 steps."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sdpo_scale import SDPOConfig, SDPOTrainer
from tests.helpers import tiny_models, toy_tokenizers

_ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 128  # the toy tokenizers have 108 tokens


def save_model(
    folder: Path, tokenizer: str = "plain", *, family: str = "llama", **overrides: Any
) -> Path:
    """A random float32 model and a toy tokenizer in one folder; `overrides` change its config."""
    overrides = {"vocab_size": VOCAB_SIZE, **overrides}
    tiny_models.build(family, **overrides).save_pretrained(folder)
    toy_tokenizers.build(tokenizer).save_pretrained(folder)
    return folder


def text_rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs in the standard format, of many lengths; no two are equal."""
    draw = random.Random(seed)

    def words(least: int, most: int) -> str:
        lengths = [draw.randint(2, 5) for _ in range(draw.randint(least, most))]
        return " ".join("".join(draw.choices("cdefghijk", k=n)) for n in lengths)

    return [
        {
            "prompt": f"{n}: {words(1, 5)}?",
            "chosen": f" {words(1, 4)}",
            "rejected": f" {words(1, 7)}",
        }
        for n in range(count)
    ]


def chat_rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """The same pairs as conversations."""
    roles = (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant"))
    return [
        {column: [{"role": role, "content": row[column].strip()}] for column, role in roles}
        for row in text_rows(count, seed=seed)
    ]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    """Options of a run that keeps everything under `folder`."""
    return {
        "output_dir": str(folder / "output"),
        "cache_dir": str(folder / "cache"),
        "train_batch_size": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "activation_checkpointing": False,
        "report_to": [],
        "use_cpu": True,
        **{name: str(v) if isinstance(v, Path) else v for name, v in changes.items()},
    }


def config(folder: Path, **changes: Any) -> SDPOConfig:
    """The config of such a run."""
    return SDPOConfig(**options(folder, **changes))


class Recorder(SDPOTrainer):
    """Keeps the pair ids of every step it takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trained: list[list[int]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.trained.append([pair.pair_id for pair in inputs[0]])
        return super().training_step(model, inputs, num_items_in_batch)


class AtStep(TrainerCallback):
    """Calls a function when a step has ended, before it is logged, evaluated or saved."""

    def __init__(self, step: int, function: Any) -> None:
        self.step, self.function = step, function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.function(kwargs["model"])


class SaveAt(TrainerCallback):
    """Saves a checkpoint after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == self.step


def steps_of(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of the lines of a metrics file, or of a trainer's log, those of training steps."""
    return [dict(line) for line in lines if "loss" in line]


def run_forked(folder: Path, *phases: dict[str, Any]) -> list[dict[str, Any]]:
    """A report for each phase of tests/helpers/forked_runs.py."""
    path = folder / "phases.json"
    path.write_text(json.dumps(phases))
    done = subprocess.run(
        [sys.executable, "tests/helpers/forked_runs.py", str(path)],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
