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

    PyTorch keeps the threads of a gloo group for as long as anything refers to it, a wrapped model
    say, which is longer than ``destroy_process_group``. A thread in C++ that asks for Python's lock
    during finalization is ended there, which aborts the process (-6) now and then, after everything
    was saved, and a launcher starts the job again. Python 3.14 lets such threads wait for ever
    (python/cpython#87135): this can go when it is the oldest that is supported.
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
