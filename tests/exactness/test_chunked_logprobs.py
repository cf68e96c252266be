"""The chunked head against log_softmax of all logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sdpo_scale.modeling.logprobs import chunked_logprobs
from tests.helpers.tolerances import FLOAT64_ENUMERATION


def inputs(dtype=torch.float64, rows=13, width=8, vocab=31):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, width, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return hidden, weight, targets


def plain(hidden, weight, targets, softcap):
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits, logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk_rows", [1, 4, 13, None])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_logprobs_and_gradients_equal_log_softmax_in_float64(softcap, chunk_rows):
    hidden, weight, targets = inputs()
    grad = torch.randn(len(targets), dtype=torch.float64)
    _, expected = plain(hidden, weight, targets, softcap)
    expected_gradients = torch.autograd.grad(expected, (hidden, weight), grad)
    found = chunked_logprobs(
        hidden, weight, targets, softcap=softcap, chunk_rows=chunk_rows
    ).logprobs_R
    found_gradients = torch.autograd.grad(found, (hidden, weight), grad)
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
    logits, _ = plain(hidden, weight, targets, None)
    statistics = chunked_logprobs(
        hidden, weight, targets, chunk_rows=5, with_statistics=True
    ).statistics_R3
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


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_norms_are_those_of_onehot_minus_softmax(softcap):
    hidden, weight, targets = inputs()
    logits, _ = plain(hidden, weight, targets, softcap)
    onehot = torch.nn.functional.one_hot(targets, logits.shape[1])
    expected = (onehot - logits.softmax(dim=-1)).norm(dim=-1)
    found = chunked_logprobs(
        hidden, weight, targets, softcap=softcap, chunk_rows=5, with_norms=True
    ).norms_R
    assert (found - expected).abs().max() < FLOAT64_ENUMERATION


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_square_sums_are_the_logarithm_of_summed_squared_probabilities(softcap, with_norms):
    hidden, weight, targets = inputs()
    logits, _ = plain(hidden, weight, targets, softcap)
    expected = logits.softmax(dim=-1).square().sum(dim=-1).log()
    asked = {"chunk_rows": 5, "with_norms": with_norms, "with_square_sums": True}
    found = chunked_logprobs(hidden, weight, targets, softcap=softcap, **asked).square_sums_R
    assert (found - expected).abs().max() < FLOAT64_ENUMERATION
    assert not found.requires_grad


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_rows_without_gradient_are_left_out_of_the_backward_and_change_nothing(softcap):
    weights = torch.tensor([0.0, 1.0, 0.0, 0.0, -2.0, 0.5, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    found = []
    for with_norms in (False, True):
        hidden, weight, targets = inputs()
        output = chunked_logprobs(
            hidden, weight, targets, softcap=softcap, chunk_rows=2, with_norms=with_norms
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
