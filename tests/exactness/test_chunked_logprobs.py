"""The chunked head against log_softmax of all logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sdpo_scale.modeling.families import LogitMap
from sdpo_scale.modeling.logprobs import chunked_logprobs
from tests.helpers.tolerances import FLOAT64_ENUMERATION

MAPS = [LogitMap(), LogitMap(softcap=2.0), LogitMap(scale=0.25), LogitMap(scale=3.0, softcap=2.0)]


def inputs(dtype=torch.float64, rows=13, width=8, vocab=31):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, width, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return hidden, weight, targets


def plain(hidden, weight, targets, logit_map=MAPS[0], bias=0.0):
    logits = logit_map.scale * (hidden @ weight.T + bias)
    if logit_map.softcap is not None:
        logits = logit_map.softcap * torch.tanh(logits / logit_map.softcap)
    return logits, logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk_rows", [1, 4, 13, None])
@pytest.mark.parametrize("logit_map", MAPS, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
def test_logprobs_and_gradients_equal_log_softmax_in_float64(with_bias, logit_map, chunk_rows):
    hidden, weight, targets = inputs()
    bias = torch.randn(weight.shape[0], dtype=torch.float64, requires_grad=True)
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    grad = torch.randn(len(targets), dtype=torch.float64)
    _, expected = plain(hidden, weight, targets, logit_map, bias if with_bias else 0.0)
    expected_gradients = torch.autograd.grad(expected, leaves, grad)
    found = chunked_logprobs(
        hidden,
        weight,
        targets,
        bias_V=bias if with_bias else None,
        logit_map=logit_map,
        chunk_rows=chunk_rows,
    ).logprobs_R
    found_gradients = torch.autograd.grad(found, leaves, grad)
    for left, right in zip((found, *found_gradients), (expected, *expected_gradients), strict=True):
        assert (left - right).abs().max() < FLOAT64_ENUMERATION * right.abs().max()


def test_a_frozen_head_or_body_gets_no_gradient():
    hidden, weight, targets = inputs()
    frozen = weight.detach()
    chunked_logprobs(hidden, frozen, targets).logprobs_R.sum().backward()
    assert hidden.grad is not None
    hidden, weight, targets = inputs()
    chunked_logprobs(hidden.detach(), weight, targets).logprobs_R.sum().backward()
    assert weight.grad is not None


class _SeesShapes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.shapes.add(tuple(output.shape))
        return output


@pytest.mark.parametrize("is_frozen", [False, True])
def test_LOR_05_the_gradient_of_a_frozen_head_takes_no_memory(is_frozen):
    hidden, weight, targets = inputs()
    weight.requires_grad_(not is_frozen)
    logprobs = chunked_logprobs(hidden, weight, targets, chunk_rows=4).logprobs_R.sum()
    with _SeesShapes() as seen:
        logprobs.backward()
    assert (tuple(weight.shape) in seen.shapes) == (not is_frozen)
    assert (weight.grad is None) == is_frozen


def test_statistics_are_entropy_mean_logit_and_top_one():
    hidden, weight, targets = inputs()
    logits, _ = plain(hidden, weight, targets)
    found = chunked_logprobs(hidden, weight, targets, chunk_rows=5, with_statistics=True)
    statistics = found.statistics_R3
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    expected = torch.stack([entropy, logits.mean(-1), (logits.argmax(-1) == targets).double()], 1)
    torch.testing.assert_close(statistics, expected.float(), rtol=1e-6, atol=1e-6)
    assert not statistics.requires_grad


def test_autocast_runs_products_in_its_dtype_and_sums_in_float32():
    hidden, weight, targets = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_logprobs(hidden, weight, targets).logprobs_R
    exact = chunked_logprobs(hidden, weight, targets).logprobs_R
    assert found.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < 0.1
    found.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_no_logits_of_all_rows_exist(monkeypatch):
    """The largest tensor with a vocabulary dimension is one chunk."""
    seen = []
    original = torch.nn.functional.linear

    def spy(*args, **kwargs):
        out = original(*args, **kwargs)
        seen.append(out.shape)
        return out

    monkeypatch.setattr("sdpo_scale.modeling.logprobs.F.linear", spy)
    hidden, weight, targets = inputs()
    chunked_logprobs(hidden, weight, targets, chunk_rows=4).logprobs_R.sum().backward()
    assert len(seen) == 2 * 4  # four chunks, in the forward and again in the backward
    assert max(shape[0] for shape in seen) == 4


@pytest.mark.parametrize("logit_map", MAPS, ids=str)
def test_norms_are_those_of_onehot_minus_softmax(logit_map):
    hidden, weight, targets = inputs()
    logits, _ = plain(hidden, weight, targets, logit_map)
    onehot = torch.nn.functional.one_hot(targets, logits.shape[1])
    expected = (onehot - logits.softmax(dim=-1)).norm(dim=-1)
    found = chunked_logprobs(
        hidden, weight, targets, logit_map=logit_map, chunk_rows=5, with_norms=True
    ).norms_R
    assert (found - expected).abs().max() < FLOAT64_ENUMERATION


@pytest.mark.parametrize("logit_map", MAPS, ids=str)
def test_rows_without_gradient_are_left_out_of_the_backward_and_change_nothing(logit_map):
    weights = torch.tensor([0.0, 1.0, 0.0, 0.0, -2.0, 0.5, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    found = []
    for with_norms in (False, True):
        hidden, weight, targets = inputs()
        output = chunked_logprobs(
            hidden, weight, targets, logit_map=logit_map, chunk_rows=2, with_norms=with_norms
        )
        (output.logprobs_R * weights).sum().backward()
        found.append((hidden.grad, weight.grad))
    for dense, sparse in zip(*found, strict=True):
        assert (dense - sparse).abs().max() < FLOAT64_ENUMERATION


def test_a_backward_without_any_gradient_leaves_zeros():
    hidden, weight, targets = inputs()
    output = chunked_logprobs(hidden, weight, targets, with_norms=True)
    (output.logprobs_R * 0.0).sum().backward()
    assert float(hidden.grad.abs().max()) == float(weight.grad.abs().max()) == 0.0
