"""Runs of the command on ranks that are forked from one process, which has imported everything.

    python tests/helpers/forked_runs.py campaign.json

A run starts within a fraction of a second, so that a test can afford to kill many. The file is a
list of phases, executed in order:

    {"config": …, "world_size": 2, "backend": "fsdp2"}              one run to its end
    {"config": …, "world_size": 2, "backend": …, "kills": 25, "seed": 0}
                     runs that are killed with SIGKILL at random moments until there were so many;
                     what is complete is resumed (resume_from_checkpoint: auto in the config), a run
                     that ends first is moved aside and begun anew; the last one may end
    {…, "file_bytes": 100000}                                       no rank can write a larger file
    {…, "stop_at": 7}                                    saves after this step and ends as it should
    {…, "out_of_memory_at": 7}                        the last rank has no memory left in this step

Prints a JSON line for each: exit codes of the last run's ranks, and what the kills met.
"""

import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

_PATIENCE = 120
"""Seconds after which ranks that have not ended are a failure."""


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, which is later
    phases = json.loads(Path(sys.argv[1]).read_text())
    _import_everything()
    for number, phase in enumerate(phases):
        log = Path(sys.argv[1]).with_suffix(f".{number}.log")
        report = _kill_again_and_again(phase, log) if "kills" in phase else {}
        codes = _wait(_start(phase, log), _PATIENCE)
        report |= {"codes": codes, "log": log.read_text()[-20000:]}
        sys.stdout.write(json.dumps(report) + "\n")


def _import_everything() -> None:
    import deepspeed  # which accelerate imports wherever it is installed
    import torch.distributed.checkpoint
    import transformers.trainer

    import sdpo_scale.trainer
    import tests.helpers.train_on_ranks

    _ = deepspeed, torch, transformers, sdpo_scale, tests


def _start(phase: dict[str, Any], log: Path) -> list[int]:
    """Process ids of the ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [_fork(phase, rank, port, log) for rank in range(phase["world_size"])]


def _fork(phase: dict[str, Any], rank: int, port: int, log: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with log.open("a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        if "file_bytes" in phase:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (phase["file_bytes"],) * 2)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": phase["world_size"]}
        names |= {"LOCAL_WORLD_SIZE": phase["world_size"], "MASTER_PORT": port}
        names |= {"MASTER_ADDR": "127.0.0.1", "STOP_AT": phase.get("stop_at", 0)}
        names["OUT_OF_MEMORY_AT"] = phase.get("out_of_memory_at", 0)
        os.environ.update({name: str(value) for name, value in names.items()})
        from tests.helpers import train_on_ranks

        train_on_ranks.main([phase["backend"], phase["config"]])
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(children: list[int], seconds: float) -> list[int | None]:
    """Exit codes; minus the signal for who was killed, None for who did not end and is killed."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(children) and time.monotonic() < end:
        for child in set(children) - codes.keys():
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    _kill(set(children) - codes.keys())
    return [codes.get(child) for child in children]


def _kill(children: Iterable[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _kill_again_and_again(phase: dict[str, Any], log: Path) -> dict[str, Any]:
    draw = random.Random(phase["seed"])
    output = Path(yaml.safe_load(Path(phase["config"]).read_text())["output_dir"])
    start = time.monotonic()
    if None in _wait(_start(phase, log), _PATIENCE):  # how long one takes that is left alone
        raise TimeoutError(log.read_text()[-6000:])
    seconds = time.monotonic() - start
    num_runs, in_save = 1, 0
    shutil.move(output, output.with_name(f"{output.name}-{num_runs}"))
    for _ in range(phase["kills"]):
        while True:
            children = _start(phase, log)
            time.sleep(draw.uniform(0.2, 1.0) * seconds)
            if not all(
                os.waitid(os.P_PID, c, os.WEXITED | os.WNOHANG | os.WNOWAIT) for c in children
            ):
                break
            _wait(children, 1)
            num_runs += 1
            shutil.move(output, output.with_name(f"{output.name}-{num_runs}"))
        in_save += (output / ".saving").is_dir()
        _kill(children)
    return {"runs": num_runs, "kills_in_a_save": in_save}


if __name__ == "__main__":
    main()
