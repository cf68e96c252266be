"""Checkpoints are complete or absent; the right ones are kept, and the right one is resumed."""

import errno
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainerState

from sdpo_scale.checkpoints import CheckpointError, Checkpoints, restore_history, saving_in
from sdpo_scale.draws import Observations, PruningHistory
from sdpo_scale.record import Ranks
from tests.helpers.threads import run_ranks

OPTIONS = {"training pairs": "abc", "seed": "1", "learning_rate": "1e-6", "sharding": "none"}


def save(
    folder: Path,
    step: int,
    *,
    error: Exception | None = None,
    ranks: Ranks | None = None,
    **kw: Any,
) -> None:
    ranks = ranks or Ranks()
    checkpoints = Checkpoints(folder, ranks=ranks, **{"options": OPTIONS, **kw})
    with checkpoints.writing(step, history=None) as aside:
        name = f"shard-{ranks.rank}.bin" if ranks.world_size > 1 else "model.bin"
        write(aside / f"checkpoint-{step}" / name, b"parameters")
        if error is not None:
            raise error


def write(path: Path, contents: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)


def resolve(folder: Path, wanted: str | bool | None, **changes: str) -> Path | None:
    options = {**OPTIONS, **changes}
    return Checkpoints(folder, ranks=Ranks(), options=options).resolve(wanted)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_is_not_there_before_it_is_complete(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, ranks=Ranks(), options=OPTIONS)
    with checkpoints.writing(3, history=None) as aside:
        write(aside / "checkpoint-3" / "model.bin", b"half")
        assert resolve(tmp_path, "auto") is None
        write(aside / "checkpoint-3" / "model.bin", b"whole")
    assert names(tmp_path) == {"checkpoint-3"}
    assert resolve(tmp_path, "auto") == tmp_path / "checkpoint-3"


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path):
    write(tmp_path / ".saving" / "checkpoint-2" / "model.bin", b"ha")
    assert resolve(tmp_path, "auto") is None
    save(tmp_path, 3)
    assert names(tmp_path) == {"checkpoint-3"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), RuntimeError("torch")])
def test_a_failed_save_keeps_what_was_saved_before_and_says_so(error: Exception, tmp_path: Path):
    save(tmp_path, 3, keep=1)
    with pytest.raises(CheckpointError, match=r"step 6 could not be .*checkpoint-3") as caught:
        save(tmp_path, 6, keep=1, error=error)
    assert str(error) in str(caught.value)
    assert names(tmp_path) == {"checkpoint-3"}


def test_a_save_that_cannot_fit_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path, 3)
    usage = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="do not fit once more"):
        save(tmp_path, 6)
    assert names(tmp_path) == {"checkpoint-3"}


def test_CKP_03_the_newest_of_this_run_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    now = time.time()
    for step, age in [(200, 50), (400, 40), (600, 5), (800, 5), (5000, 90_000)]:
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        os.utime(path, (now - age, now - age))
    (tmp_path / "checkpoint-900.tmp").mkdir()
    save(tmp_path, 1000, keep=2)
    left = {"checkpoint-800", "checkpoint-1000", "checkpoint-5000", "checkpoint-900.tmp"}
    assert names(tmp_path) == left
    assert "checkpoint-5000 is of another run" in caplog.text


def test_the_best_checkpoint_is_kept_whatever_its_age(tmp_path: Path):
    for step in (1, 2):
        save(tmp_path, step)
    checkpoints = Checkpoints(tmp_path, ranks=Ranks(), keep=1, options=OPTIONS)
    best = str(tmp_path / "checkpoint-1")
    with checkpoints.writing(3, history=None, protected=best) as aside:
        write(aside / "checkpoint-3" / "model.bin", b"parameters")
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-3"}


