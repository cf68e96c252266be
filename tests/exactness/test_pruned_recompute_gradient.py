"""Pruned activation checkpointing gives the gradient of the ordinary backward."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.packing.layout import build_layout, select_rows
from tests.helpers.gradients import gradients, relative_error
from tests.helpers.pairs import pair_of_lengths, random_pairs
from tests.helpers.tiny_models import FAMILIES, build
from tests.helpers.tolerances import FLOAT32_RECOMPUTED, FLOAT64_ENUMERATION

LENGTHS = [(5, 9, 7), (1, 1, 1), (12, 3, 14), (8, 20, 11)]
KEPT = {
    "all": [(9, 7), (1, 1), (3, 14), (20, 11)],
    "some_pairs": [(0, 0), (1, 1), (0, 0), (20, 11)],
    "prefixes": [(4, 7), (1, 0), (2, 5), (9, 10)],
    "chosen_only": [(9, 0), (0, 0), (3, 0), (20, 0)],
    "rejected_only": [(0, 7), (0, 1), (0, 0), (0, 11)],
    "nothing": [(0, 0)] * 4,
}


def layout_of(lengths=LENGTHS):
    return build_layout([pair_of_lengths(k, each).tokens for k, each in enumerate(lengths)])


def bound(family="llama", **options):
    model = build(family, **options).train()
    bind_logprob_forward(model, backend="sdpa")
    return model


def random_weights(kept, *, seed=0, lengths=LENGTHS):
    """A weight for each response token: random in the kept prefixes, 0 beyond them."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for (_, *responses), prefixes in zip(lengths, kept, strict=True):
        for length, prefix in zip(responses, prefixes, strict=True):
            weights = torch.randn(length, generator=generator)
            parts.append(weights * (torch.arange(length) < prefix))
    return torch.cat(parts)


def ordinary(model, kept, **weighting):
    logprobs = model(pack=layout_of()).logprobs_R
    (logprobs * random_weights(kept, **weighting)).sum().backward()
    return gradients(model)


def pruned(model, kept):
    """The gradients and the pack; binds the model, which then still has its ordinary forward."""
    layout = layout_of()
    recompute = PrunedRecompute.bind(model)
    pack = recompute.begin()
    logprobs = model(pack=layout).logprobs_R
    recompute.keep(select_rows(layout, kept))
    (logprobs * random_weights(kept)).sum().backward()
    return gradients(model), pack


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_the_ordinary_ones(family, kept):
    model = bound(family)
    expected = ordinary(model, KEPT[kept])
    found, pack = pruned(model, KEPT[kept])
    assert relative_error(found, expected) < FLOAT32_RECOMPUTED
    selection = select_rows(layout_of(), KEPT[kept])
    assert pack.num_recomputed_rows == len(selection.rows_T) * model.config.num_hidden_layers
    if kept == "nothing":
        assert found.keys() == {name for name, _ in model.named_parameters()}
        assert not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("kept", sorted(KEPT.keys() - {"nothing"}))
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_the_ordinary_ones_in_float64(family, kept):
    model = bound(family, dtype=torch.float64)
    expected = ordinary(model, KEPT[kept])
    found, _ = pruned(model, KEPT[kept])
    assert relative_error(found, expected) < FLOAT64_ENUMERATION


def test_tokens_of_weight_0_send_no_gradient_into_rows_that_are_dropped():
    """What the caller guarantees: the ordinary backward has exact zeros there, in every layer."""
    model, layout, kept = bound(), layout_of(), KEPT["prefixes"]
    arrived = []

    def listen(_layer, _inputs, output):
        output.register_hook(arrived.append)

    for layer in model.base_model.layers:
        layer.register_forward_hook(listen)
    (model(pack=layout).logprobs_R * random_weights(kept)).sum().backward()
    dropped = torch.ones(layout.num_tokens, dtype=torch.bool)
    dropped[select_rows(layout, kept).rows_T] = False
    assert dropped.any()
    assert len(arrived) == len(model.base_model.layers)
    assert not any(gradient[0, dropped].any() for gradient in arrived)


def test_a_selection_that_lacks_needed_rows_is_wrong():
    """So the tests above would notice."""
    model, layout = bound(), layout_of()
    expected = ordinary(model, KEPT["all"])
    recompute = PrunedRecompute.bind(model)
    recompute.begin()
    logprobs = model(pack=layout).logprobs_R
    recompute.keep(select_rows(layout, KEPT["prefixes"]))
    (logprobs * random_weights(KEPT["all"])).sum().backward()
    assert relative_error(gradients(model), expected) > 0.1


@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
def test_the_backward_recomputes_in_the_autocast_of_the_forward(backward_inside):
    model, layout, kept = bound(), layout_of(), KEPT["prefixes"]
    recompute = PrunedRecompute.bind(model)

    def run(*, autocast, prune):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if prune:
                recompute.begin()
            loss = (model(pack=layout).logprobs_R * random_weights(kept)).sum()
            if prune:
                recompute.keep(select_rows(layout, kept))
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        found = gradients(model)
        return torch.cat([found[name].flatten() for name in sorted(found)])

    exact = run(autocast=False, prune=False)
    low = run(autocast=True, prune=False)
    found = run(autocast=True, prune=True)
    rounding = (low - exact).norm()
    # float32 in the recomputation would be as far from `low` as `exact` is
    assert (found - low).norm() < 0.5 * rounding
    assert (found - exact).norm() < 1.5 * rounding


