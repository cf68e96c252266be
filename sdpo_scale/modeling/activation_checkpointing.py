"""Pruned activation checkpointing: recompute and differentiate only the rows that were kept.

Shape legend: T packed tokens, T' kept tokens, D model.

Flow of one pack
    1. ``begin``   a fresh selection, shared by all layers of the forward that follows
    2. forward     each decoder layer runs without gradient and stores its input [T, D], no more
    3. ``keep``    the caller, who has seen the log-probabilities, says which rows matter
    4. backward    layer by layer, from the last: the kept rows of the input and of the incoming
                   gradient are gathered, the layer runs again on T' rows with the segments that
                   they form and is differentiated, its input's gradient is scattered to T rows

It is exact if the loss has no gradient in rows that were not kept: prompt and prefixes of responses
are closed under causal attention, so the loss depends on no row that was dropped, and the gradient
that arrives there is exactly 0 in every layer. The caller guarantees it, by weights of 0 beyond the
kept prefixes; a check would cost a synchronization per layer. Work per token: forward 1 + kept
fraction × 3, against 4 for ordinary checkpointing.

Memory of one layer's backward, in order
    1. its input and the incoming gradient [T, D], which ordinary checkpointing has as well
    2. the kept rows of both [T', D]; not where all rows are kept
    3. the layer's activations on T' rows: the peak, and what pruning saves
    4. activations are freed as they are differentiated
    5. the gradient of the input [T, D], zeros where rows were dropped; 1 to 3 are freed

How it differs from ``torch.utils.checkpoint``
    1. What is recomputed is decided after the forward, not before.
    2. The recomputation runs on fewer rows: every tensor argument with the token dimension is
       indexed, and attention gets the segments of the kept rows.
    3. No random state is stored or restored: dropout must be 0.
    4. Parameters get their gradients from a backward nested in the backward, as with
       ``use_reentrant=True``: ``loss.backward()`` works, ``torch.autograd.grad`` does not.
    5. A layer runs again to its end. Upstream stops at the last tensor that the backward needs,
       which saves one matrix product, here the MLP's last.
    6. An input without gradient (frozen embeddings) is no obstacle, as it is with
       ``use_reentrant=True``.

Sharding: the layer's ``forward`` is replaced, not its ``__call__``, so hooks that gather and free
sharded parameters stay outside of it and fire as often as with transformers' own checkpointing, and
parameters keep their names. One nested backward per layer gives each parameter one gradient, which
is what ZeRO-3 accepts and FSDP2 reduces. A selection has at least one row, so every rank runs the
same collectives whatever it kept.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sdpo_scale.modeling.attention import Segments, segments_of
from sdpo_scale.packing.layout import RowSelection

__all__ = ["PrunedRecompute", "RecomputedPack"]


class RecomputedPack:
    """What one pack's backward recomputes: written between its forward and its backward.

    Each pack has its own, held by the autograd graph of its forward, so the forwards of several
    packs may run before their backwards.
    """

    def __init__(self) -> None:
        """Use :meth:`PrunedRecompute.begin`."""
        self.num_recomputed_rows = 0
        """Rows that were recomputed, summed over layers."""
        self._selection: RowSelection | None = None
        self._on_device: tuple[Tensor, Segments] | None = None

    def keep(self, selection: RowSelection | None) -> None:
        """Says which rows the backward needs.

        Args:
            selection: rows of this pack outside of which the loss has no gradient; None for all.
        """
        self._selection, self._on_device = selection, None

    @property
    def keeps_all(self) -> bool:
        """Whether every row is recomputed: what holds unless :meth:`keep` says otherwise."""
        return self._selection is None

    def kept(self, segments: Segments) -> tuple[Tensor, Segments]:
        """Rows (int64 [T']) and segments of the selection, made once for all layers.

        Args:
            segments: those of the whole pack; their device and backend are taken over.
        """
        if self._on_device is None:
            assert self._selection is not None, "without a selection there is nothing to look up"
            device = segments.kv_index_K.device
            self._on_device = (
                self._selection.rows_T.to(device, non_blocking=True),
                segments_of(self._selection, backend=segments.backend, device=device),
            )
        return self._on_device


class PrunedRecompute:
    """Pruned activation checkpointing of a model's decoder layers; see the head of the module.

    For each pack:

        recompute.begin()
        logprobs_R = model(pack=layout).logprobs_R
        recompute.keep(select_rows(layout, kept))      # may be left out: all rows are kept
        (logprobs_R * weights_R).sum().backward()      # weights are 0 outside of what is kept
    """

    def __init__(self) -> None:
        """Use :meth:`bind`."""
        self._pack: RecomputedPack | None = None

    @classmethod
    def bind(cls, model: PreTrainedModel) -> "PrunedRecompute":
        """Replaces the forward of every decoder layer; binding again replaces the binding.

        Outside of a pack, and wherever gradients are off, the layers run as they did before, with
        transformers' own checkpointing if that is on; within a pack this one takes its place.

        Args:
            model: a model with the packed forward of ``bind_logprob_forward``, sharded or not yet.

        Raises:
            ValueError: the model has dropout, or no layers that transformers can checkpoint.
        """
        if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
            raise ValueError("the model has dropout: recomputed rows would differ; set it to 0")
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(f"{type(model).__name__} has no layers that can be checkpointed")
        recompute = cls()
        for layer in layers:
            # a bound method, not a closure over the layer: a deep copy then has its own
            layer.forward = types.MethodType(_pruned_forward(recompute), layer)
        return recompute

    def begin(self) -> RecomputedPack:
        """Starts a pack, whose forward follows; it lasts until ``keep`` or the next ``begin``.

        Returns:
            The pack: for its counts, or to call its own ``keep`` after another one was begun.
        """
        self._pack = RecomputedPack()
        return self._pack

    def keep(self, selection: RowSelection | None) -> None:
        """Ends the pack that was begun last and says what its backward needs; None for all rows."""
        assert self._pack is not None, "begin() comes before the forward"
        self._pack.keep(selection)
        self._pack = None

    @property
    def pack(self) -> RecomputedPack | None:
        """The pack that layers belong to if they run now."""
        return self._pack


def _pruned_forward(recompute: PrunedRecompute) -> Callable[..., Tensor]:
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The class is asked at each call: FSDP2 gives a layer a new one, and transformers'
        # checkpointing is the forward of the class that is outermost then.
        original = type(self).forward
        pack = recompute.pack
        if pack is None or not torch.is_grad_enabled():
            return original(self, hidden_states, *args, **kwargs)
        if not hidden_states.requires_grad:  # frozen embeddings; the layer's parameters are not
            hidden_states = hidden_states.detach().requires_grad_()
        # without transformers' checkpointing, which would recompute all rows first
        run = types.MethodType(inspect.unwrap(original), self)
        return _PrunedLayer.apply(hidden_states, run, pack, args, kwargs)

    return forward


class _PrunedLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_1TD: Tensor,
        run: Callable[..., Tensor],
        pack: RecomputedPack,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        device_type = hidden_1TD.device.type
        ctx.run, ctx.pack, ctx.args, ctx.kwargs = run, pack, args, kwargs
        # the backward is called outside of the forward's autocast
        ctx.autocast = {
            "device_type": device_type,
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        ctx.save_for_backward(hidden_1TD)
        return run(hidden_1TD, *args, **kwargs)  # within a Function gradients are off

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1TD: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_1TD,) = ctx.saved_tensors
        kept, kept_grad, args, kwargs = hidden_1TD.detach(), grad_1TD, ctx.args, ctx.kwargs
        rows = None
        if not ctx.pack.keeps_all:
            rows, segments = ctx.pack.kept(kwargs["segments"])
            kept, kept_grad = kept.index_select(1, rows), grad_1TD.index_select(1, rows)
            args, kwargs = _select((args, kwargs), rows, hidden_1TD.shape[1])
            kwargs["segments"] = segments
        ctx.pack.num_recomputed_rows += kept.shape[1]
        kept.requires_grad_()
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            output = ctx.run(kept, *args, **kwargs)
        torch.autograd.backward(output, kept_grad)
        assert kept.grad is not None, "a layer's output depends on its input"
        if rows is None:
            return kept.grad, None, None, None, None
        grad_input = torch.zeros_like(hidden_1TD).index_copy_(1, rows, kept.grad)
        return grad_input, None, None, None, None


def _select(value: Any, rows: Tensor, num_tokens: int) -> Any:
    """A copy of a layer's arguments in which tensors [1, T, ...] have the kept rows only."""
    if isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens):
        return value.index_select(1, rows)
    if isinstance(value, dict):
        return {name: _select(part, rows, num_tokens) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_select(part, rows, num_tokens) for part in value)
    return value
