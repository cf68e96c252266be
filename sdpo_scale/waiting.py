"""What a rank is doing, and how it waits for other ranks outside of collectives.

A collective that one rank enters too late ends the run after ``ddp_timeout`` seconds. Work of a
single rank, such as tokenizing or writing a checkpoint, may take longer, so the others wait for it
here: they look into the store of the process group, which every launcher provides, for as long as
every rank that is missing shows signs of life. Those come from a thread of each process, whatever
its main thread is busy with.
"""

import atexit
import hashlib
import logging
import pickle
import threading
import time
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

__all__ = [
    "RankLostError",
    "begin_phase",
    "current_phase",
    "job_store",
    "once_per_folder",
    "wait_for_all",
]

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # on every rank: who waits reports, and that may be any of them

DEAD_AFTER_SECONDS = 300.0
"""Without a sign of life a rank counts as lost; threads can be held up by a long native call."""
SIGN_SECONDS = 5.0
REPORT_SECONDS = 30.0

_phase = "the other ranks to start"
_num_waits = 0
_signs: threading.Event | None = None


class RankLostError(RuntimeError):
    """A rank that others wait for has died or frozen."""

    def __init__(self, what: str, ranks: list[int], seconds: float) -> None:
        """Takes what was waited for, the ranks that are missing, and the silence in seconds."""
        super().__init__(what, ranks, seconds)
        self.what, self.ranks, self.seconds = what, ranks, seconds

    def __str__(self) -> str:
        """One sentence."""
        names = ", ".join(map(str, self.ranks))
        return (
            f"waited for {self.what}; rank {names} has given no sign of life for "
            f"{self.seconds:.0f} s"
        )


def begin_phase(what: str) -> None:
    """Says what ranks do together from now on, for the message of a wait that takes too long.

    Args:
        what: completes "waited for …", such as ``step 12``.
    """
    global _phase
    _phase = what


def current_phase() -> str:
    """What was begun last."""
    return _phase


def job_store() -> Store | None:
    """The store that all ranks share, for keys of this package; None where there is one process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # not public, and the only way to the store that the launcher's rendezvous has made
    return PrefixStore("sdpo_scale", _get_default_store())


def wait_for_all(what: str) -> None:
    """Returns when every rank has come here; not a collective, and without a time limit.

    Ranks must make the same calls in the same order.

    Args:
        what: what is waited for, for messages.

    Raises:
        RankLostError: a rank is not here and gives no sign of life any more.
    """
    global _num_waits
    store = job_store()
    if store is None:
        return
    _num_waits += 1
    key, everyone = f"wait/{_num_waits}", range(dist.get_world_size())
    store.set(f"{key}/{dist.get_rank()}", "")
    store.add(key, 1)

    def missing() -> list[int]:
        return [rank for rank in everyone if not store.check([f"{key}/{rank}"])]

    _wait(store, what, lambda: store.add(key, 0) == len(everyone), missing)


def once_per_folder(what: str, folder: Path, work: Callable[[], Any], *, request: str) -> Any:
    """The result of some work that leaves files in a folder, done by one rank for each folder.

    Ranks may share the folder, or each node has its own under the same name: the first rank works
    in its own, and among ranks that do not see it whoever comes first. No rank waits inside a
    collective.

    Args:
        what: the work, for messages.
        folder: where it leaves its files; made if absent.
        work: returns what pickles; if it raises, every rank that waits raises the same.
        request: what the work depends on: ranks with another one do not share.
    """
    global _num_waits
    store = job_store()
    if store is None:
        return work()
    _num_waits += 1
    key, rank = f"once/{_num_waits}", dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    begin_phase(what)
    suffix = hashlib.sha256(request.encode()).hexdigest()[:16]
    if rank == 0:
        token = uuid.uuid4().hex
        claim = folder / f".leader-{token}-{suffix}"
        is_leader = _claim(claim, rank)
        store.set(key, token)
    else:
        _wait(store, what, lambda: store.check([key]), lambda: [0])
        claim = folder / f".leader-{store.get(key).decode()}-{suffix}"
        is_leader = _claim(claim, rank)
    leader = rank if is_leader else _claimant(claim)
    if is_leader:
        _show_life(store)
        outcome: tuple[Any, Exception | None]
        try:
            outcome = work(), None
        except Exception as error:
            outcome = None, error
        store.set(f"{key}/{leader}", b64encode(pickle.dumps(outcome)).decode())
    else:
        _wait(store, what, lambda: store.check([f"{key}/{leader}"]), lambda: [leader])
        outcome = pickle.loads(b64decode(store.get(f"{key}/{leader}")))
    wait_for_all(what)
    if is_leader:
        claim.unlink(missing_ok=True)
    result, problem = outcome
    if problem is not None:
        raise problem
    return result


def _claim(path: Path, rank: int) -> bool:
    """Whether this rank is the first of those that see the folder; the file names that one."""
    try:
        with path.open("x") as file:
            file.write(str(rank))
    except FileExistsError:
        return False
    return True


def _claimant(path: Path) -> int:
    while not (text := path.read_text()):  # it appears before its contents do
        time.sleep(0.01)
    return int(text)


def _wait(
    store: Store, what: str, is_done: Callable[[], bool], missing: Callable[[], list[int]]
) -> None:
    _show_life(store)
    begin_phase(what)
    start = looked = time.monotonic()
    reported = start
    signs: dict[int, tuple[int, float]] = {}
    pause = 0.002
    while not is_done():
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
        now = time.monotonic()
        if now - looked < SIGN_SECONDS:
            continue
        looked, absent = now, missing()
        for rank in absent:
            count = store.add(f"alive/{rank}", 0)
            if rank not in signs or signs[rank][0] != count:
                signs[rank] = count, now
        silence = {rank: now - signs[rank][1] for rank in absent}
        lost = [rank for rank in absent if silence[rank] > DEAD_AFTER_SECONDS]
        if lost:
            raise RankLostError(what, lost, silence[lost[0]])
        if now - reported > REPORT_SECONDS and absent and dist.get_rank() == _speaker(absent):
            reported = now
            names = ", ".join(map(str, absent[:8])) + (" …" if len(absent) > 8 else "")
            logger.info("waiting for %s: %.0f s so far, rank %s at it", what, now - start, names)


def _speaker(absent: list[int]) -> int | None:
    """The first rank that waits."""
    return next((r for r in range(dist.get_world_size()) if r not in absent), None)


def _show_life(store: Store) -> None:
    """Starts the thread that counts up for this rank in the store, if it is not running."""
    global _signs
    if _signs is not None:
        return
    _signs = ended = threading.Event()
    # a connection of its own: the main thread's may be held by a call that blocks
    shared: Any = store  # whose type does not know clone, as of PyTorch 2.13
    own, key = shared.clone(), f"alive/{dist.get_rank()}"

    def run() -> None:
        while True:
            try:
                own.add(key, 1)
            except (RuntimeError, OSError):  # the store has gone, and with it the job
                return
            if ended.wait(SIGN_SECONDS):
                return

    own.set_timeout(timedelta(seconds=DEAD_AFTER_SECONDS))
    thread = threading.Thread(target=run, name="signs of life", daemon=True)
    thread.start()

    def end() -> None:
        # a daemon thread within the store's C++ code would abort the process as Python finalizes
        ended.set()
        thread.join(timeout=SIGN_SECONDS)

    atexit.register(end)
