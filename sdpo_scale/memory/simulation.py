"""The peak of a micro-batch, from tensors that have shapes and no memory.

A model of the run's config is made of fake tensors, sharded as the run shards it, and taken through
a micro-batch by the code of the training step itself: packs, attention, chunked head, pruned
recomputation. A dispatch mode adds up the storages that live. Nothing is allocated and nothing
computed, so a 70B model on 64 ranks fits a laptop.

How it differs from ``torch.distributed._tools.fsdp2_mem_tracker``
    1. It follows storages, not modules, so that recomputation within a backward is no obstacle.
    2. It says one number; what it consists of follows from the config (``memory/footprint.py``).

On a GPU it does not see: fragmentation, the CUDA context, workspaces of kernels, buffers of NCCL.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import _find_final_norm
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.packing.layout import build_layout, select_rows

__all__ = [
    "Execution",
    "LiveBytes",
    "PackShape",
    "prepared_micro_batch",
    "simulate_peaks",
    "with_depth",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackShape:
    """The pairs of a micro-batch, by their lengths."""

    lengths: tuple[tuple[int, int, int], ...]
    """Tokens of prompt, chosen and rejected response of each pair."""
    kept: tuple[tuple[int, int], ...] | None = None
    """Response tokens of each pair that pruned recomputation keeps; None for all."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack."""
        return sum(map(sum, self.lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a micro-batch is executed."""

    num_shards: int = 1
    """Ranks that FSDP2 shards parameters over; 1 for none."""
    checkpointing: str = "pruned"
    """``off``, ``full`` (transformers' own) or ``pruned``."""
    parameter_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.bfloat16
    backend: str = "torch_varlen"
    """Of ``modeling.attention.BACKENDS``; the varlen kernels all keep the same tensors."""
    chunk_bytes: int | None = None
    """Size of a chunk of logits; the device's default if None."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations return, from birth to death.

    Attributes:
        live: bytes now.
        peak: the most since the mode was entered, or since :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> "LiveBytes":
        self._resize: Any = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage)
            return result

        # FSDP2 frees gathered parameters by it, outside of any operation
        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def ignore(self, tensor: Tensor) -> None:
        """Leaves out a tensor, which may be sharded, that was there before."""
        local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self._sizes[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()

    def restart(self) -> int:
        """The peak so far; from now on it is that of what follows."""
        peak, self.peak = self.peak, self.live
        return peak

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation and meets what it returns."""
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    weakref.finalize(storage, self._forget, storage._cdata)
                    self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.live += size - self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def with_depth(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """A copy of a config with the first ``depth`` of its layers."""
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = depth
    if getattr(shallow, "layer_types", None) is not None:
        shallow.layer_types = shallow.layer_types[:depth]
    return shallow


def simulate_peaks(
    config: PreTrainedConfig, pack: PackShape, execution: Execution, *, is_fake: bool = True
) -> tuple[int, ...]:
    """Most bytes that live in a micro-batch beyond parameters and their gradients.

    In three phases, in each of which the peak is a straight line in the number of layers: forward
    and head; backward of all layers but the first; backward of the first and of the embedding.

    Args:
        config: of a supported family, with at least three layers.
        pack: what the micro-batch consists of.
        execution: how it is executed.
        is_fake: False to allocate and compute everything, on the CPU: what tests compare with.

    Raises:
        ValueError: the model's operations depend on values, which fake tensors have not.
        RuntimeError: this process has ranks already, which sharding could not be simulated beside.
    """
    live = LiveBytes()
    peaks: list[int] = []
    with prepared_micro_batch(config, pack, execution, is_fake=is_fake) as (model, micro_batch):
        for parameter in model.parameters():  # gradients appear in a step's first micro-batch
            parameter.grad = torch.zeros_like(parameter)
            live.ignore(parameter)
            live.ignore(parameter.grad)
        layers = _layers(model)
        for module in (model.get_output_embeddings(), layers[1]):
            module.register_forward_pre_hook(
                lambda _module, args: _on_gradient(args[0], lambda: peaks.append(live.restart()))
            )
        try:
            with live:
                micro_batch()
        except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
            raise ValueError(
                f"models of family {config.model_type!r} cannot be simulated: what an operation "
                f"returns depends on values ({error})"
            ) from error
    return (*peaks, live.peak)


@contextmanager
def prepared_micro_batch(
    config: PreTrainedConfig, pack: PackShape, execution: Execution, *, is_fake: bool = True
) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A model as it is sharded in a run, and the call that takes it through a micro-batch.

    Raises:
        RuntimeError: this process has ranks already, which sharding could not be simulated beside.
    """
    layout = build_layout([_tokens(lengths) for lengths in pack.lengths])
    rows = None if pack.kept is None else select_rows(layout, pack.kept)
    mode: AbstractContextManager[Any] = nullcontext()
    if is_fake:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _ranks(execution.num_shards) as mesh, mode:
        with no_init_weights() if is_fake else nullcontext():
            model = AutoModelForCausalLM.from_config(config, dtype=execution.parameter_dtype)
        model.tie_weights()  # which is part of the initialization that was left out
        model.train()
        bind_logprob_forward(model, backend=execution.backend, chunk_bytes=execution.chunk_bytes)
        recompute = None
        if execution.checkpointing == "pruned":
            recompute = PrunedRecompute.bind(model)
        elif execution.checkpointing == "full":
            model.activation_checkpointing_enable()
        autocast = _shard(model, mesh, execution)

        def micro_batch() -> None:
            if recompute is not None:
                recompute.begin()
            with autocast:
                logprobs_R = model(pack=layout).logprobs_R
            if recompute is not None:
                recompute.keep(rows)
            weights_R = torch.ones_like(logprobs_R)
            (logprobs_R * weights_R).sum().backward()

        yield model, micro_batch


def _layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def _on_gradient(tensor: Tensor, call: Callable[[], None]) -> None:
    """Calls when the backward has reached a module's input; recomputation passes it by."""
    if tensor.grad_fn is not None:
        tensor.register_hook(lambda _gradient: call())


def _shard(
    model: Any, mesh: DeviceMesh | None, execution: Execution
) -> AbstractContextManager[Any]:
    """Shards a model, or gives the context in which one that is whole computes."""
    if mesh is None:
        is_mixed = execution.compute_dtype != execution.parameter_dtype
        return torch.autocast("cpu", execution.compute_dtype, enabled=is_mixed)
    policy = MixedPrecisionPolicy(param_dtype=execution.compute_dtype, reduce_dtype=torch.float32)
    # the units of accelerate 1.15, fsdp2_prepare_model
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tail = [m for m in (_find_final_norm(model),) if m is not None]
    if embedding.weight is head.weight:
        tail.append(embedding)
    else:
        fully_shard(embedding, mesh=mesh, mp_policy=policy)
    fully_shard([*tail, head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return nullcontext()


@contextmanager
def _ranks(num_ranks: int) -> Iterator[DeviceMesh | None]:
    """A process group of ranks that are not there; None for one."""
    if num_ranks == 1:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError("ranks can be simulated only in a process that has none")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        dist.destroy_process_group()


def _tokens(lengths: tuple[int, int, int]) -> Any:
    return tuple(np.zeros(length, np.int32) for length in lengths)
