"""Causal attention over packs: one function behind transformers' registry, four twins below it.

Shape legend: T packed query rows, K gathered key rows, S segments, N query heads, G key/value
heads, H head dim of queries and keys, V head dim of values, which is another in multi-head latent
attention (DeepSeek-V3).

Models are not patched. ``varlen_attention_forward`` is registered as an attention implementation of
transformers; a model whose config names it calls it from each layer, and the pack's segments reach
it as the keyword ``segments`` that every supported model hands through to its attention.

Each twin computes what ``flash_attn_varlen_func(causal=True)`` defines: segment s has its own
number of queries and keys, the last query sees the last key ("bottom-right"), and rows of different
segments never meet. One is chosen per model by :func:`select_backend`, with the reason said in the
log:

    flash_attention_3, flash_attention_2   the flash-attn packages, CUDA, bfloat16 or float16
    torch_varlen                           torch.nn.attention.varlen, CUDA, bfloat16 or float16
    sdpa                                   scaled_dot_product_attention by segments, any device;
                                           in plain matrix products where scores are capped (Gemma
                                           2) or heads have a sink (gpt-oss)
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from sdpo_scale.packing.layout import PackLayout, RowSelection

__all__ = [
    "ATTENTION_NAME",
    "BACKENDS",
    "Segments",
    "segments_of",
    "select_backend",
    "varlen_attention_forward",
]

ATTENTION_NAME = "sdpo_varlen"
"""The name under which transformers finds :func:`varlen_attention_forward`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """What attention needs to know of a pack."""

    cu_seqlens_q: Tensor
    """int32 [S+1]."""
    cu_seqlens_k: Tensor
    """int32 [S+1]."""
    lengths_q: tuple[int, ...]
    """[S] query lengths on the host, so that the SDPA twin need not wait for the device."""
    lengths_k: tuple[int, ...]
    """[S] key lengths on the host."""
    kv_index_K: Tensor
    """int64 [K], the packed row of each key."""
    backend: str
    """A key of ``BACKENDS``."""


def segments_of(
    layout: PackLayout | RowSelection, *, backend: str, device: torch.device
) -> Segments:
    """The attention segments of a pack, or of kept rows of one, as tensors on ``device``."""
    return Segments(
        cu_seqlens_q=layout.cu_seqlens_q.to(device, non_blocking=True),
        cu_seqlens_k=layout.cu_seqlens_k.to(device, non_blocking=True),
        lengths_q=layout.lengths_q,
        lengths_k=layout.lengths_k,
        kv_index_K=layout.kv_index_K.to(device, non_blocking=True),
        backend=backend,
    )


