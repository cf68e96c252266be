"""Ranks as forked processes with a gloo process group: for what happens between processes."""

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist


def run_processes(
    world_size: int, function: Callable[[int], Any], folder: Path, *, timeout: float = 60.0
) -> list[Any]:
    """What a function of the rank returns or raises on every rank; None where the process ended.

    `timeout` is that of collectives, in seconds.
    """
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(rank, world_size, function, folder, timeout, sender)
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results = []
    for receiver in pipes:
        try:
            results.append(receiver.recv() if receiver.poll(60) else TimeoutError("60 s"))
        except EOFError:
            results.append(None)
    for process in processes:
        process.kill()
        process.join()
    return results


def _run(
    rank: int,
    world_size: int,
    function: Callable[[int], Any],
    folder: Path,
    timeout: float,
    sender: Connection,
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        result = function(rank)
    except Exception as error:
        result = error
    sender.send(result)
    sender.close()
    os._exit(0)