def test_the_checkpoint_saved_last_is_resumed_not_an_older_run_with_a_later_step(tmp_path: Path):
    save(tmp_path, 900)
    save(tmp_path, 100)
    assert resolve(tmp_path, True) == tmp_path / "checkpoint-100"


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path):
    save(tmp_path, 4)
    write(tmp_path / "checkpoint-4" / "other.bin", b"of the old one")
    save(tmp_path, 4)
    assert names(tmp_path / "checkpoint-4") == {"model.bin", "checkpoint.json"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "model.bin").write_bytes(b"para"), "4 bytes instead of 10"),
        (lambda path: (path / "model.bin").unlink(), "model.bin is missing"),
        (lambda path: (path / "checkpoint.json").write_text("{"), "checkpoint.json"),
    ],
    ids=["cut", "missing", "manifest"],
)
def test_a_damaged_checkpoint_is_left_out_with_the_reason(
    damage: Any, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save(tmp_path, 3)
    save(tmp_path, 6)
    damage(tmp_path / "checkpoint-6")
    assert resolve(tmp_path, "auto") == tmp_path / "checkpoint-3"
    assert message in caplog.text


def test_a_damaged_checkpoint_asked_for_by_name_is_refused(tmp_path: Path):
    save(tmp_path, 3)
    (tmp_path / "checkpoint-3" / "model.bin").write_bytes(b"para")
    with pytest.raises(ValueError, match=r"damaged: model\.bin has 4 bytes instead of 10"):
        resolve(tmp_path, str(tmp_path / "checkpoint-3"))


def test_a_checkpoint_of_another_program_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "checkpoint-3"
    path.mkdir()
    assert resolve(tmp_path, str(path)) == path
    assert "cannot be told whether it is complete" in caplog.text


@pytest.mark.parametrize("wanted", [None, False, "auto"])
def test_without_a_checkpoint_a_run_starts_anew(wanted: Any, tmp_path: Path):
    assert resolve(tmp_path / "output", wanted) is None


@pytest.mark.parametrize("wanted", [True, "nowhere"])
def test_a_checkpoint_that_is_not_there_is_refused(wanted: Any, tmp_path: Path):
    with pytest.raises(ValueError, match=r"no complete checkpoint|no folder nowhere"):
        resolve(tmp_path, wanted)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("training pairs", "had other pairs in its steps: training pairs abc → other"),
        ("seed", "had other pairs in its steps: seed 1 → other"),
        ("sharding", "another kind of sharding than this run's: none → other"),
    ],
)
def test_CKP_15_a_run_that_cannot_be_the_same_is_refused(name: str, message: str, tmp_path: Path):
    save(tmp_path, 3)
    with pytest.raises(ValueError, match=message):
        resolve(tmp_path, "auto", **{name: "other"})


def test_CKP_15_a_changed_option_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save(tmp_path, 3)
    assert resolve(tmp_path, "auto", learning_rate="2e-6") is not None
    assert "learning_rate 1e-6 → 2e-6" in caplog.text


@pytest.mark.parametrize("shares_folder", [True, False], ids=["one folder", "a folder per node"])
def test_CKP_09_nodes_write_and_delete_without_racing(shares_folder: bool, tmp_path: Path):
    """Four ranks; on one folder as one node of four, or as nodes of one rank with their own."""

    def run(ranks: Ranks) -> None:
        folder = tmp_path if shares_folder else tmp_path / str(ranks.rank)
        checkpoints = Checkpoints(folder, ranks=ranks, keep=1, options=OPTIONS)
        for step in range(1, 21):
            with checkpoints.writing(step, history=None) as aside:
                write(aside / f"checkpoint-{step}" / f"shard-{ranks.rank}.bin", b"shard")

    run_ranks(4, run)
    folders = [tmp_path] if shares_folder else [tmp_path / str(rank) for rank in range(4)]
    for folder in folders:
        assert names(folder) == {"checkpoint-20"}
        manifest = json.loads((folder / "checkpoint-20" / "checkpoint.json").read_text())
        assert len(manifest["files"]) == (4 if shares_folder else 1)
        assert manifest["world_size"] == 4


def test_one_rank_that_cannot_write_is_reported_by_all(tmp_path: Path):
    def run(ranks: Ranks) -> str:
        error = OSError(errno.ENOSPC, "No space left on device") if ranks.rank == 2 else None
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, 1, ranks=ranks, error=error)
        return str(caught.value)

    for message in run_ranks(3, run):
        assert "step 1 could not be written by rank 2: OSError: [Errno 28] No space" in message
        assert "there is no earlier one" in message
    assert names(tmp_path) == set()


def test_the_pruning_history_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    history, values = PruningHistory(), np.array([1.0, 2.0])
    history.observe(Observations(pair_ids=(0, 1), importance_P=values, branches=(values, values)))
    with Checkpoints(tmp_path, ranks=Ranks()).writing(1, history=history) as aside:
        write(aside / "checkpoint-1" / "model.bin", b"parameters")
    found = PruningHistory()
    restore_history(tmp_path / "checkpoint-1", found)
    for name, array in history.state_dict().items():
        np.testing.assert_array_equal(found.state_dict()[name], array)
    with caplog.at_level(logging.WARNING):
        restore_history(tmp_path, found)
    assert "stay unbiased" in caplog.text


def test_paths_that_are_written_into_the_state_are_the_real_ones(tmp_path: Path):
    class Arguments:
        output_dir, push_to_hub, should_save = str(tmp_path / "output"), True, True

    arguments: Any = Arguments()
    state = TrainerState(global_step=4)
    aside = tmp_path / "output" / ".saving"
    with saving_in(aside, arguments, state):
        assert (arguments.output_dir, arguments.push_to_hub) == (str(aside), False)
        (aside / "checkpoint-4").mkdir(parents=True)
        state.best_model_checkpoint = str(aside / "checkpoint-4")
    assert (arguments.output_dir, arguments.push_to_hub) == (str(tmp_path / "output"), True)
    written = json.loads((aside / "checkpoint-4" / "trainer_state.json").read_text())
    assert written["best_model_checkpoint"] == str(tmp_path / "output" / "checkpoint-4")
