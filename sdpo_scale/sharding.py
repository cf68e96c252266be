"""Everything that differs between one process, DDP, FSDP2 and ZeRO.

Where parameters are: under one process, DDP and ZeRO-1/2 each rank holds the whole model from the
start. Under FSDP2 and ZeRO-3 it is whole at no time and place but, under FSDP2, in the memory of
each node's first process while it is read: see :meth:`Sharding.shards_parameters`.

All of them average gradients over ranks, while a step's packs add up: losses are multiplied by the
number of ranks. What else differs:

    DDP      gradients are reduced in the last micro-batch of a step; forward and backward of the
             others run in ``no_sync``
    FSDP2    every micro-batch's gradients are reduce-scattered into shards and add up there, since
             those of all layers at once, unsharded, do not fit where sharding is needed; where they
             do, ``gradient_reduction: last`` is as under DDP
    ZeRO     the engine is told whether a micro-batch is the step's last; it updates parameters
             within the backward of that one
"""

import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sdpo_scale.modeling.loading import model_fingerprint
from sdpo_scale.record import Ranks
from sdpo_scale.waiting import current_phase, wait_for_all

__all__ = ["Sharding"]

logger = logging.getLogger(__name__)

_DDP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


class Sharding:
    """The ranks of a run and how a step's gradients meet."""

    def __init__(self, accelerator: Accelerator, *, reduction: str) -> None:
        """Takes the accelerator that knows backend and ranks, and ``micro_batch`` or ``last``.

        Raises:
            ValueError: ``last`` under ZeRO.
        """
        self._accelerator = accelerator
        reduces_last = {*_DDP, *([DistributedType.FSDP] if reduction == "last" else [])}
        self._reduces_last = accelerator.distributed_type in reduces_last
        self._is_converted = False
        self.ranks = Ranks(
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            is_first_of_node=accelerator.is_local_main_process,
            **(_COLLECTIVES if accelerator.num_processes > 1 else {}),
        )
        if reduction == "last" and self.name.startswith("ZeRO"):
            raise ValueError(
                "gradient_reduction 'last' is refused: ZeRO reduces gradients as they are made; "
                "leave it out, or use FSDP2"
            )

    @property
    def name(self) -> str:
        """What a checkpoint's format follows from: none (DDP as well), FSDP, ZeRO-1, -2 or -3."""
        if self._accelerator.distributed_type == DistributedType.DEEPSPEED:
            return f"ZeRO-{self._accelerator.state.deepspeed_plugin.zero_stage}"
        is_fsdp = self._accelerator.distributed_type == DistributedType.FSDP
        return "FSDP" if is_fsdp else "none"

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank holds but a part of the parameters: FSDP2 and ZeRO-3."""
        return self.name in ("FSDP", "ZeRO-3")

    def share_buffers(self, model: nn.Module) -> None:
        """Gives every rank the first one's buffers, where it alone has read the model."""
        if self.name != "FSDP" or self.ranks.world_size == 1:
            return
        if not self._accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
            logger.warning(
                "fsdp_cpu_ram_efficient_loading is off: each of a node's processes reads the whole "
                "model into the host's memory"
            )
            return
        for buffer in model.buffers():
            shared = buffer.to(self._accelerator.device)
            dist.broadcast(shared, src=0)
            buffer.copy_(shared)

    def sharded(self, model: nn.Module) -> nn.Module | None:
        """The module that gathers its shards as it runs; None until Accelerate has made it."""
        if self._accelerator.distributed_type == DistributedType.DEEPSPEED:
            engine = self._accelerator.deepspeed_engine_wrapped
            return None if engine is None else engine.engine
        return model if isinstance(model, FSDPModule) else None

    def fingerprint(self, model: PreTrainedModel, *, with_adapter: bool = True) -> str:
        """Digest of a model's contents, before it is trained; the same on every rank."""
        make = partial(model_fingerprint, model, with_adapter=with_adapter)
        if self._accelerator.distributed_type == DistributedType.FSDP:
            # only the first rank of each node has read the weights
            return str(broadcast_object_list([make() if self.ranks.rank == 0 else ""])[0])
        return make(gathered=_gathered if self.shards_parameters else None)

    def gather(self, tensors: Mapping[str, Tensor], *, keeps: bool) -> dict[str, Tensor]:
        """Whole copies on the host of tensors of the model, gathered one after the other.

        Args:
            tensors: name → tensor, the same names on every rank.
            keeps: whether this rank gets them; the others get nothing.
        """
        whole: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            with _gathered(tensor) if self.shards_parameters else nullcontext():
                full: Any = tensor.detach()
                if isinstance(full, DTensor):  # which may be offloaded to the host
                    on_device: Any = full.to(self._accelerator.device)
                    full = on_device.full_tensor()
                if keeps:
                    whole[name] = full.to("cpu", copy=True)
        return whole

    @contextmanager
    def micro_batch(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """The context of one micro-batch's forward, and of its backward."""
        waits = self._reduces_last and not is_last
        state = self._accelerator.gradient_state
        state._set_sync_gradients(is_last)
        try:
            with self._accelerator.no_sync(model) if waits else nullcontext():
                yield
        finally:
            # outside of steps the optimizer is to work: its state is allocated by stepping, say
            state._set_sync_gradients(True)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss that is a part of the step's sum."""
        self._accelerator.backward(loss * self.ranks.world_size)

    def before_first_step(self, optimizer: Any, global_step: int) -> None:
        """Warns of an optimizer that rounds updates away, and corrects one's count of them.

        Parameters in 16 bits have Adam's moments in 16 bits and no update below 1/256 of their size
        (bfloat16); DPO's learning rates are far below. DeepSpeed keeps float32 copies of its own.

        What is corrected is the number of updates that Adam has counted under DeepSpeed (0.19).
        To allocate optimizer state DeepSpeed takes a step on gradients of 0, and Adam counts it:
        the bias correction of its first real update would be that of the second, and with β = (0.9,
        0.999) the update would have 0.74 of its size (``initialize_optimizer_states``). Moments are
        still 0, so only the count is wrong. A checkpoint that was converted for another number of
        ranks gives all groups of parameters one and the same count, which each of them then
        advances (``load_hp_checkpoint_state_from_checkpoint_dir_stage3``).
        """
        is_deepspeed = self._accelerator.distributed_type == DistributedType.DEEPSPEED
        if not is_deepspeed:
            _warn_of_lost_updates(optimizer)
        if not is_deepspeed or (global_step > 0 and not self._is_converted):
            return
        while hasattr(optimizer, "optimizer"):  # Accelerate's wrapper, the engine's, torch's
            optimizer = optimizer.optimizer
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = torch.full_like(state["step"], global_step)

    def before_resume(self, checkpoint: Path) -> None:
        """Makes ZeRO's checkpoint fit this number of ranks: it is converted once, by the first.

        Checkpoints of the other kinds are read by any number of ranks as they are.
        """
        if self._accelerator.distributed_type != DistributedType.DEEPSPEED:
            return
        tag = (checkpoint / "latest").read_text("utf-8").strip()
        num_saved = len(list((checkpoint / tag).glob("*_optim_states.pt")))
        if num_saved == self.ranks.world_size:
            return
        universal = checkpoint / f"{tag}_universal"
        if self.ranks.is_first_of_node and not (checkpoint / "latest_universal").is_file():
            logger.info("%s: converting %d ranks' state for any number", checkpoint, num_saved)
            folders = ["--input_folder", str(checkpoint / tag), "--output_folder", str(universal)]
            command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders]
            command.append("--inject_missing_state")  # what only Megatron's checkpoints have
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"DeepSpeed could not convert {checkpoint}: {done.stderr}")
        self.ranks.wait(f"{checkpoint} to be converted")
        config = self._accelerator.state.deepspeed_plugin.deepspeed_config
        config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
        self._is_converted = True

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
        everyone = self.ranks.gather(dict(fingerprints))
        differing = [n for n, own in fingerprints.items() if any(o[n] != own for o in everyone)]
        if any(other != everyone[0] for other in everyone):
            raise ValueError(
                f"ranks were started with different {', '.join(differing) or 'inputs'}: each needs "
                "the same config and the same files"
            )


def _warn_of_lost_updates(optimizer: Any) -> None:
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    narrow = sorted(str(dtype) for dtype in dtypes & {torch.bfloat16, torch.float16})
    if narrow:
        logger.warning(
            "the trained parameters are %s, and so is the optimizer's state: updates at a learning "
            "rate of DPO's size round away; leave dtype out of model_init_kwargs (float32) and set "
            "bf16: true to compute in bfloat16",
            narrow[0].removeprefix("torch."),
        )


@contextmanager
def _gathered(parameter: Tensor) -> Iterator[None]:
    """A parameter that ZeRO-3 has partitioned is whole within; any other is as it is."""
    if not hasattr(parameter, "ds_id"):
        yield
        return
    import deepspeed  # where there is no ZeRO-3 it need not be installed

    with deepspeed.zero.GatheredParameters([parameter]):
        yield


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def _gather(value: Any) -> list[Any]:
    wait_for_all(current_phase())  # what is gathered may follow on long work of one rank
    return list(gather_object([value]))


_COLLECTIVES: dict[str, Any] = {"sum": _sum_over_ranks, "gather": _gather, "wait": wait_for_all}
