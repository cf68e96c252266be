"""How the command's process ends: alone as Python does, as a rank without Python's finalization."""

import os
import subprocess
import sys

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