def test_packs_whose_forwards_ran_before_their_backwards_keep_their_own_selections():
    model, layout = bound(), layout_of()
    kept = [KEPT["prefixes"], KEPT["some_pairs"]]
    expected = [ordinary(model, kept[k], seed=k) for k in range(2)]
    recompute = PrunedRecompute.bind(model)
    packs, losses = [], []
    for k in range(2):
        packs.append(recompute.begin())
        losses.append((model(pack=layout).logprobs_R * random_weights(kept[k], seed=k)).sum())
    for k in range(2):
        packs[k].keep(select_rows(layout, kept[k]))
    for k in range(2):
        losses[k].backward()
        assert relative_error(gradients(model), expected[k]) < FLOAT32_RECOMPUTED


@pytest.mark.parametrize("says_so", [True, False], ids=["keep_none", "keep_forgotten"])
def test_keeping_all_rows_is_transformers_checkpointing(says_so):
    model, layout = bound(), layout_of()
    weights = random_weights(KEPT["all"])
    model.activation_checkpointing_enable()
    expected = ordinary(model, KEPT["all"])
    recompute = PrunedRecompute.bind(model)  # stays on, and is left out within a pack
    pack = recompute.begin()
    logprobs = model(pack=layout).logprobs_R
    if says_so:
        recompute.keep(None)
    (logprobs * weights).sum().backward()
    assert relative_error(gradients(model), expected) == 0
    assert pack.num_recomputed_rows == layout.num_tokens * model.config.num_hidden_layers


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_layers_after_frozen_embeddings_get_their_gradients(family):
    model = bound(family)
    model.get_input_embeddings().weight.requires_grad_(False)
    expected = ordinary(model, KEPT["prefixes"])
    found, _ = pruned(model, KEPT["prefixes"])
    assert any("layers.0" in name for name in found)
    assert relative_error(found, expected) < FLOAT32_RECOMPUTED


def test_binding_changes_no_name_and_does_not_stack():
    model = bound()
    names = list(model.state_dict())
    for _ in range(3):
        _, pack = pruned(model, KEPT["all"])
        assert pack.num_recomputed_rows == layout_of().num_tokens * model.config.num_hidden_layers
    assert list(model.state_dict()) == names


def test_a_copy_of_a_bound_model_runs_its_own_layers():
    model = bound()
    expected = ordinary(model, KEPT["all"])
    PrunedRecompute.bind(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert relative_error(ordinary(twin, KEPT["all"]), expected) == 0


def test_layers_that_get_a_new_class_keep_transformers_checkpointing():
    """As FSDP2 does it, here without it: transformers checkpoints in the outermost class only."""
    model, layout = bound(), layout_of()
    recompute = PrunedRecompute.bind(model)
    layers, calls = list(model.base_model.layers), []

    def checkpoint(run, *args):
        calls.append(run)
        return run(*args)

    model.activation_checkpointing_enable()
    for layer in layers:
        layer.__class__ = type("Sharded", (type(layer),), {})
        layer._gradient_checkpointing_func = checkpoint
    model(pack=layout)
    assert len(calls) == len(layers)
    recompute.begin()
    model(pack=layout)
    assert len(calls) == len(layers)


def test_outside_of_a_pack_and_without_gradients_layers_run_as_before():
    model, kept = bound(), KEPT["prefixes"]
    expected = ordinary(model, kept)
    recompute = PrunedRecompute.bind(model)
    assert relative_error(ordinary(model, kept), expected) == 0
    pack = recompute.begin()
    with torch.no_grad():
        model(pack=layout_of())
    recompute.keep(None)
    assert relative_error(ordinary(model, kept), expected) == 0
    assert pack.num_recomputed_rows == 0


def test_dropout_and_models_without_layers_are_refused():
    model = build("llama")
    model.base_model.layers[0].mlp.add_module("dropout", torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match="dropout"):
        PrunedRecompute.bind(model)
    with pytest.raises(ValueError, match="Linear has no layers"):
        PrunedRecompute.bind(torch.nn.Linear(1, 1))


def test_work_of_the_backward_is_proportional_to_the_kept_rows():
    """Exactly, in linear layers; torch counts CPU attention as 0, and here the head is constant."""
    model, layout = bound(), layout_of()
    recompute = PrunedRecompute.bind(model)
    rows, flops = {}, {}
    for name, kept in KEPT.items():
        recompute.begin()
        loss = (model(pack=layout).logprobs_R * random_weights(kept)).sum()
        selection = select_rows(layout, kept)
        recompute.keep(selection)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        rows[name], flops[name] = len(selection.rows_T), counter.get_total_flops()
    assert rows["nothing"] == 1
    num_weights = sum(p.numel() for p in model.base_model.layers.parameters() if p.ndim == 2)
    of_one_row = (2 + 4) * num_weights  # forward and backward
    for name in KEPT:
        assert flops[name] - flops["nothing"] == (rows[name] - 1) * of_one_row


def test_an_empty_response_is_as_if_the_other_had_been_trained_alone():
    model = bound()
    prompt, chosen, rejected = random_pairs(2)[1].tokens
    found = []
    for pair in ((prompt, chosen, rejected), (prompt, chosen[:0], rejected)):
        layout = build_layout([pair])
        logprobs = model(pack=layout).logprobs_R
        logprobs[~layout.is_chosen_R].sum().backward()
        found.append(gradients(model))
    assert relative_error(found[1], found[0]) < FLOAT32_RECOMPUTED
