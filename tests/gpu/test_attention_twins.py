"""On a GPU: each varlen kernel against the SDPA twin that the CPU tests verify.

pytest -m gpu tests/gpu
"""

import importlib.util

import pytest
import torch

from sdpo_scale.modeling.attention import BACKENDS, segments_of
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.packing.layout import build_layout
from tests.helpers.gradients import gradients
from tests.helpers.pairs import random_pairs
from tests.helpers.tiny_models import build

pytestmark = pytest.mark.gpu
KERNELS = {
    "torch_varlen": "torch",
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
}


@pytest.fixture(params=KERNELS)
def kernel(request):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if importlib.util.find_spec(KERNELS[request.param]) is None:
        pytest.skip(f"{KERNELS[request.param]} is not installed")
    return request.param


@pytest.mark.parametrize("window", [None, 16])
def test_the_kernels_error_is_at_most_twice_the_plain_ones(kernel, window):
    """Both in bfloat16, against the SDPA twin in float32."""
    device = torch.device("cuda")
    layout = build_layout([pair.tokens for pair in random_pairs(12, longest=200)])
    shapes = [(layout.num_tokens, 4), (len(layout.kv_index_K), 2), (len(layout.kv_index_K), 2)]
    exact = [torch.randn(rows, heads, 64, device=device) for rows, heads in shapes]
    options = {"scale": 64**-0.5, "window": window, "softcap": None}

    def run(name, dtype):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in exact]
        segments = segments_of(layout, backend=name, device=device)
        output = BACKENDS[name](*inputs, segments, **options)
        output.float().square().sum().backward()
        return [output.float(), *(tensor.grad.float() for tensor in inputs)]

    expected = run("sdpa", torch.float32)
    plain = run("sdpa", torch.bfloat16)
    found = run(kernel, torch.bfloat16)
    for right, reference, ours in zip(expected, plain, found, strict=True):
        assert (ours - right).abs().mean() <= 2 * (reference - right).abs().mean() + 1e-6


def test_a_whole_models_gradient_under_autocast(kernel):
    layout = build_layout([pair.tokens for pair in random_pairs(6)])
    results = {}
    for name in ("sdpa", kernel):
        model = build("llama", hidden_size=256, head_dim=64).cuda().train()
        bind_logprob_forward(model, backend=name)
        with torch.autocast("cuda", torch.bfloat16):
            logprobs = model(pack=layout).logprobs_R
        logprobs.sum().backward()
        results[name] = (logprobs.detach(), gradients(model))
    assert (results["sdpa"][0] - results[kernel][0]).abs().mean() < 0.1
    for name, right in results["sdpa"][1].items():
        difference = (results[kernel][1][name] - right).norm() / right.norm()
        assert difference < 0.1, name
