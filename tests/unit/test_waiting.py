"""Ranks that wait for each other outside of collectives."""

import logging
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from sdpo_scale import waiting
from sdpo_scale.waiting import RankLostError, once_per_folder, wait_for_all
from tests.helpers.processes import run_processes

COLLECTIVE_SECONDS = 1.0
SLOW_SECONDS = 2.5


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "SIGN_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "REPORT_SECONDS", 0.5)
    monkeypatch.setattr(waiting, "DEAD_AFTER_SECONDS", 2.0)
    monkeypatch.setattr(waiting, "_phase", "start")


def prepare(folder: Path, rank: int, *, seconds: float = 0.0, request: str = "") -> str:
    def work() -> str:
        time.sleep(seconds)
        with (folder / "prepared").open("a") as file:
            file.write(f"{rank}\n")
        return f"by {rank}"

    return once_per_folder("tokenization", folder, work, request=request)


def test_one_process_waits_for_nobody(tmp_path: Path):
    wait_for_all("nobody")
    assert prepare(tmp_path, 0) == "by 0"


def test_DST_03_work_of_one_rank_may_last_longer_than_a_collective(tmp_path: Path):
    def slow(rank: int) -> tuple[str, str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        waiting.logger.addHandler(handler)
        result = prepare(tmp_path, rank, seconds=SLOW_SECONDS)
        dist.barrier()
        return result, "\n".join(lines)

    (first, silence), (second, progress) = run_processes(
        2, slow, tmp_path, timeout=COLLECTIVE_SECONDS
    )
    assert (first, second) == ("by 0", "by 0")
    assert silence == ""
    assert "waiting for tokenization: 1 s so far, rank 0 at it" in progress


def test_a_collective_would_not_have_waited(tmp_path: Path):
    def slow(rank: int) -> None:
        if rank == 0:
            time.sleep(SLOW_SECONDS)
        dist.barrier()

    problems = run_processes(2, slow, tmp_path, timeout=COLLECTIVE_SECONDS)
    assert any(isinstance(problem, RuntimeError) for problem in problems)


def test_CKP_13_others_wait_for_a_slow_write(tmp_path: Path):
    def write(rank: int) -> str:
        wait_for_all("all ranks to be there")
        if rank == 0:
            time.sleep(SLOW_SECONDS)
            (tmp_path / "written").touch()
        wait_for_all("the checkpoint of step 3")
        return str((tmp_path / "written").exists())

    assert run_processes(2, write, tmp_path, timeout=COLLECTIVE_SECONDS) == ["True"] * 2


@pytest.mark.parametrize("num_folders", [1, 2])
def test_DST_04_pairs_are_prepared_once_for_each_cache_folder(num_folders: int, tmp_path: Path):
    """Two nodes of two ranks, with a folder for each node or a shared one."""

    def on_node(rank: int) -> str:
        return prepare(tmp_path / str(rank // 2 % num_folders), rank, seconds=0.3)

    results = run_processes(4, on_node, tmp_path)
    for node in range(num_folders):
        (leader,) = (tmp_path / str(node) / "prepared").read_text().split()
        own = [result for rank, result in enumerate(results) if rank // 2 % num_folders == node]
        assert own == [f"by {leader}"] * len(own)
        assert [path.name for path in (tmp_path / str(node)).iterdir()] == ["prepared"]
    assert results[0] == "by 0"


def test_ranks_that_want_other_pairs_do_not_share(tmp_path: Path):
    def own(rank: int) -> str:
        return prepare(tmp_path, rank, request=str(rank))

    assert run_processes(2, own, tmp_path) == ["by 0", "by 1"]


def test_an_error_of_the_rank_that_works_is_everyones(tmp_path: Path):
    def fail(rank: int) -> None:
        def work() -> None:
            raise ValueError(f"row 3 is empty, says {rank}")

        once_per_folder("tokenization", tmp_path, work, request="")

    problems = run_processes(2, fail, tmp_path)
    assert [str(problem) for problem in problems] == ["row 3 is empty, says 0"] * 2
    assert all(isinstance(problem, ValueError) for problem in problems)


def test_a_rank_that_dies_is_named_with_what_was_waited_for(tmp_path: Path):
    def wait(rank: int) -> None:
        wait_for_all("all ranks to be there")
        if rank == 1:
            os._exit(0)
        wait_for_all("the checkpoint of step 3")

    problem, nothing = run_processes(2, wait, tmp_path)
    assert nothing is None
    assert isinstance(problem, RankLostError)
    assert (problem.what, problem.ranks) == ("the checkpoint of step 3", [1])
    assert str(problem).startswith("waited for the checkpoint of step 3; rank 1 has given no sign")
