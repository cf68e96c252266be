"""Hidden states → per-token log-probabilities, and the model forward that returns them.

Shape legend: T packed tokens, R response positions, C rows of one chunk, D model, V vocabulary.

Flow of one pack
    1. body     input_ids_T → hidden_TD, attention over the pack's segments
    2. gather   hidden_RD = hidden_TD[hidden_index_R]: only what predicts a response token
    3. head     in chunks of C rows: logits_CV → log-probability of the target, logits dropped
    4. backward chunk by chunk: logits_CV again, softmax minus one-hot, gradients of both inputs;
       where positions are pruned, only of the rows whose gradient is not 0

Memory: one chunk of float32 logits (C·V·4 bytes) at a time, in the forward and in the backward,
whatever the pack's length; plus the head's float32 gradient (V·D·4 bytes) while step 4 runs.

Sharding: body and head run inside the root module's ``forward``, and the head's loop inside the
head module's ``forward``, so hooks that gather sharded parameters fire as for any other model. The
head's weight and bias are inputs of one autograd function and their gradients are returned once per
backward, summed over chunks by hand: ZeRO-3 accepts one gradient per parameter and backward, FSDP2
reduces it once.
"""

import types
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from sdpo_scale.modeling.attention import ATTENTION_NAME, segments_of
from sdpo_scale.modeling.families import IDENTITY, LogitMap, logit_map_of, switch_off_noise
from sdpo_scale.packing.layout import PackLayout

__all__ = ["CHUNK_BYTES", "TokenLogprobs", "bind_logprob_forward", "chunked_logprobs"]

CHUNK_BYTES = {"cpu": 32 * 2**20, "cuda": 512 * 2**20}
"""Size of one chunk of float32 logits: on CPU it should stay near the caches, on a GPU fill it."""


class TokenLogprobs(NamedTuple):
    """What the bound forward returns for a pack."""

    logprobs_R: Tensor
    """float32 [R] (float64 for float64 models), log-probability of each response token, in nats."""
    statistics_R3: Tensor | None
    """float32 [R, 3] without gradient, or None: entropy in nats, mean logit, 1.0 if the target is
    the top."""
    norms_R: Tensor | None = None
    """float32 [R] (float64 for float64 models) without gradient, or None:
    ‖onehot(y_t) − softmax_t‖, the norm of a log-probability's gradient with respect to the
    logits."""
    square_sums_R: Tensor | None = None
    """The same: log Σ_v softmax_t(v)², the log-probability that two draws agree."""


class Asked(TypedDict, total=False):
    """What is computed besides log-probabilities."""

    with_statistics: bool
    """Entropy, mean logit and top-1 agreement of each row."""
    with_norms: bool
    """The norms that draws are made by; the backward then leaves out rows whose gradient is 0."""
    with_square_sums: bool
    """The logarithm of the sum of squared probabilities."""


