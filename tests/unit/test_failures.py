"""How errors of ranks are said, recorded and kept from being repeated."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from sdpo_scale import failures, waiting
from sdpo_scale.failures import check_variables, check_world, report
from sdpo_scale.waiting import begin_phase, wait_for_all
from tests.helpers.processes import run_processes

RESET = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7598"
LATE = "[/gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


@pytest.fixture(autouse=True)
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Signals that would have been sent; the handler of SIGTERM is put back afterwards."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(failures.os, "kill", lambda *arguments: sent.append(arguments))
    monkeypatch.setattr(failures.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(waiting, "_phase", "start")
    monkeypatch.setattr(failures, "_CAUSE_SECONDS", 2.0)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    yield sent
    signal.signal(signal.SIGTERM, handler)


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int, **variables: str) -> None:
    named = {"WORLD_SIZE": "16", "RANK": str(rank), "LOCAL_RANK": str(rank % 8), **variables}
    for name, value in named.items():
        monkeypatch.setenv(name, value)


def test_LCH_01_another_number_of_ranks_than_was_meant_is_refused(monkeypatch: pytest.MonkeyPatch):
    check_world(1)
    check_world(None)
    with pytest.raises(ValueError, match=r"meant to have 16 ranks .* started as one of 1:"):
        check_world(16)
    monkeypatch.setenv("WORLD_SIZE", "16")
    check_world(16)
    monkeypatch.setenv("SLURM_NNODES", "2")
    check_world(None)


def test_LCH_01_a_world_of_one_on_a_job_of_two_nodes_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_NNODES", "2")
    with pytest.raises(ValueError, match=r"the SLURM job has 2 nodes, but .* one of 1 ranks"):
        check_world(None)
    check_world(1)  # said to be meant


def test_LCH_03_a_variable_that_did_not_arrive_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HOME", "/data/hf")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    check_variables(None)
    check_variables("HF_HOME")
    with pytest.raises(ValueError, match=r"^NCCL_SOCKET_IFNAME was set where the job was launched"):
        check_variables("HF_HOME,NCCL_SOCKET_IFNAME")


def test_alone_an_error_is_a_sentence(capsys: pytest.CaptureFixture[str], killed: list):
    report(ValueError("beta must be positive, got -1"), is_users=True)
    assert capsys.readouterr().err == "error: beta must be positive, got -1\n"
    assert killed == []


def test_before_ranks_know_each_other_one_of_each_node_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for rank in (3, 0, 1, 2):
        on_rank(monkeypatch, rank)
        report(ValueError("no such file"), is_users=True)
    assert capsys.readouterr().err == "error on rank 3: no such file\n"
    on_rank(monkeypatch, 1, TORCHELASTIC_RESTART_COUNT="1")
    report(ValueError("no such file"), is_users=True)
    assert capsys.readouterr().err == "error on rank 1: no such file\n"


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [(ValueError("beta"), True), (FileNotFoundError("c.yaml"), True), (OSError("I/O"), False)],
)
def test_CKP_15_torchrun_is_asked_not_to_repeat_an_error_of_the_user(
    error: Exception, is_refused: bool, monkeypatch: pytest.MonkeyPatch, killed: list
):
    on_rank(monkeypatch, 3, TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="3")
    report(error, is_users=True)
    assert killed == ([(os.getppid(), signal.SIGTERM)] if is_refused else [])


def test_CKP_15_each_node_is_asked_once(monkeypatch: pytest.MonkeyPatch, killed: list):
    for rank in range(8):
        on_rank(monkeypatch, rank, TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="3")
        report(ValueError("beta"), is_users=True)
    assert len(killed) == 1


def test_a_full_disk_silences_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    on_rank(monkeypatch, 1)
    monkeypatch.setattr(failures.tempfile, "gettempdir", lambda: str(tmp_path / "nowhere"))
    report(ValueError("beta"), is_users=True)
    assert capsys.readouterr().err == "error on rank 1: beta\n"


def test_where_no_restart_would_follow_the_launcher_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, killed: list
):
    on_rank(monkeypatch, 3, TORCHELASTIC_RESTART_COUNT="3", TORCHELASTIC_MAX_RESTARTS="3")
    report(ValueError("beta"), is_users=True)
    report(RuntimeError("boom"), is_users=False)
    assert killed == []


def test_the_launchers_error_file_names_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    on_rank(monkeypatch, 0, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    report(RuntimeError("boom"), is_users=False)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == "RuntimeError: boom"
    assert int(message["extraInfo"]["timestamp"]) > 0


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError(LATE), "did not come within ddp_timeout while this one waited for step 12;"),
        (RuntimeError(RESET), "another rank has gone while this one waited for step 12 ("),
        (
            torch.distributed.DistNetworkError("port: 29500, code: -98, name: EADDRINUSE"),
            "port 29500 of ",
        ),
        (waiting.RankLostError("step 3's checkpoint", [4, 5], 300.0), "waited for step 3's check"),
    ],
    ids=["late", "gone", "port", "lost"],
)
def test_LCH_04_errors_between_ranks_are_sentences(
    error: Exception,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    on_rank(monkeypatch, 0, MASTER_PORT="29500")
    begin_phase("step 12")
    report(error, is_users=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_any_other_error_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    on_rank(monkeypatch, 0)
    try:
        raise RuntimeError("cosmic ray")
    except RuntimeError as error:
        report(error, is_users=False)
    err = capsys.readouterr().err
    assert err.startswith("error on rank 0: Traceback (most recent call last):")
    assert err.endswith("RuntimeError: cosmic ray\n")


def test_of_all_errors_the_cause_is_printed_and_once(tmp_path: Path):
    """Rank 2 fails; the others lose it, some before its error is known."""

    def fail(rank: int) -> str:
        said: list[str] = []
        failures._print = said.append
        wait_for_all("all ranks to be there")
        if rank == 2:
            report(ValueError("row 7 is empty"), is_users=True)
        else:
            report(RuntimeError(RESET), is_users=False)
        return "\n".join(said)

    results = run_processes(3, fail, tmp_path)
    assert results == ["", "", "error on rank 2: row 7 is empty"]


def test_the_same_error_on_all_ranks_is_printed_once(tmp_path: Path):
    def fail(rank: int) -> str:
        said: list[str] = []
        failures._print = said.append
        report(ValueError("no pair left"), is_users=True)
        wait_for_all("the others")
        return "\n".join(said)

    results = run_processes(3, fail, tmp_path)
    assert sorted(map(len, results))[:2] == [0, 0]
    assert "".join(results).endswith(": no pair left")
