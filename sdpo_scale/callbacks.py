"""What a user sees while a run goes on: the metrics file and the progress bar."""

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sdpo_scale.metrics import MetricSums, StepCounts
from sdpo_scale.record import Ranks, StepResult
from sdpo_scale.waiting import begin_phase

__all__ = [
    "CONSOLE",
    "MetricsFile",
    "PhaseNames",
    "ProgressBar",
    "StepLog",
    "StopSignal",
    "new_progress",
    "peak_memory_bytes",
    "show_progress",
    "will_log",
]

CONSOLE = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
"""Progress and log lines share one console, so that they do not overwrite each other; of several
ranks the first one speaks."""


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def will_log(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether ``Trainer`` logs the step that comes next."""
    step = state.global_step + 1
    if args.logging_strategy != "steps":
        return True
    return (step == 1 and args.logging_first_step) or step % state.logging_steps == 0


def new_progress(description: str) -> Progress:
    """A progress bar on standard error; on something else than a terminal it stays silent."""
    return Progress(
        TextColumn(description),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=CONSOLE,
        disable=not CONSOLE.is_terminal,
    )


def show_progress(progress: Progress, task: TaskID, done: int, total: int) -> None:
    """Moves a task's bar."""
    progress.update(task, completed=done, total=total)


class MetricsFile(TrainerCallback):
    """Writes ``metrics.jsonl``: one JSON object per logged step, evaluation and summary.

    A resumed run drops the lines after its checkpoint, so that no step is there twice; a new run in
    the same folder keeps the old file beside it.
    """

    def __init__(self, path: Path) -> None:
        """Names the file; nothing is written yet."""
        self.path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Brings the file to the state of the step that training starts from."""
        if not state.is_world_process_zero or not self.path.is_file():
            return
        if state.global_step == 0:
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.path.stat().st_mtime))
            self.path.rename(self.path.with_name(f"metrics-until-{stamp}.jsonl"))
            return
        lines = self.path.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= state.global_step]
        # a summary of the start that ended here is none of the run
        kept = [line for line in kept if "train_runtime" not in json.loads(line)]
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(kept), "utf-8")
        aside.replace(self.path)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Appends one line."""
        if state.is_world_process_zero and logs:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


class StepLog:
    """The numbers of the latest step, and of the steps since the last logged line."""

    def __init__(
        self,
        *,
        beta: float,
        num_parameters: Mapping[str, int],
        recomputes: bool,
        is_pruned: bool,
    ) -> None:
        """Takes what metrics depend on besides the steps."""
        self.numbers: dict[str, float] = {}
        self.num_flops = 0
        self._num_parameters = dict(num_parameters)
        self.sizes: dict[str, Any] = {**num_parameters, "recomputes": recomputes}
        self._beta = beta
        self._is_pruned = is_pruned
        self._steps: tuple[MetricSums, StepCounts] | None = None

    @property
    def has_steps(self) -> bool:
        """Whether there were steps since the last line."""
        return self._steps is not None

    def add(self, result: StepResult, *, device: torch.device, seconds: float) -> None:
        """Adds a step."""
        metrics, counts = result.metrics, result.counts
        self.num_flops = counts.flops(**self._num_parameters)
        self.numbers = {
            "loss": metrics.loss,
            **metrics.means(beta=self._beta),
            "pairs_per_second": metrics.num_pairs / seconds,
            "tokens_per_second": counts.executed_tokens / seconds,
            "peak_memory_gib": peak_memory_bytes(device) / 2**30,
        }
        if self._steps is not None:
            metrics, counts = self._steps[0] + metrics, self._steps[1] + counts
        self._steps = metrics, counts

    def line(
        self,
        grad_norm: float | None,
        *,
        max_grad_norm: float,
        earlier: Sequence[Mapping[str, float]],
    ) -> dict[str, float]:
        """The metrics of the steps since the last call, which had at least one.

        Args:
            grad_norm: of the latest step, before clipping.
            max_grad_norm: what it is clipped to; 0 for no clipping.
            earlier: the lines before, those of a run that is resumed included.
        """
        assert self._steps is not None
        metrics, counts = self._steps
        self._steps = None
        line = metrics.means(beta=self._beta)
        if counts.balance:
            line["load_balance"] = counts.balance / counts.num_steps
        if self._is_pruned:
            line.update(counts.means(**self.sizes))
        if grad_norm is not None:
            norms = [line["grad_norm"] for line in earlier if "clipped_fraction" in line]
            clipped = [norm > max_grad_norm > 0 for norm in (*norms, grad_norm)]
            line["clipped_fraction"] = sum(clipped) / len(clipped)
        names = ("pairs_per_second", "tokens_per_second", "peak_memory_gib")
        return {**line, **{name: self.numbers[name] for name in names}}


class StopSignal(TrainerCallback):
    """On SIGTERM finishes the step, saves a checkpoint and ends training, on all ranks together.

    A scheduler that takes a machine away sends it; the next start goes on with
    ``resume_from_checkpoint: auto``.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Takes the ranks, which must agree on the step: signals reach them at other moments."""
        self.was_received = False
        self._is_pending = False
        self._ranks, self._device = ranks, device
        self._previous: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Listens, where that is possible: in a process's main thread."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._receive)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops all ranks if any has received the signal."""
        is_pending = self._is_pending
        if self._ranks.world_size > 1:
            is_pending = bool(self._ranks.sum(torch.tensor(float(is_pending), device=self._device)))
        if is_pending:
            self.was_received = True
            control.should_save = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Listens no more."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _receive(self, *_args: Any) -> None:
        self._is_pending = True


class PhaseNames(TrainerCallback):
    """Names what ranks do together, for the message of a collective that takes too long."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step."""
        begin_phase(f"step {state.global_step + 1}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What follows on it."""
        if control.should_evaluate:
            begin_phase(f"the evaluation at step {state.global_step}")
        elif control.should_save:
            begin_phase(f"the checkpoint of step {state.global_step}")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What follows on an evaluation."""
        if control.should_save:
            begin_phase(f"the checkpoint of step {state.global_step}")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):  # a line cut by a kill
        return float("inf")


class ProgressBar(TrainerCallback):
    """A live bar with the latest step's numbers, and a line per logged step above it."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Takes a function that returns the latest step's numbers, by name."""
        self._read = read
        self._numbers = Text()
        self._progress = new_progress("training")
        self._task = self._progress.add_task("", total=None)
        self._live = Live(Group(self._progress, self._numbers), console=CONSOLE)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Shows the bar."""
        self._progress.reset(self._task, total=state.max_steps, completed=state.global_step)
        if CONSOLE.is_terminal:
            self._live.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Moves it."""
        self._progress.update(self._task, completed=state.global_step)
        self._numbers.plain = _format(self._read())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Says a line per logged step or evaluation, above the bar."""
        if not logs or not state.is_world_process_zero:
            return
        prefix = "eval_" if "eval_loss" in logs else ""
        if f"{prefix}loss" not in logs:
            return
        label = "evaluation" if prefix else "step"
        latest = {} if prefix else self._read()
        numbers = _format({**latest, **_without_prefix(logs, prefix)})
        text = f"{label} {state.global_step}/{state.max_steps}: {numbers}"
        CONSOLE.print(text, highlight=False, soft_wrap=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leaves the finished bar on the screen."""
        self._live.stop()


def _without_prefix(logs: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in logs.items()}


def _format(numbers: Mapping[str, float]) -> str:
    shown = (
        ("loss", "loss", "{:.4f}"),
        ("rewards/accuracies", "accuracy", "{:.3f}"),
        ("rewards/margins", "margin", "{:+.4f}"),
        ("pairs_per_second", "pairs/s", "{:.2f}"),
        ("tokens_per_second", "tokens/s", "{:.0f}"),
        ("peak_memory_gib", "peak GiB", "{:.2f}"),
    )
    parts = [f"{label} {form.format(numbers[n])}" for n, label, form in shown if n in numbers]
    return "  ".join(parts)
