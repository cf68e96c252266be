"""How the command's process ends: alone as Python does, as a rank without Python's finalization."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import atexit, os, sys, threading, time
import sdpo_scale.__main__ as command

class AtFinalization:
    def __del__(self, write=os.write):
        write(2, b"finalized")

def main():
    sys.kept = AtFinalization()  # which only Python's finalization lets go
    atexit.register(print, "exit handler")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    print("result")
    {ending}

command.main = main
command.run()
"""


def run(ending: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    return subprocess.run(
        [sys.executable, "-c", COMMAND.format(ending=ending)],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("code", [0, 1, 2, 130, 143])
def test_a_rank_ends_with_its_code_and_all_output_and_without_finalization(code: int):
    done = run(f"return {code}", WORLD_SIZE="2")
    assert done.returncode == code
    assert done.stdout.splitlines() == ["result", "thread", "exit handler"]
    assert done.stderr == ""


@pytest.mark.parametrize("code", [0, 2])
def test_a_process_alone_is_finalized(code: int):
    done = run(f"return {code}")
    assert done.returncode == code
    assert done.stdout.splitlines() == ["result", "thread", "exit handler"]
    assert done.stderr == "finalized"


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [("sys.exit(2)", 2, ""), ("raise RuntimeError('why')", 1, "RuntimeError: why")],
)
def test_what_ends_a_rank_otherwise_is_left_to_python(ending: str, code: int, said: str):
    done = run(ending, WORLD_SIZE="2")
    assert done.returncode == code
    assert said in done.stderr


LATE_COLLECTIVE = """
import os, sys, threading, time
import torch
import torch.distributed as dist
import sdpo_scale.__main__ as command

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
is_freed = threading.Event()

class Sleeps:
    def __init__(self, seconds):
        self.seconds = seconds

    def __del__(self, begins=is_freed.set, sleep=time.sleep):
        begins()
        sleep(self.seconds)  # without Python's lock, which is asked for at the end

def reduce():
    tensor = torch.ones(3)
    if rank == 0:
        tensor.freed_slowly = Sleeps(0.5)
    return dist.all_reduce(tensor, async_op=True)

def main():
    if rank == 1:
        time.sleep(1)  # the other has let go of its tensor by now: gloo's thread frees it
        reduce().wait()
        time.sleep(2)
        os._exit(0)
    reduce()
    assert is_freed.wait(30)
    sys.kept = dist.group.WORLD, Sleeps(1)  # Python's finalization takes a second
    return 0

command.main = main
command.run()
"""


@pytest.mark.distributed
def test_a_collective_that_ends_during_a_ranks_end_does_not_abort_it(tmp_path: Path):
    arguments = [sys.executable, "-c", LATE_COLLECTIVE]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), str(tmp_path / "rendezvous")],
            env={**os.environ, "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    _, said = ranks[0].communicate(timeout=60)
    ranks[1].communicate(timeout=60)
    assert (ranks[0].returncode, said) == (0, "")
