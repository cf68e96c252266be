"""Pruned activation checkpointing: an ordinary backward's gradient from the kept rows alone."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.packing.layout import build_layout, select_rows
from tests.helpers.gradients import gradients, relative_error
from tests.helpers.pairs import pair_of_lengths
from tests.helpers.tiny_models import FAMILIES, build
from tests.helpers.tolerances import FLOAT32_RECOMPUTED, FLOAT64_ENUMERATION

PAIRS = [
    pair_of_lengths(k, lengths) for k, lengths in enumerate([(9, 12, 7), (4, 1, 15), (20, 6, 11)])
]
FULL = [(12, 7), (1, 15), (6, 11)]
KEPT = {
    "all": FULL,
    "some_pairs": [(12, 7), (0, 0), (6, 11)],
    "prefixes": [(5, 3), (1, 8), (2, 4)],
    "only_chosen": [(12, 0), (0, 0), (3, 0)],
    "only_rejected": [(0, 7), (0, 15), (0, 1)],
    "nothing": [(0, 0), (0, 0), (0, 0)],
}


def weights_of(kept, dtype):
    """Random weights of the tokens within kept prefixes, 0 beyond."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for full, lengths in zip(FULL, kept, strict=True):
        for n, m in zip(full, lengths, strict=True):
            weights = torch.randn(n, generator=generator, dtype=dtype)
            parts.append(torch.where(torch.arange(n) < m, weights, 0.0))
    return torch.cat(parts)


def pruned_gradient(model, recompute, kept):
    layout = build_layout([pair.tokens for pair in PAIRS])
    recompute.begin()
    logprobs = model(pack=layout, with_norms=True).logprobs_R
    recompute.keep(None if kept is None else select_rows(layout, kept))
    (logprobs * weights_of(kept or FULL, logprobs.dtype)).sum().backward()
    return gradients(model)


def ordinary_gradient(model, kept):
    logprobs = model(pack=build_layout([pair.tokens for pair in PAIRS])).logprobs_R
    (logprobs * weights_of(kept, logprobs.dtype)).sum().backward()
    return gradients(model)


def bound(family, **kwargs):
    model = build(family, **kwargs).train()
    bind_logprob_forward(model, backend="sdpa")
    return model, PrunedRecompute.bind(model)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_gradients_equal_those_of_an_ordinary_backward(dtype, family, kept):
    model, recompute = bound(family, dtype=dtype)
    expected = ordinary_gradient(model, KEPT[kept])
    found = pruned_gradient(model, recompute, KEPT[kept])
    if kept == "nothing":
        assert found.keys() == expected.keys()
        assert all(float(g.abs().max()) == 0 for g in found.values())
        return
    # in float64 a few of transformers' own operations round to float32: rotary angles do in both
    tolerance = FLOAT32_RECOMPUTED if dtype == torch.float32 else FLOAT64_ENUMERATION
    assert relative_error(found, expected) < tolerance


def test_keeping_all_rows_need_not_be_said():
    model, recompute = bound("llama")
    expected = ordinary_gradient(model, FULL)
    assert relative_error(pruned_gradient(model, recompute, None), expected) < FLOAT32_RECOMPUTED


def test_two_packs_may_run_forward_before_their_backwards():
    model, recompute = bound("llama", dtype=torch.float64)
    layouts = [build_layout([pair.tokens]) for pair in PAIRS[:2]]
    kept = [[(5, 3)], [(0, 8)]]
    outputs = []
    for layout, lengths in zip(layouts, kept, strict=True):
        recompute.begin()
        outputs.append(model(pack=layout).logprobs_R)
        recompute.keep(select_rows(layout, lengths))
    losses = [outputs[0][:5].sum() + outputs[0][12:15].sum(), outputs[1][1:9].sum()]
    for loss in reversed(losses):
        loss.backward()
    found = gradients(model)
    plain = [model(pack=layout).logprobs_R for layout in layouts]
    (plain[0][:5].sum() + plain[0][12:15].sum() + plain[1][1:9].sum()).backward()
    assert relative_error(found, gradients(model)) < FLOAT64_ENUMERATION


def test_layers_get_their_gradients_with_frozen_embeddings():
    model, recompute = bound("llama")
    model.get_input_embeddings().weight.requires_grad_(False)
    expected = ordinary_gradient(model, KEPT["prefixes"])
    found = pruned_gradient(model, recompute, KEPT["prefixes"])
    assert relative_error(found, expected) < FLOAT32_RECOMPUTED


def test_the_backward_runs_under_the_autocast_of_the_forward():
    model, recompute = bound("llama")
    kept = KEPT["prefixes"]
    layout = build_layout([pair.tokens for pair in PAIRS])
    found = []
    for is_pruned in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            if is_pruned:
                recompute.begin()
            logprobs = model(pack=layout).logprobs_R
        if is_pruned:
            recompute.keep(select_rows(layout, kept))
        (logprobs * weights_of(kept, logprobs.dtype)).sum().backward()
        found.append(gradients(model))
    exact = ordinary_gradient(model, kept)
    assert relative_error(found[1], exact) < 2 * relative_error(found[0], exact)


def test_transformers_own_checkpointing_works_where_nothing_was_begun():
    model, _ = bound("llama")
    expected = ordinary_gradient(model, FULL)
    model.activation_checkpointing_enable()
    assert relative_error(ordinary_gradient(model, FULL), expected) < FLOAT32_RECOMPUTED


def test_binding_again_does_not_stack():
    model, _ = bound("llama")
    recompute = PrunedRecompute.bind(model)
    expected = ordinary_gradient(model, KEPT["prefixes"])
    found = pruned_gradient(model, recompute, KEPT["prefixes"])
    assert relative_error(found, expected) < FLOAT32_RECOMPUTED


def test_a_model_without_layers_to_checkpoint_is_refused():
    with pytest.raises(ValueError, match="Linear has no layers"):
        PrunedRecompute.bind(torch.nn.Linear(2, 2))


def test_flops_of_the_backward_fall_with_the_kept_rows():
    # wide enough that linear layers dominate; torch counts no FLOPs of attention on the CPU
    model, recompute = bound("llama", hidden_size=128, intermediate_size=512, vocab_size=128)
    pairs = [pair_of_lengths(k, (30, 40, 30)) for k in range(4)]
    layout = build_layout([pair.tokens for pair in pairs])
    counted = {}
    for num_kept in (4, 2, 1):
        kept = [(40, 30)] * num_kept + [(0, 0)] * (4 - num_kept)
        recompute.begin()
        logprobs = model(pack=layout, with_norms=True).logprobs_R
        recompute.keep(select_rows(layout, kept))
        weights = torch.zeros_like(logprobs)
        weights[: 70 * num_kept] = 1.0
        with FlopCounterMode(display=False) as counter:
            (logprobs * weights).sum().backward()
        counted[num_kept] = counter.get_total_flops()
        model.zero_grad()
    assert counted[2] / counted[4] == pytest.approx(0.5, abs=0.02)
    assert counted[1] / counted[4] == pytest.approx(0.25, abs=0.02)