def _sdpa(
    query_TNH: Tensor,
    key_KGH: Tensor,
    value_KGH: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    outputs = []
    # one split per tensor: its backward is one concatenation instead of a padded sum per segment
    queries = query_TNH.transpose(0, 1).split(segments.lengths_q, dim=1)
    keys = key_KGH.transpose(0, 1).split(segments.lengths_k, dim=1)
    values = value_KGH.transpose(0, 1).split(segments.lengths_k, dim=1)
    for query, key, value in zip(queries, keys, values, strict=True):
        length_q, length_k = query.shape[1], key.shape[1]
        mask = None
        if length_q != length_k or (window is not None and window < length_k):
            mask = _bottom_right_mask(length_q, length_k, window=window, device=query.device)
        if softcap is None and sinks_N is None:
            output = F.scaled_dot_product_attention(
                query[None],
                key[None],
                value[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[0] != key.shape[0],
            )[0]
        else:
            output = _plain_attention(
                query, key, value, mask, scale=scale, softcap=softcap, sinks_N=sinks_N
            )
        outputs.append(output)
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _bottom_right_mask(
    length_q: int, length_k: int, *, window: int | None, device: torch.device
) -> Tensor:
    """Bool [length_q, length_k]: where queries may look; ``window`` counts the query itself."""
    mask = torch.ones(length_q, length_k, dtype=torch.bool, device=device)
    mask = mask.tril(diagonal=length_k - length_q)
    if window is not None:
        mask = mask.triu(diagonal=length_k - length_q - window + 1)
    return mask


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Attention of one segment, query [N, q, H], with what no fused kernel has.

    Scores are capped by softcap · tanh(score / softcap), as Gemma 2 defines it. A head's sink is
    the score of one more key, which every query sees and whose value is 0, as in gpt-oss.
    """
    groups = query.shape[0] // key.shape[0]
    scores = query @ key.repeat_interleave(groups, dim=0).transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = _bottom_right_mask(query.shape[1], key.shape[1], window=None, device=query.device)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if sinks_N is not None:
        sinks = sinks_N.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : key.shape[1]].to(query.dtype)
    return probabilities @ value.repeat_interleave(groups, dim=0)


def _torch_varlen(
    query_TNH: Tensor,
    key_KGH: Tensor,
    value_KGH: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert softcap is None, "torch's varlen attention has no soft cap; select_backend avoids it"
    assert sinks_N is None, "torch's varlen attention has no sinks; select_backend avoids it"
    output = varlen_attn(
        query_TNH,
        key_KGH,
        value_KGH,
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        max(segments.lengths_q),
        max(segments.lengths_k),
        scale=scale,
        # (-1, 0) is causal; a window counts the keys left of the query, ours counts the query as
        # well
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_TNH.shape[1] != key_KGH.shape[1],
    )
    assert isinstance(output, Tensor), "no auxiliary output was asked for"
    return output


def _flash(module_name: str) -> Callable[..., Tensor]:
    def attention(
        query_TNH: Tensor,
        key_KGH: Tensor,
        value_KGH: Tensor,
        segments: Segments,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        assert sinks_N is None, "flash-attn has no sinks; select_backend avoids it"
        function = importlib.import_module(module_name).flash_attn_varlen_func
        output = function(
            query_TNH,
            key_KGH,
            value_KGH,
            cu_seqlens_q=segments.cu_seqlens_q,
            cu_seqlens_k=segments.cu_seqlens_k,
            max_seqlen_q=max(segments.lengths_q),
            max_seqlen_k=max(segments.lengths_k),
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=0.0 if softcap is None else softcap,
        )
        # older releases of version 3 return (output, log-sum-exp)
        return output[0] if isinstance(output, tuple) else output

    return attention


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "flash_attention_3": _flash("flash_attn_interface"),
    "flash_attention_2": _flash("flash_attn"),
    "torch_varlen": _torch_varlen,
    "sdpa": _sdpa,
}
"""Backend → (query [T,N,H], key [K,G,H], value [K,G,V], segments, scale, window, softcap, sinks
[N]) → [T,N,V]. For all but sdpa V must be H."""


def select_backend(
    *, device: torch.device, dtype: torch.dtype, has_softcap: bool, has_sinks: bool = False
) -> tuple[str, str]:
    """The fastest backend that computes this model's attention exactly, and why.

    Args:
        device: where the model runs.
        dtype: dtype of queries and keys, which is the autocast dtype where autocast is on.
        has_softcap: whether the model caps its attention scores.
        has_sinks: whether its heads have a learned sink.

    Returns:
        (key of ``BACKENDS``, the reason in words).
    """
    if device.type != "cuda":
        return "sdpa", f"the model runs on {device.type}; varlen kernels need CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return "sdpa", f"varlen kernels need bfloat16 or float16, attention runs in {dtype}"
    if has_sinks:
        return "sdpa", "the model has attention sinks, which varlen kernels lack"
    for name, package in (
        ("flash_attention_3", "flash_attn_interface"),
        ("flash_attention_2", "flash_attn"),
    ):
        if importlib.util.find_spec(package) is not None:
            return name, f"package {package} is installed"
    if has_softcap:
        return "sdpa", "the model caps attention scores and flash-attn is not installed"
    return "torch_varlen", "flash-attn is not installed"


def varlen_attention_forward(  # noqa: PLR0913  # the signature is transformers'
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segments: Segments | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over one pack, in the form that transformers calls.

    Dropout is never applied: a pair's log-probabilities must be functions of the parameters alone.

    Args:
        _module: the attention layer; not needed.
        query: float [1, N, T, H].
        key: float [1, G, T, H], one row per packed token; gathered here into segments.
        value: float [1, G, T, V].
        attention_mask: must be None; the segments are the mask.
        scaling: factor on the scores; 1/√H if None.
        sliding_window: how many keys a query sees, itself included.
        softcap: cap of the scores.
        s_aux: float [N], the score of each head's sink.
        segments: the pack's segments.

    Returns:
        (float [1, T, N, V], None): transformers' order of dimensions, and no attention weights.

    Raises:
        RuntimeError: the layer was called without a pack.
    """
    if segments is None:
        raise RuntimeError(
            f"attention {ATTENTION_NAME!r} computes packs only: call the model with pack=, or as "
            "the original model outside of a training step"
        )
    assert attention_mask is None, "packs carry no mask"
    if torch.is_autocast_enabled(query.device.type):
        # rotary embeddings leave queries and keys in float32, and kernels want one dtype
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    value_width = value.shape[-1]
    if segments.backend != "sdpa" and value_width < query.shape[-1]:
        # kernels want one head dim: columns of 0 give columns of 0, which are cut off again
        value = F.pad(value, (0, query.shape[-1] - value_width))
    key_KGH = key[0].transpose(0, 1).index_select(0, segments.kv_index_K)
    value_KGH = value[0].transpose(0, 1).index_select(0, segments.kv_index_K)
    output_TNH = BACKENDS[segments.backend](
        query[0].transpose(0, 1),
        key_KGH,
        value_KGH,
        segments,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks_N=s_aux,
    )
    return output_TNH[None, ..., :value_width], None


AttentionInterface.register(ATTENTION_NAME, varlen_attention_forward)