def chunked_logprobs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    target_ids_R: Tensor,
    *,
    bias_V: Tensor | None = None,
    logit_map: LogitMap = IDENTITY,
    chunk_rows: int | None = None,
    **asked: Unpack[Asked],
) -> TokenLogprobs:
    """Log-softmax of a linear head at the targets, without the logits of all rows at once.

    Computes log softmax(f(h Wᵀ + b))[y] with the f of ``logit_map``. Products run in the autocast
    dtype if autocast is on, else in the dtype of ``hidden_RD``; f, the log-sum-exp and all sums
    over the vocabulary run in float32 (float64 for float64 inputs).

    Args:
        hidden_RD: float [R, D], differentiable.
        weight_VD: float [V, D], the head's weight, differentiable.
        target_ids_R: int64 [R].
        bias_V: float [V], the head's bias, differentiable.
        logit_map: what the model does to its head's output.
        chunk_rows: rows per chunk; by default what fits a fixed number of bytes.
        asked: what else to return.

    Returns:
        Log-probabilities and, if asked for, statistics, norms and square sums.
    """
    device_type = hidden_RD.device.type
    dtype = hidden_RD.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    if chunk_rows is None:
        chunk_rows = _rows(CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]), weight_VD)
    names = ("with_statistics", "with_norms", "with_square_sums")
    flags = tuple(bool(asked.get(name)) for name in names)
    settings = (dtype, logit_map, chunk_rows, flags)
    logprobs_R, *numbers = _ChunkedLogprobs.apply(
        hidden_RD, weight_VD, bias_V, target_ids_R, settings
    )
    given = [part if is_asked else None for part, is_asked in zip(numbers, flags, strict=True)]
    return TokenLogprobs(logprobs_R, *given)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_ids_R: Tensor,
        settings: tuple[torch.dtype, LogitMap, int, tuple[bool, ...]],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype, logit_map, chunk_rows, (with_statistics, with_norms, with_square_sums) = settings
        accumulated = torch.promote_types(dtype, torch.float32)
        num_rows = hidden_RD.shape[0]
        logprobs_R = hidden_RD.new_empty(num_rows, dtype=accumulated)
        lse_R = hidden_RD.new_empty(num_rows, dtype=accumulated)
        statistics_R3 = hidden_RD.new_empty(
            num_rows if with_statistics else 0, 3, dtype=torch.float32
        )
        norms_R = hidden_RD.new_empty(num_rows if with_norms else 0, dtype=accumulated)
        squares_R = hidden_RD.new_empty(num_rows if with_square_sums else 0, dtype=accumulated)
        with torch.autocast(hidden_RD.device.type, enabled=False):
            head = _Head.of(weight_VD, bias_V, logit_map, dtype)
            for rows in _chunks(num_rows, chunk_rows):
                logits_CV = head.logits(hidden_RD[rows].to(dtype))
                target_logits_C = logits_CV.gather(1, target_ids_R[rows, None])[:, 0]
                lse_R[rows] = torch.logsumexp(logits_CV, dim=-1)
                logprobs_R[rows] = target_logits_C - lse_R[rows]
                if with_statistics:
                    statistics_R3[rows] = _statistics(logits_CV, lse_R[rows], target_logits_C)
                if with_square_sums:
                    squares_R[rows] = torch.logsumexp(2 * logits_CV, dim=-1) - 2 * lse_R[rows]
                if with_norms:
                    norms_R[rows] = _norms(logits_CV, lse_R[rows], logprobs_R[rows])
        ctx.save_for_backward(hidden_RD, weight_VD, bias_V, target_ids_R, lse_R)
        ctx.settings = (dtype, logit_map, chunk_rows, with_norms)
        ctx.mark_non_differentiable(statistics_R3, norms_R, squares_R)
        return logprobs_R, statistics_R3, norms_R, squares_R

    @staticmethod
    def backward(
        ctx: Any, grad_R: Tensor, *_grads_of_numbers: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden_RD, weight_VD, bias_V, target_ids_R, lse_R = ctx.saved_tensors
        dtype, logit_map, chunk_rows, is_sparse = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        sums = lse_R.dtype  # of what is added up over chunks
        grad_hidden_RD = torch.zeros_like(hidden_RD) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=sums) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=sums) if needs_bias else None
        head = _Head.of(weight_VD, bias_V, logit_map, dtype)
        kept = grad_R.nonzero()[:, 0] if is_sparse else None
        for chunk in _chunks(len(grad_R if kept is None else kept), chunk_rows):
            rows = chunk if kept is None else kept[chunk]
            hidden_CD = hidden_RD[rows].to(dtype)
            grad_CV = head.product_gradients(
                hidden_CD, target_ids_R[rows], lse_R[rows], grad_R[rows]
            )
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(dim=0)
            grad_CV = grad_CV.to(dtype)
            if grad_hidden_RD is not None:
                grad_hidden_RD[rows] = (grad_CV @ head.weight_VD).to(hidden_RD.dtype)
            if grad_weight_VD is not None:
                if dtype == sums:
                    grad_weight_VD.addmm_(grad_CV.t(), hidden_CD)
                else:
                    grad_weight_VD += grad_CV.t() @ hidden_CD
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        if grad_bias_V is not None:
            grad_bias_V = grad_bias_V.to(bias_V.dtype)
        return grad_hidden_RD, grad_weight_VD, grad_bias_V, None, None


def _rows(chunk_bytes: int, weight_VD: Tensor) -> int:
    """Rows of float32 logits in so many bytes."""
    return max(1, chunk_bytes // (4 * weight_VD.shape[0]))


def _chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, start + chunk_rows) for start in range(0, num_rows, chunk_rows)]


class _Head(NamedTuple):
    """The head in the dtype of its products."""

    weight_VD: Tensor
    bias_V: Tensor | None
    logit_map: LogitMap

    @classmethod
    def of(
        cls, weight_VD: Tensor, bias_V: Tensor | None, logit_map: LogitMap, dtype: torch.dtype
    ) -> "_Head":
        return cls(weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype), logit_map)

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """f(h Wᵀ + b) of one chunk, in float32 or float64."""
        product_CV = F.linear(hidden_CD, self.weight_VD, self.bias_V)
        accumulated = torch.promote_types(product_CV.dtype, torch.float32)
        return self.logit_map(product_CV.to(accumulated))

    def product_gradients(
        self, hidden_CD: Tensor, target_ids_C: Tensor, lse_C: Tensor, grad_C: Tensor
    ) -> Tensor:
        """Gradient of h Wᵀ + b [C, V]: (onehot(y) − softmax) · f', times that of log p(y)."""
        logits_CV = self.logits(hidden_CD)
        slope_CV = self.logit_map.slope(logits_CV)
        grad_CV = logits_CV.sub_(lse_C[:, None]).exp_().neg_()
        grad_CV.scatter_add_(1, target_ids_C[:, None], torch.ones_like(grad_CV[:, :1]))
        grad_CV.mul_(grad_C[:, None])
        return grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)


