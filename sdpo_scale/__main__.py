"""`python -m sdpo_scale`: the same as the console script `sdpo-scale`."""

import atexit
import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

from sdpo_scale.cli import main

__all__ = ["run"]


def run() -> NoReturn:
    """Runs the command and ends the process with its code."""
    codes: list[int] = []
    if "WORLD_SIZE" in os.environ:  # a launcher's
        atexit.register(_leave, codes)  # the first to be registered is the last to run
    codes.append(main())
    sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    """Ends a rank in the place of Python's finalization, which is all that is left to do.

    A gloo group's threads live for as long as anything refers to it, a wrapped model say, whatever
    ``destroy_process_group`` does. Such a thread lets go of a collective's tensor after those who
    wait have gone on (``ProcessGroupGloo::runLoop``), and for a tensor that Python has known it
    asks for Python's lock. Python before 3.14 ends a thread that does so during finalization, and
    C++ ends the process for it: "terminate called without an active exception", exit code -6, after
    everything was saved, and the launcher starts the job again. From Python 3.14 on the thread
    waits for ever (python/cpython#87135): with that as the oldest supported this can go.
    """
    if not codes:  # arguments that cannot be parsed, say: nothing was started
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more, or it was closed
            stream.flush()
    os._exit(codes[0])


if __name__ == "__main__":
    run()
