"""Tiny random models that cases of public bug reports give numbers for.

Their vocabulary is that of the toy tokenizers.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PhiConfig, PreTrainedModel

from tests.helpers.toy_tokenizers import VOCABULARY

_COMMON: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CONFIGS = {
    "phi_lm_head_bias": lambda: PhiConfig(**{**_COMMON, "num_key_value_heads": 4}),
}


def build_model(name: str, **options: Any) -> PreTrainedModel:
    """The toy model of that name in float64; `options` go to transformers.

    Its weights were drawn in float32 with seed 0 and enlarged, so that caps and biases matter.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_CONFIGS[name](), dtype=torch.float32, **options)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.mul_(8)
                elif key.endswith("lm_head.bias"):
                    parameter.normal_(0, 1)
    return model.double()
