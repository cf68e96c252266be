"""How a job on several ranks ends with one error: the first, once, with what was waited for.

When a rank fails, the others fail too, since their connections break or their collectives never
end. The first error is printed by the rank that met it and recorded for the launcher's report; a
rank whose error only says that another has gone prints nothing where the cause is known.

Launchers restart a job without knowing why it ended. That helps when a machine was lost. An error
of the user would come back at every attempt, so the launcher is asked not to go on.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil

from sdpo_scale.waiting import RankLostError, current_phase, job_store

__all__ = ["check_variables", "check_world", "report"]

_GONE = (
    *("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe"),
    *("remote process exited", "recvvalue failed", "socket closed", "failed to recv"),
)
"""What PyTorch's backends and its store say when another rank has gone."""
_LATE = ("timed out waiting", "wait timeout", "timed out after", "collective operation timeout")
"""What they say when another rank has not come."""
_LASTING = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Of the system's errors, those that another attempt would meet again."""
_CAUSE_SECONDS = 5.0
"""How long the cause of a broken connection is waited for: it is printed within moments."""


def check_world(world_size: int | None) -> None:
    """Compares the ranks that were started with those that the job is meant to have.

    Args:
        world_size: ranks that the job is meant to have; None if that was not said.

    Raises:
        ValueError: the job would be another one than was meant, such as several jobs side by side.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size is not None and world_size != started:
        raise ValueError(
            f"the job is meant to have {world_size} ranks (--world-size), but this process was "
            f"started as one of {started}: check that every node was started with the same number "
            "of nodes and the same meeting address"
        )
    num_nodes = int(os.environ.get("SLURM_NNODES") or "1")
    if world_size is None and num_nodes > started:
        raise ValueError(
            f"the SLURM job has {num_nodes} nodes, but this process was started as one of "
            f"{started} ranks: each node would train alone; start it with launch/slurm.sbatch, or "
            f"say --world-size {started} if that is meant"
        )


def check_variables(names: str | None) -> None:
    """Checks that what was set where the job was launched is set here.

    Args:
        names: environment variables, separated by commas; None or empty to check nothing.

    Raises:
        ValueError: names those that are missing.
    """
    missing = [name for name in (names or "").split(",") if name and name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} was set where the job was launched and is not set on "
            f"{os.uname().nodename}: set it there (in the file that DS_ENV_FILE names, with the "
            "DeepSpeed launcher), or leave it out of --expect-variables"
        )


def report(error: BaseException, *, is_users: bool) -> None:
    """Prints an error, once in the job.

    Args:
        error: what ended this rank.
        is_users: whether a sentence says it all, and another attempt would end the same way.
    """
    text = str(error) if is_users else _text_of(error)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        _print(f"error: {text}")
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher may end this rank from now on
    is_final = is_users and (not isinstance(error, OSError) or isinstance(error, _LASTING))
    speaks_for_node = _is_first_of_node()
    is_first = speaks_for_node
    with suppress(RuntimeError):  # the store may have been the lost rank's
        is_first, is_final = _ask_store(is_final, speaks_for_node, waits=_says(error, _GONE))
    if is_first:
        _print(f"error on rank {os.environ.get('RANK', '0')}: {text}")
        _record(text.splitlines()[-1] if text.startswith("Traceback") else text)
    if is_final and speaks_for_node:
        _refuse_restart()


def _text_of(error: BaseException) -> str:
    """A sentence where the error is about other ranks, else the traceback."""
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, RankLostError | MemoryError):
        return str(error)
    if _says(error, ("eaddrinuse",)):
        return (
            f"port {os.environ.get('MASTER_PORT')} of {os.uname().nodename} is in use, by another "
            f"job perhaps: set MASTER_PORT to a free one, the same on every node ({first_line})"
        )
    if _says(error, _LATE):
        return (
            f"other ranks did not come within ddp_timeout while this one waited for "
            f"{current_phase()}; raise ddp_timeout if they are only slow ({first_line})"
        )
    if _says(error, _GONE):
        return f"another rank has gone while this one waited for {current_phase()} ({first_line})"
    return "".join(traceback.format_exception(error)).rstrip()


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in phrases)


def _ask_store(is_final: bool, speaks_for_node: bool, *, waits: bool) -> tuple[bool, bool]:
    """Whether this rank's error is the job's first, and whether another attempt is of no use.

    Args:
        is_final: the second answer as far as this rank knows.
        speaks_for_node: the first answer as long as ranks do not know each other.
        waits: whether this rank has only lost another, whose error is to be heard first.
    """
    store = job_store()
    if store is None:
        return speaks_for_node, is_final
    store.set_timeout(timedelta(seconds=_CAUSE_SECONDS))
    end = time.monotonic() + _CAUSE_SECONDS
    while waits and time.monotonic() < end and store.add("errors", 0) == 0:
        time.sleep(0.1)
    if is_final:
        store.set("final", "")
    is_first = store.add("errors", 1) == 1
    return is_first, store.check(["final"])


def _is_first_of_node() -> bool:
    """Whether no other rank that the same launcher has started here has failed before.

    The first that fails has to speak, whichever it is: the launcher then ends the others.
    """
    launcher = psutil.Process(os.getppid())
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"sdpo-scale-failed-{launcher.pid}-{launcher.create_time():.2f}-{attempt}"
    try:
        Path(tempfile.gettempdir(), name).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a full disk must not silence the error
        return True
    return True


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _record(text: str) -> None:
    """Writes the file that torchrun takes the root cause from."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def _refuse_restart() -> None:
    """Ends torchrun, where it would start the same again: it does not look at exit codes."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        os.kill(os.getppid(), signal.SIGTERM)
