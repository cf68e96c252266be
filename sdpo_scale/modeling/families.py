"""What families of models add to a plain decoder, and which of it packs cannot have.

A family is in ``FAMILIES`` if the tests compare its packed log-probabilities and gradients, and
those of pruned recomputation, with the plain model's. Any other is refused by name: an attention or
head detail that packs ignore would be silently wrong. What families bring along:

    head         a bias (Phi), a scale (Cohere 2, Granite), a soft cap (Gemma 2)
    attention    a window, soft caps, sinks, two head dims: arguments of
                 :func:`~sdpo_scale.modeling.attention.varlen_attention_forward`
    noise        dropout, jitter of a router's input: switched off
    positions    tables that end (GPT-2), frequencies that follow the longest sequence of a batch
                 (rotary types ``dynamic`` and ``longrope``): limits on the length of a sequence
    experts      a token passes through some of them; the router's load-balancing loss, a function
                 of all tokens that were routed, is refused
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

__all__ = [
    "FAMILIES",
    "IDENTITY",
    "LogitMap",
    "PositionLimit",
    "check_config",
    "executed_experts",
    "has_attention_sinks",
    "has_attention_softcap",
    "logit_map_of",
    "position_limit",
    "switch_off_noise",
]

FAMILIES = (
    *("cohere2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox"),
    *("gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "phi", "phi3", "qwen2"),
    *("qwen3", "qwen3_moe", "smollm3", "starcoder2"),
)
"""``model_type`` of every supported family."""

_NOISE = ("residual_dropout", "embedding_dropout", "jitter_noise")
"""Attributes of modules (Starcoder2, Mixtral) that are the size of some noise in training."""


@dataclass(frozen=True, slots=True)
class LogitMap:
    """f(z) = softcap · tanh(scale · z / softcap), or f(z) = scale · z: products to logits."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, product_CV: Tensor) -> Tensor:
        """f; may overwrite what it is given."""
        if self.scale != 1:
            product_CV = product_CV.mul_(self.scale)
        if self.softcap is None:
            return product_CV
        return self.softcap * torch.tanh(product_CV / self.softcap)

    def slope(self, logits_CV: Tensor) -> Tensor | float | None:
        """F' as a function of f = logits; None where it is 1."""
        if self.softcap is not None:
            return (1 - (logits_CV / self.softcap) ** 2) * self.scale
        return None if self.scale == 1 else self.scale


IDENTITY = LogitMap()


def logit_map_of(config: PreTrainedConfig) -> LogitMap:
    """What a model of this config does to its head's output."""
    config_: Any = config
    match config.model_type:
        case "cohere2":
            return LogitMap(scale=config_.logit_scale)
        case "granite":
            return LogitMap(scale=1 / config_.logits_scaling)
        case "gemma2" | "gemma3_text":
            return LogitMap(softcap=config_.final_logit_softcapping)
    return IDENTITY


def has_attention_softcap(config: PreTrainedConfig) -> bool:
    """Whether attention scores are capped."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def has_attention_sinks(config: PreTrainedConfig) -> bool:
    """Whether each attention head has a learned sink."""
    return config.model_type == "gpt_oss"


def check_config(config: PreTrainedConfig, *, name: str) -> None:
    """Refuses a model whose family is not tested, or that packs cannot compute.

    Raises:
        ValueError: names the family and the supported ones, or the option and what to set.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model {name!r} is of family {config.model_type!r}, which is not tested with packed "
            f"attention yet; supported families: {', '.join(FAMILIES)}"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(
            f"model {name!r} has use_bidirectional_attention: true: its tokens see what follows "
            "them, so it has no log-probabilities of responses to train"
        )
    weight = getattr(config, "router_aux_loss_coef", 0.0)
    if getattr(config, "output_router_logits", False) and weight > 0:
        raise ValueError(
            f"model {name!r} asks for its router's load-balancing loss (output_router_logits: "
            f"true, router_aux_loss_coef: {weight}), which is refused: it is a function of all "
            "tokens that were routed, so no estimator covers it where tokens are pruned, and a "
            "shared prompt would count once; set model_init_kwargs: {output_router_logits: false} "
            "to train without it"
        )


@dataclass(frozen=True, slots=True)
class PositionLimit:
    """The longest sequence that a model can take in a pack, and why."""

    tokens: int
    reason: str


def position_limit(config: PreTrainedConfig) -> PositionLimit | None:
    """How long sequences may be; None where only quality sets a limit."""
    if config.model_type == "gpt2":
        return PositionLimit(config.n_positions, "a learned position table cannot be extended")
    limits = []
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            limits.append(int(rope["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            limits.append(int(config.max_position_embeddings))
    if not limits:
        return None
    return PositionLimit(
        min(limits),
        "beyond that its rotary frequencies follow the longest sequence of a batch, so other pairs "
        "would change with it",
    )


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Those of the model, or of each of its kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [part for part in parameters.values() if isinstance(part, dict)]
    yield from by_layer or [parameters]


def executed_experts(config: PreTrainedConfig) -> tuple[int, int]:
    """(experts that a token passes through, experts of a layer); (1, 1) without a router."""
    count = getattr(config, "num_local_experts", None)
    return (1, 1) if count is None else (int(config.num_experts_per_tok), int(count))


def switch_off_noise(model: nn.Module) -> None:
    """Makes a model's outputs functions of its parameters, in training too."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in vars(module).keys() & set(_NOISE):
            setattr(module, name, 0.0)