def _norms(logits_CV: Tensor, lse_C: Tensor, logprobs_C: Tensor) -> Tensor:
    """‖onehot(y) − softmax‖ = √(1 − 2·p_y + Σ_v p_v²); overwrites the logits."""
    squares_C = logits_CV.sub_(lse_C[:, None]).mul_(2).exp_().sum(dim=-1)
    return (1 - 2 * logprobs_C.exp() + squares_C).clamp_min(0).sqrt()


def _statistics(logits_CV: Tensor, lse_C: Tensor, target_logits_C: Tensor) -> Tensor:
    expected_logit_C = (torch.exp(logits_CV - lse_C[:, None]) * logits_CV).sum(dim=-1)
    is_top_C = target_logits_C >= logits_CV.amax(dim=-1)
    columns = [lse_C - expected_logit_C, logits_CV.mean(dim=-1), is_top_C]
    return torch.stack([column.float() for column in columns], dim=1)


def bind_logprob_forward(
    model: PreTrainedModel, *, backend: str, chunk_bytes: int | None = None
) -> None:
    """Gives a model a second forward: ``model(pack=layout)`` returns :class:`TokenLogprobs`.

    Called in any other way the model computes what it did before, with the attention implementation
    it was loaded with, so generation and callbacks keep working. Parameters, names and the saved
    config are untouched. Dropout and other noise are switched off: a pair's log-probabilities must
    be functions of the parameters alone, or policy and reference would differ at the start.

    Args:
        model: a model of a family in ``modeling.families.FAMILIES``.
        backend: a key of ``modeling.attention.BACKENDS``.
        chunk_bytes: size of a chunk of float32 logits; by default what suits the device.
    """
    switch_off_noise(model)
    # from the class, so that binding a model again does not stack forwards
    original_forward = types.MethodType(type(model).forward, model)
    original_attention = model.config._attn_implementation
    if original_attention == ATTENTION_NAME:  # bound before and left so by a pack
        original_attention = "eager"
    logit_map = logit_map_of(model.config)

    def head_forward(
        self: Any,
        hidden: Tensor,
        targets: Tensor | None = None,
        **options: bool,
    ) -> Any:
        if targets is None:
            return type(self).forward(self, hidden)
        return chunked_logprobs(
            hidden,
            self.weight,
            targets,
            bias_V=self.bias,
            logit_map=logit_map,
            chunk_rows=None if chunk_bytes is None else _rows(chunk_bytes, self.weight),
            **options,
        )

    def forward(
        self: Any,
        *args: Any,
        pack: PackLayout | None = None,
        with_statistics: bool = False,
        with_norms: bool = False,
        with_square_sums: bool = False,
        **kwargs: Any,
    ) -> Any:
        # The attention's name stays set after a pack: a recomputing backward reads it again.
        if pack is None:
            self.config._attn_implementation = original_attention
            return original_forward(*args, **kwargs)
        self.config._attn_implementation = ATTENTION_NAME
        device = self.get_input_embeddings().weight.device
        hidden_TD = self.base_model(
            input_ids=pack.input_ids_T[None].to(device, non_blocking=True),
            position_ids=pack.position_ids_T[None].to(device, non_blocking=True),
            use_cache=False,
            segments=segments_of(pack, backend=backend, device=device),
        ).last_hidden_state[0]
        hidden_RD = hidden_TD.index_select(0, pack.hidden_index_R.to(device, non_blocking=True))
        targets_R = pack.target_ids_R.to(device, non_blocking=True)
        return self.get_output_embeddings()(
            hidden_RD,
            targets=targets_R,
            with_statistics=with_statistics,
            with_norms=with_norms,
            with_square_sums=with_square_sums,
        )

    # one module, or within a wrapper of peft the original and the copy that is trained
    heads: Any = [m for m in model.get_output_embeddings().modules() if isinstance(m, nn.Linear)]
    for head in heads:
        head.forward = types.MethodType(head_forward, head)
    model.forward = types.MethodType(forward, model)
