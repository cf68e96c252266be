"""Attention: the SDPA twin against a dense mask, and the choice of a backend."""

import importlib.machinery

import pytest
import torch

from sdpo_scale.modeling.attention import (
    BACKENDS,
    segments_of,
    select_backend,
    varlen_attention_forward,
)
from sdpo_scale.packing.layout import build_layout
from tests.helpers.pairs import random_pairs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def dense(query, key, value, segments, *, scale, window, softcap, sinks_N=None):
    """All queries against all gathered keys, with everything else masked: [T, N, V] in float64."""
    mask = torch.zeros(query.shape[0], key.shape[0], dtype=torch.bool)
    row = column = 0
    for length_q, length_k in zip(segments.lengths_q, segments.lengths_k, strict=True):
        for i in range(length_q):
            last = i + length_k - length_q
            first = 0 if window is None else max(0, last - window + 1)
            mask[row + i, column + first : column + last + 1] = True
        row, column = row + length_q, column + length_k
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("tnh,knh->ntk", query, key.repeat_interleave(groups, dim=1)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks_N is not None:
        scores = torch.cat([scores, sinks_N[:, None, None].expand(-1, len(query), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("ntk,knh->tnh", weights, value.repeat_interleave(groups, dim=1))


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("value_width", [8, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_the_sdpa_twin_equals_a_dense_mask(window, softcap, value_width, has_sinks):
    layout = build_layout([pair.tokens for pair in random_pairs(4, longest=9)])
    segments = segments_of(layout, backend="sdpa", device=CPU)
    query = torch.randn(layout.num_tokens, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, len(layout.kv_index_K), 2, 8, dtype=torch.float64)
    value = value[..., :value_width]
    sinks = torch.randn(4, dtype=torch.float64) if has_sinks else None
    options = {"scale": 0.4, "window": window, "softcap": softcap, "sinks_N": sinks}
    found = BACKENDS["sdpa"](query, key, value, segments, **options)
    torch.testing.assert_close(found, dense(query, key, value, segments, **options))


def test_kernels_get_values_as_wide_as_keys(monkeypatch):
    """Multi-head latent attention has narrower values; kernels want one head dim."""
    layout = build_layout([pair.tokens for pair in random_pairs(3)])
    widths = []

    def kernel(query, key, value, segments, **options):
        widths.append((query.shape[-1], key.shape[-1], value.shape[-1]))
        return BACKENDS["sdpa"](query, key, value, segments, **options)

    monkeypatch.setitem(BACKENDS, "flash_attention_2", kernel)
    query, key = torch.randn(2, 1, 4, layout.num_tokens, 8)
    value = torch.randn(1, 4, layout.num_tokens, 5)
    outputs = []
    for backend in ("sdpa", "flash_attention_2"):
        segments = segments_of(layout, backend=backend, device=CPU)
        output, _ = varlen_attention_forward(
            torch.nn.Identity(), query, key, value, None, segments=segments
        )
        outputs.append(output)
    assert widths == [(8, 8, 8)]
    assert outputs[0].shape == (1, layout.num_tokens, 4, 5)
    torch.testing.assert_close(*outputs)


def test_a_layer_called_without_a_pack_says_so():
    tensor = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="computes packs only"):
        varlen_attention_forward(torch.nn.Identity(), tensor, tensor, tensor, None)


@pytest.mark.parametrize(
    ("device", "dtype", "softcap", "installed", "expected", "reason"),
    [
        (CPU, torch.bfloat16, False, {"flash_attn"}, "sdpa", "runs on cpu"),
        (CUDA, torch.float32, False, {"flash_attn"}, "sdpa", "need bfloat16 or float16"),
        (CUDA, torch.bfloat16, True, {"flash_attn"}, "flash_attention_2", "flash_attn is"),
        (
            CUDA,
            torch.float16,
            False,
            {"flash_attn", "flash_attn_interface"},
            "flash_attention_3",
            "",
        ),
        (CUDA, torch.bfloat16, False, set(), "torch_varlen", "not installed"),
        (CUDA, torch.bfloat16, True, set(), "sdpa", "caps attention scores"),
    ],
)
def test_the_backend_and_its_reason(
    device, dtype, softcap, installed, expected, reason, monkeypatch
):
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: importlib.machinery.ModuleSpec(name, None) if name in installed else None,
    )
    name, why = select_backend(device=device, dtype=dtype, has_softcap=softcap)
    assert name == expected
    assert reason in why


def test_attention_sinks_run_in_plain_products():
    name, why = select_backend(device=CUDA, dtype=torch.bfloat16, has_softcap=False, has_sinks=True)
    assert name == "sdpa"
    assert "attention sinks" in why


@pytest.mark.parametrize(
    ("backend", "module", "returned_with_lse"),
    [
        ("flash_attention_2", "flash_attn", False),
        ("flash_attention_3", "flash_attn_interface", True),
    ],
)
def test_flash_attention_is_called_with_its_conventions(
    backend, module, returned_with_lse, monkeypatch
):
    """The kernels need a GPU; here their entry point is a stand-in that records the call."""
    import sys
    import types

    calls = []

    def flash_attn_varlen_func(query, key, value, **options):
        calls.append(options)
        return (query, None) if returned_with_lse else query

    stand_in = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, module, stand_in)
    layout = build_layout([pair.tokens for pair in random_pairs(2)])
    segments = segments_of(layout, backend=backend, device=CPU)
    query = torch.zeros(layout.num_tokens, 2, 4)
    output = BACKENDS[backend](query, query, query, segments, scale=0.5, window=8, softcap=None)
    assert output is query
    (options,) = calls
    assert options["causal"]
    assert options["window_size"] == (7, 0)  # theirs excludes the query, ours counts it
    assert options["softcap"] == 0.0
    assert options["max_seqlen_k"] == max(layout.lengths_k)
