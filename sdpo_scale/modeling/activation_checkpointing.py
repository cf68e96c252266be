"""Pruned activation checkpointing: recompute and differentiate only the rows that were kept.

Shape legend: T packed tokens, T' kept tokens, D model.

Flow of one pack
    1. ``begin``   a fresh selection, shared by all layers of the forward that follows
    2. forward     each decoder layer runs without gradient and stores its input [T, D], no more
    3. ``keep``    the caller, who has seen the log-probabilities, says which rows matter
    4. backward    layer by layer: the kept rows of the input and of the incoming gradient are
                   gathered, the layer runs again on T' rows with the segments they form,
                   is differentiated, and the input's gradient is scattered back, 0 elsewhere

It is exact if the loss has no gradient in rows that were not kept: prompt and prefixes are closed
under causal attention, so no kept row depends on one that was dropped. The caller guarantees it
(weights of tokens beyond the kept prefixes are 0). Cost per token: forward 1 + kept fraction × 3,
against 4 for ordinary checkpointing.

Memory: T·D numbers per layer from forward to backward, as with ordinary checkpointing; in the
backward of one layer the activations of T' rows instead of T.

How it differs from ``torch.utils.checkpoint``:
    1. What is recomputed is decided after the forward, not before.
    2. The recomputation runs on fewer rows: every tensor argument with the token dimension is
       indexed, and attention gets the segments of the kept rows.
    3. No random state is kept: models run without dropout.
    4. Parameters' gradients come from a nested backward, one per layer.

Sharding: the forward of the layer is replaced, not its ``__call__``, so hooks that gather and free
sharded parameters stay outside and fire once per pass, as they do for transformers' own
checkpointing. At least one row is always kept, so every rank runs the same collectives.
"""

import inspect
import types
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sdpo_scale.modeling.attention import Segments, segments_of
from sdpo_scale.packing.layout import RowSelection

__all__ = ["PrunedRecompute"]


class _Pack:
    """The selection of one pack, filled in between its forward and its backward."""

    def __init__(self) -> None:
        self.selection: RowSelection | None = None
        self.num_recomputed_rows = 0
        self._segments: Segments | None = None

    def segments(self, like: Segments) -> Segments:
        """The segments of the kept rows; the same for every layer, so they are made once."""
        if self._segments is None:
            assert self.selection is not None
            device = like.kv_index_K.device
            self._segments = segments_of(self.selection, backend=like.backend, device=device)
        return self._segments


class PrunedRecompute:
    """Pruned activation checkpointing of a model's decoder layers; see the head of the module."""

    def __init__(self) -> None:
        """Use :meth:`bind`."""
        self._pack: _Pack | None = None

    @classmethod
    def bind(cls, model: PreTrainedModel) -> "PrunedRecompute":
        """Replaces the forward of every decoder layer; binding again replaces the binding.

        Outside of ``begin`` … ``keep``, and without gradients, the layers run as they did.

        Raises:
            ValueError: the model has no layers of the kind that transformers checkpoints.
        """
        recompute = cls()
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(f"{type(model).__name__} has no layers that can be checkpointed")
        for layer in layers:
            # from the class: under transformers' checkpointing wrapper, under an earlier binding
            original = types.MethodType(type(layer).forward, layer)
            plain = types.MethodType(inspect.unwrap(type(layer).forward), layer)
            layer.forward = _pruned_forward(recompute, original, plain)
        return recompute

    def begin(self) -> None:
        """Starts a pack: its forward follows."""
        self._pack = _Pack()

    def keep(self, selection: RowSelection | None) -> None:
        """Says what the backward of the pack that was begun last needs; None keeps all rows."""
        assert self._pack is not None, "begin() comes before the forward"
        self._pack.selection = selection
        self._pack = None

    @property
    def pack(self) -> _Pack | None:
        """The pack whose forward is running, if any."""
        return self._pack


def _pruned_forward(recompute: PrunedRecompute, original: Any, plain: Any) -> Any:
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        pack = recompute.pack
        if pack is None or not torch.is_grad_enabled():
            return original(hidden_states, *args, **kwargs)
        if not hidden_states.requires_grad:  # frozen embeddings: the layers' own parameters are not
            hidden_states = hidden_states.detach().requires_grad_()
        return _PrunedCheckpoint.apply(hidden_states, plain, pack, args, kwargs)

    return forward


class _PrunedCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_1TD: Tensor, run: Any, pack: _Pack, args: Any, kwargs: Any
    ) -> Tensor:
        device_type = hidden_1TD.device.type
        ctx.run, ctx.pack, ctx.args, ctx.kwargs = run, pack, args, kwargs
        ctx.autocast = {
            "device_type": device_type,
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
        }
        ctx.save_for_backward(hidden_1TD)
        with torch.no_grad():
            output: Tensor = run(hidden_1TD, *args, **kwargs)
        return output

    @staticmethod
    def backward(ctx: Any, grad_1TD: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_1TD,) = ctx.saved_tensors
        selection: RowSelection | None = ctx.pack.selection
        args, kwargs = ctx.args, ctx.kwargs
        kept, kept_grad = hidden_1TD.detach(), grad_1TD
        if selection is not None:
            rows = selection.rows_T.to(hidden_1TD.device, non_blocking=True)
            kept, kept_grad = kept.index_select(1, rows), grad_1TD.index_select(1, rows)
            args, kwargs = _select((args, kwargs), rows, hidden_1TD.shape[1], ctx.pack)
        ctx.pack.num_recomputed_rows += kept.shape[1]
        kept.requires_grad_()
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            output = ctx.run(kept, *args, **kwargs)
        torch.autograd.backward(output, kept_grad)
        grad_input = kept.grad
        assert grad_input is not None
        if selection is not None:
            grad_input = torch.zeros_like(hidden_1TD).index_copy_(1, rows, grad_input)
        return grad_input, None, None, None, None


def _select(value: Any, rows: Tensor, num_tokens: int, pack: _Pack) -> Any:
    """A layer's arguments for the kept rows only."""
    if isinstance(value, Segments):
        return pack.segments(value)
    if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == (1, num_tokens):
        return value.index_select(1, rows)
    if isinstance(value, dict):
        return {k: _select(v, rows, num_tokens, pack) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_select(v, rows, num_tokens, pack) for v in value)
    return value
