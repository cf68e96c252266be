"""One tiny random model per supported family, made so that mistakes show.

Fresh initializations are nearly linear: attention is almost uniform and a soft cap almost the
identity, so a wrong mask or a forgotten cap changes little. Here every matrix is scaled up until
attention is peaked and the caps bend what passes through them.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SLIDING_WINDOW = 8  # shorter than a test's sequences, so that it masks

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_GEMMA2: dict[str, Any] = {
    "num_hidden_layers": 3,  # sliding, full, sliding
    "sliding_window": SLIDING_WINDOW,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 0.5,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
# Qwen2: layers under `max_window_layers` attend in full, the rest within the window.
_QWEN2_SLIDING: dict[str, Any] = {
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": SLIDING_WINDOW,
    "max_window_layers": 1,
}
_Family = tuple[Callable[..., Any], Callable[..., PreTrainedModel], dict[str, Any]]
_FAMILIES: dict[str, _Family] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama_tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2_sliding": (Qwen2Config, Qwen2ForCausalLM, _QWEN2_SLIDING),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral_sliding": (MistralConfig, MistralForCausalLM, {"sliding_window": SLIDING_WINDOW}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, _GEMMA2),
}
FAMILIES = tuple(_FAMILIES)


def build(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random model of `family`, the same for the same seed; `overrides` change its config.

    The random state of the caller is left as it was. In float64 its norms compute in float64 too,
    where transformers' would round to float32 and hide errors below 1e-7.
    """
    config_class, model_class, family_options = _FAMILIES[family]
    config = config_class(**{**_COMMON, **family_options, **overrides})
    # transformers refuses sdpa for Gemma2: its soft cap lies between the scores and the softmax.
    config._attn_implementation = "eager" if family == "gemma2" else "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "embed_tokens" in name or "lm_head" in name:
                    parameter.normal_(std=0.3)
                elif name.endswith(("q_proj.weight", "k_proj.weight")):
                    parameter.mul_(16.0)  # scores with a deviation of about 3
                elif name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.normal_(mean=1.8, std=0.2)  # the same, where they are normalized
                elif parameter.ndim == 2:
                    parameter.mul_(8.0)  # from the initializer's 0.02 to 1 / sqrt(fan in)
                else:  # norms and biases: away from 1 and 0, so that they cannot be left out
                    parameter.add_(0.1 * torch.randn_like(parameter))
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = types.MethodType(_exact_rms_norm, module)
    return model.to(dtype)


def _exact_rms_norm(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """RMSNorm without the detour through float32."""
    epsilon = getattr(self, "variance_epsilon", None) or self.eps
    normalized = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon)
    is_gemma = type(self).__name__.startswith("Gemma")
    return normalized * (1 + self.weight if is_gemma else self.weight)
