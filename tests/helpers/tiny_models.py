"""One tiny random model per supported family, made so that mistakes show.

Fresh initializations are nearly linear: attention is almost uniform and a soft cap almost the
identity, so a wrong mask or a forgotten cap changes little. Here every matrix is scaled up until
attention is peaked and the caps bend what passes through them; biases and sinks are not 0, scales
are not 1, and windows are shorter than a test's sequences.
"""

import types
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

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
_SLIDING = {"sliding_window": SLIDING_WINDOW}
_LAYERS_3 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    **_SLIDING,
}
_GEMMA3 = {
    **_LAYERS_3,
    "query_pre_attn_scalar": 12,
    "final_logit_softcapping": 0.5,
    "tie_word_embeddings": True,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
}
_PHI3_LONGROPE = {
    "sliding_window": None,
    "rope_parameters": _LONGROPE,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_GRANITE = {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 4.0,
    "tie_word_embeddings": True,
}
_SMOLLM3 = {"no_rope_layer_interval": 2, "use_sliding_window": True, **_LAYERS_3}
_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "tie_word_embeddings": True,
    "scale_attn_by_inverse_layer_idx": True,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN3_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
_GPT_OSS = {**_EXPERTS, **_LAYERS_3, "rope_parameters": _YARN}
_DEEPSEEK_V3 = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "rope_parameters": _YARN,
}
# name of a family here → the classes' name in transformers, options
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2_sliding": ("Qwen2", _QWEN2_SLIDING),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_sliding": ("Mistral", _SLIDING),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", _GEMMA2),
    "gemma3_text": ("Gemma3", _GEMMA3),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", _SLIDING),
    "phi3_longrope": ("Phi3", _PHI3_LONGROPE),
    "olmo2": ("Olmo2", {}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", _GPT2),
    "granite": ("Granite", _GRANITE),
    "smollm3": ("SmolLM3", _SMOLLM3),
    "starcoder2": ("Starcoder2", _SLIDING),
    "glm4": ("Glm4", {}),
    "cohere2": ("Cohere2", {**_LAYERS_3, "logit_scale": 0.25, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {**_EXPERTS, **_SLIDING}),
    "qwen3_moe": ("Qwen3Moe", _QWEN3_MOE),
    "gpt_oss": ("GptOss", _GPT_OSS),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK_V3),
}
FAMILIES = tuple(_FAMILIES)
_OTHER_NAMES = {"Gemma3Config": "Gemma3TextConfig", "GPT2ForCausalLM": "GPT2LMHeadModel"}
_TABLES = ("embed_tokens", "embed_in", "wte", "wpe", "lm_head")
_SCORES = ("q_proj.weight", "k_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")
_FUSED = ("qkv_proj.weight", "query_key_value.weight", "c_attn.weight")


def _class(name: str) -> Any:
    return getattr(transformers, _OTHER_NAMES.get(name, name))


def model_types() -> set[str]:
    """`model_type` of all families."""
    return {_class(f"{name}Config").model_type for name, _ in _FAMILIES.values()}


def config_of(family: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """The config of `family`, changed by `overrides`."""
    name, options = _FAMILIES[family]
    return _class(f"{name}Config")(**{**_COMMON, **options, **overrides})


def build(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random model of `family`, the same for the same seed; `overrides` change its config.

    The random state of the caller is left as it was. In float64 its norms compute in float64 too,
    where transformers' would round to float32 and hide errors below 1e-7.
    """
    config = config_of(family, **overrides)
    # transformers refuses sdpa where something lies between the scores and the softmax
    config._attn_implementation = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # the default grouped product has no float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _class(f"{_FAMILIES[family][0]}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _enlarge(name, parameter)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.1)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = types.MethodType(_exact_rms_norm, module)
            elif type(module).__name__ == "Cohere2LayerNorm":
                module.forward = types.MethodType(_exact_layer_norm, module)
    return model.to(dtype)


def _enlarge(name: str, parameter: torch.Tensor) -> None:
    if any(table in name for table in _TABLES):
        parameter.normal_(std=0.3)
    elif name.endswith("sinks"):
        parameter.normal_()
    elif name.endswith(_SCORES):
        parameter.mul_(16.0)  # scores with a deviation of about 3
    elif name.endswith(_FUSED):
        parameter.mul_(12.0)
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        parameter.normal_(mean=1.8, std=0.2)  # the same, where they are normalized
    elif parameter.ndim >= 2 and not name.endswith("bias"):
        parameter.mul_(8.0)  # from the initializer's 0.02 to 1 / sqrt(fan in)
    else:  # norms and biases: away from 1 and 0, so that they cannot be left out
        parameter.add_(0.1 * torch.randn_like(parameter))


def _exact_rms_norm(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """RMSNorm without the detour through float32."""
    epsilon = getattr(self, "variance_epsilon", None) or self.eps
    normalized = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon)
    is_gemma = type(self).__name__.startswith("Gemma")
    return normalized * (1 + self.weight if is_gemma else self.weight)


def _exact_layer_norm(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Cohere's LayerNorm, which has no bias, without the detour through float32."""
    shape = (hidden.shape[-1],)
    return torch.nn.functional.layer_norm(hidden, shape, self.weight, eps=self.variance_epsilon)
