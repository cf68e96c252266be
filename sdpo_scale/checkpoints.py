"""Checkpoints that are complete or absent.

Life of one, on every rank:

    1. all ranks write into ``<output_dir>/.saving/checkpoint-<step>``
    2. when each has finished, the first rank adds ``checkpoint.json``: step, ranks, the options a
       step depends on, and every file with its size
    3. it is renamed to ``<output_dir>/checkpoint-<step>``: before that it is not there
    4. only then are older ones deleted, as many as ``save_total_limit`` allows

A failed save leaves what was saved before untouched and says so. Where nodes do not share the
folder, each node's first process does the same with its own.
"""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from sdpo_scale.draws import PruningHistory
from sdpo_scale.record import Ranks

__all__ = ["CheckpointError", "Checkpoints", "restore_history", "saving_in"]

logger = logging.getLogger(__name__)

_MANIFEST, _HISTORY, _ASIDE = "checkpoint.json", "pruning_history.npz", ".saving"
_DECIDES_DATA = ("training pairs", "train_batch_size", "seed", "data_seed")
"""What the pairs of a step follow from: a run that differs in it cannot be the same run."""


class CheckpointError(OSError):
    """A checkpoint could not be written; what was saved before is untouched."""


class Checkpoints:
    """The checkpoints in a run's output folder."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: Ranks,
        keep: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Takes what all ranks have in common.

        Args:
            folder: the run's output folder.
            ranks: who writes together.
            keep: how many to keep, the newest ones; all if None.
            options: what a step depends on, as text, to compare with a resumed run's.
        """
        self._folder, self._ranks, self._keep = folder, ranks, keep
        self._options = dict(options or {})
        self._reported: set[Path] = set()

    def resolve(self, wanted: str | bool | None) -> Path | None:
        """The checkpoint to resume from, the same on every rank; None to start anew.

        Args:
            wanted: a folder, True for the latest complete one, ``auto`` for the latest if there is
                any.

        Raises:
            ValueError: there is none, it is damaged, or its run had other pairs in its steps.
        """
        if wanted in (None, False):
            return None
        path = self._latest() if wanted in (True, "auto") else Path(str(wanted))
        path = self._ranks.gather(path)[0]  # the first rank's view of the folder decides
        if path is None:
            if wanted == "auto":
                return None
            raise ValueError(
                f"resume_from_checkpoint is true, but {self._folder} holds no complete checkpoint; "
                "with auto the run starts anew in that case"
            )
        if not path.is_dir():
            raise ValueError(f"resume_from_checkpoint: there is no folder {path}")
        manifest = _read_manifest(path)
        if manifest is None:
            logger.warning(
                "%s has no %s: it cannot be told whether it is complete", path, _MANIFEST
            )
            return path
        damage = _damage(path, manifest)
        if damage is not None:
            raise ValueError(f"resume_from_checkpoint: {path} is damaged: {damage}")
        self._compare_options(path, manifest["options"])
        return path

    @contextmanager
    def writing(
        self, step: int, *, history: PruningHistory | None, protected: str | None = None
    ) -> Iterator[Path]:
        """All ranks write within; afterwards the checkpoint is complete, or absent.

        Args:
            step: optimizer steps done.
            history: what later draws depend on, if there are any.
            protected: a checkpoint that is kept whatever its age, the best one.

        Yields:
            The folder that stands for the output folder in the meantime.

        Raises:
            CheckpointError: on every rank, if any could not write.
        """
        aside = self._folder / _ASIDE
        if self._ranks.is_first_of_node:
            shutil.rmtree(aside, ignore_errors=True)
        self._check_room(step)
        problem: BaseException | None = None
        try:
            yield aside
            if self._ranks.rank == 0 and history is not None:
                _write_history(aside / f"checkpoint-{step}" / _HISTORY, history)
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            problem = error
        problems = self._ranks.gather(None if problem is None else _first_line(problem))
        if any(problems):
            if self._ranks.is_first_of_node:
                shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(self._failure(step, problems)) from problem
        if self._ranks.rank == 0:
            self._publish(step, aside)
        self._ranks.wait(f"the checkpoint of step {step} to be complete")
        if self._ranks.is_first_of_node and self._ranks.rank != 0:
            self._publish(step, aside)  # a folder of this node alone, or nothing is left to do
        if self._ranks.is_first_of_node:
            shutil.rmtree(aside, ignore_errors=True)
            self._delete_old(step, protected)
        self._ranks.wait(f"checkpoints older than step {step} to be deleted")

    def _check_room(self, step: int) -> None:
        """Refuses a save that cannot fit, before ranks start what they must finish together."""
        problem = None
        latest = self._latest() if self._ranks.is_first_of_node else None
        if latest is not None:
            needed = sum(path.stat().st_size for path in _files(latest))
            free = shutil.disk_usage(self._folder).free
            if free < needed:
                problem = f"{latest.name} has {needed / 2**30:.2f} GiB, which do not fit once more"
        problems = self._ranks.gather(problem)
        if any(problems):
            raise CheckpointError(self._failure(step, problems))

    def _publish(self, step: int, aside: Path) -> None:
        written, final = aside / f"checkpoint-{step}", self._folder / f"checkpoint-{step}"
        if not written.is_dir():
            return
        sizes = {str(f.relative_to(written)): f.stat().st_size for f in _files(written)}
        manifest = {
            "step": step,
            "saved_at": time.time(),
            "world_size": self._ranks.world_size,
            "options": self._options,
            "files": sizes,
        }
        (written / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        for path in _files(written):
            _sync(path)
        if final.is_dir():  # of a run that came here before and was resumed from an earlier step
            _remove(final)
        written.rename(final)
        _sync(self._folder)

    def _delete_old(self, step: int, protected: str | None) -> None:
        steps = _steps_in(self._folder)
        for other, path in steps.items():
            if other > step and path not in self._reported:
                self._reported.add(path)
                logger.warning(
                    "%s is of another run than the one that is at step %d now: it is neither "
                    "counted nor deleted",
                    path,
                    step,
                )
        if self._keep is None or self._keep <= 0:
            return
        own = [path for other, path in sorted(steps.items()) if other <= step]
        for path in own[: -self._keep]:
            if protected is None or path.name != Path(protected).name:
                _remove(path)

    def _latest(self) -> Path | None:
        """The complete checkpoint that was saved last: an older run's may have a later step."""
        complete = []
        for path in _steps_in(self._folder).values():
            manifest = _read_manifest(path)
            damage = f"it has no {_MANIFEST}" if manifest is None else _damage(path, manifest)
            if manifest is None or damage is not None:
                logger.warning("%s is not complete (%s) and is left out", path, damage)
            else:
                complete.append((manifest["saved_at"], path))
        return max(complete)[1] if complete else None

    def _compare_options(self, path: Path, saved: Mapping[str, str]) -> None:
        changed = {
            name: f"{saved[name]} → {now}"
            for name, now in self._options.items()
            if saved.get(name, now) != now
        }
        if "sharding" in changed:
            raise ValueError(
                f"resume_from_checkpoint: {path} was written under another kind of sharding than "
                f"this run's: {changed['sharding']}; resume under that of the checkpoint (any "
                "number of ranks), or start a new run from an exported model"
            )
        deciding = [name for name in _DECIDES_DATA if name in changed]
        if deciding:
            differences = ", ".join(f"{name} {changed[name]}" for name in deciding)
            raise ValueError(
                f"resume_from_checkpoint: the run of {path} had other pairs in its steps: "
                f"{differences}; set them back, or start a new run with model: {path}"
            )
        if changed:
            differences = ", ".join(f"{name} {change}" for name, change in changed.items())
            logger.warning("the resumed run differs from the one that was saved: %s", differences)

    def _failure(self, step: int, problems: list[str | None]) -> str:
        rank = next(rank for rank, problem in enumerate(problems) if problem)
        latest = self._latest()
        kept = f"the latest complete one is {latest}" if latest else "there is no earlier one"
        free = shutil.disk_usage(self._folder if self._folder.is_dir() else Path.cwd()).free
        return (
            f"the checkpoint of step {step} could not be written by rank {rank}: {problems[rank]} "
            f"({free / 2**30:.2f} GiB are free); what was saved before is untouched, {kept}, and "
            "resume_from_checkpoint: auto goes on from it"
        )


@contextmanager
def saving_in(aside: Path, args: TrainingArguments, state: TrainerState) -> Iterator[None]:
    """Within, ``Trainer`` takes another folder for its output folder.

    It also writes paths into its state, which are those of the real folder afterwards.
    """
    folder, pushes = args.output_dir, args.push_to_hub
    args.output_dir, args.push_to_hub = str(aside), False
    try:
        yield
    finally:
        args.output_dir, args.push_to_hub = folder, pushes
        if state.best_model_checkpoint is not None:
            best = Path(str(folder)) / Path(state.best_model_checkpoint).name
            state.best_model_checkpoint = str(best)
    if args.should_save:
        state.save_to_json(str(aside / f"checkpoint-{state.global_step}" / TRAINER_STATE_NAME))


def restore_history(checkpoint: Path, history: PruningHistory) -> None:
    """Brings a run's pruning history to the state of the checkpoint that it resumes from."""
    path = checkpoint / _HISTORY
    if path.is_file():
        with np.load(path) as arrays:
            history.load_state_dict(arrays)
    else:
        logger.warning(
            "%s is not there: pruning draws will differ from those of the run that was saved, and "
            "stay unbiased",
            path,
        )


def _write_history(path: Path, history: PruningHistory) -> None:
    arrays: dict[str, Any] = history.state_dict()
    np.savez(path, **arrays)


def _steps_in(folder: Path) -> dict[int, Path]:
    found = {}
    for path in folder.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return found


def _read_manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((path / _MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _damage(path: Path, manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with the files of a checkpoint, if anything."""
    for name, size in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _remove(checkpoint: Path) -> None:
    """Deletes a checkpoint; killed in between, what is left of it does not look complete."""
    (checkpoint / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
