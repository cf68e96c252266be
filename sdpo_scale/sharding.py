"""Everything that differs between one process, DDP, FSDP2 and ZeRO.

All of them average gradients over ranks, while a step's packs add up: losses are multiplied by the
number of ranks. What else differs:

    DDP      gradients are reduced in the last micro-batch of a step; forward and backward of the
             others run in ``no_sync``
    FSDP2    every micro-batch's gradients are reduce-scattered into shards and add up there: those
             of all layers at once, unsharded, do not fit where sharding is needed
    ZeRO     the engine is told whether a micro-batch is the step's last; it updates parameters
             within the backward of that one
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn

from sdpo_scale.record import Ranks

__all__ = ["Sharding"]

_DDP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


class Sharding:
    """The ranks of a run and how a step's gradients meet."""

    def __init__(self, accelerator: Accelerator) -> None:
        """Takes the accelerator that knows backend and ranks."""
        self._accelerator = accelerator
        self.ranks = Ranks(
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            sum=_sum_over_ranks if accelerator.num_processes > 1 else _unchanged,
        )

    @contextmanager
    def micro_batch(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """The context of one micro-batch's forward, and of its backward."""
        is_ddp = self._accelerator.distributed_type in _DDP
        state = self._accelerator.gradient_state
        state._set_sync_gradients(is_last)
        try:
            with self._accelerator.no_sync(model) if is_ddp and not is_last else nullcontext():
                yield
        finally:
            # outside of steps the optimizer is to work: its state is allocated by stepping, say
            state._set_sync_gradients(True)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss that is a part of the step's sum."""
        self._accelerator.backward(loss * self.ranks.world_size)

    def before_first_step(self, optimizer: Any, global_step: int) -> None:
        """Undoes the step that DeepSpeed takes on gradients of 0 to allocate optimizer state.

        Adam counts it, and the bias correction of its first real update would be that of the
        second: with β = (0.9, 0.999) the update would have 0.74 of its size (DeepSpeed 0.19,
        ``initialize_optimizer_states``). Moments are still 0, so only the count is wrong.
        """
        if global_step > 0 or self._accelerator.distributed_type != DistributedType.DEEPSPEED:
            return
        while hasattr(optimizer, "optimizer"):  # Accelerate's wrapper, the engine's, torch's
            optimizer = optimizer.optimizer
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].zero_()

    def export_whole(self) -> None:
        """From now on a saved model is whole: FSDP2's checkpoints may be sharded, an export not."""
        if self._accelerator.distributed_type == DistributedType.FSDP:
            self._accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")

    def check_same(self, fingerprints: Mapping[str, str]) -> None:
        """Compares what ranks must have in common, before anything is computed.

        Args:
            fingerprints: what → its digest or value on this rank.

        Raises:
            ValueError: on every rank, names what differs.
        """
        if self.ranks.world_size == 1:
            return
        everyone = gather_object([dict(fingerprints)])
        differing = [n for n, own in fingerprints.items() if any(o[n] != own for o in everyone)]
        if any(other != everyone[0] for other in everyone):
            raise ValueError(
                f"ranks were started with different {', '.join(differing) or 'inputs'}: each needs "
                "the same config and the same files"
            )

    def wait(self) -> None:
        """Returns when every rank has come here."""
        self._accelerator.wait_for_everyone()


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total
