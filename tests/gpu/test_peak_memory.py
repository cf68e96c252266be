"""On a GPU: what pruned activation checkpointing does to the allocator's peak.

pytest -m gpu tests/gpu
"""

import gc

import pytest
import torch

from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.packing.layout import build_layout, select_rows
from tests.helpers.pairs import pair_of_lengths
from tests.helpers.tiny_models import build

pytestmark = pytest.mark.gpu
NUM_PAIRS = 16
LENGTHS = [(64, 96, 96)] * NUM_PAIRS
NUM_KEPT = 4


@pytest.fixture
def model():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = build(
        "llama",
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=64,
    )
    found = found.cuda().train()
    bind_logprob_forward(found, backend="sdpa")
    return found


def peak_bytes(model, recompute=None, *, num_kept=NUM_PAIRS):
    """Most bytes allocated beyond what was there before, gradients of parameters not counted."""
    layout = build_layout([pair_of_lengths(k, each).tokens for k, each in enumerate(LENGTHS)])
    kept = [each[1:] if k < num_kept else (0, 0) for k, each in enumerate(LENGTHS)]
    weights = torch.zeros(len(layout.target_ids_R), device="cuda")
    weights[: sum(map(sum, kept))] = 1.0

    def run():
        if recompute is not None:
            recompute.begin()
        logprobs = model(pack=layout).logprobs_R
        if recompute is not None:
            recompute.keep(select_rows(layout, kept))
        (logprobs * weights).sum().backward()

    run()  # gradients and the kernels' workspaces exist from here on
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    resting = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - resting


def test_pruned_needs_less_than_transformers_checkpointing_and_that_less_than_none(model):
    stored = peak_bytes(model)
    model.activation_checkpointing_enable()
    checkpointed = peak_bytes(model)
    recompute = PrunedRecompute.bind(model)
    everything = peak_bytes(model, recompute)
    pruned = peak_bytes(model, recompute, num_kept=NUM_KEPT)
    assert pruned < checkpointed < stored
    # keeping all rows is ordinary checkpointing: within a tenth
    assert everything < 1.1 * checkpointed
    # layers' inputs stay, activations of one layer shrink to the kept rows
    assert pruned < 0.75 * checkpointed
