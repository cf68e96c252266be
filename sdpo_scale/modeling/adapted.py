"""What is done with a model that has a LoRA adapter: switch it off, tell its weights apart.

A run's model is then a ``PeftModel`` around the model that :mod:`.loading` reads. Names of its
weights, for a layer ``q_proj`` of the base model:

    q_proj.base_layer.weight                               frozen, plain name q_proj.weight
    q_proj.lora_A.default.weight, q_proj.lora_B....        the adapter
    lm_head.original_module.weight                         frozen, plain name lm_head.weight
    lm_head.modules_to_save.default.weight                 its copy, trained whole
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

__all__ = [
    "adapter_config_of",
    "adapter_digest",
    "adapter_off",
    "base_model_of",
    "base_state",
    "describe_parameters",
    "is_adapted",
    "is_adapter_name",
    "numel",
    "prepare_checkpointing",
    "skeleton_of",
]

_ADAPTER_PARTS = frozenset({"lora_A", "lora_B", "lora_magnitude_vector", "modules_to_save"})
_WRAPPER_PARTS = frozenset({"base_layer", "original_module"})
"""Parts of a parameter's name that peft adds: of adapters, and around what it has wrapped."""


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is a ``PeftModel``."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_model_of(model: Any) -> PreTrainedModel:
    """The transformers model within a ``PeftModel``, with the adapter's layers; or the model."""
    base: PreTrainedModel = model.get_base_model() if is_adapted(model) else model
    return base


def adapter_config_of(model: Any) -> Any:
    """The config of the one adapter that a model has.

    Raises:
        ValueError: it has several.
    """
    if len(model.peft_config) != 1:
        raise ValueError(
            f"the model has several adapters ({', '.join(model.peft_config)}); delete all but the "
            "one to train"
        )
    (config,) = model.peft_config.values()
    return config


def prepare_checkpointing(model: nn.Module, args: TrainingArguments) -> None:
    """Makes transformers' activation checkpointing work on frozen weights.

    The reentrant kind loses all gradients unless its input, the frozen embedding's output, asks for
    one. It is the default under ZeRO-3, where the other kind was seen to recompute with frozen
    weights that were partitioned again (deepspeedai/DeepSpeed#8148; not by DeepSpeed 0.19.8 on
    CPUs, so it can be asked for).
    """
    if not args.activation_checkpointing:
        return
    given: Any = args.activation_checkpointing_kwargs or {}
    if is_deepspeed_zero3_enabled():
        given = args.activation_checkpointing_kwargs = {"use_reentrant": True, **given}
    if given.get("use_reentrant"):
        base_model_of(model).enable_input_require_grads()


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Within, an adapted model computes what its base model does; for use without gradients.

    peft also marks adapters as frozen meanwhile. FSDP2 creates its gathered parameters at first use
    and takes the mark over, so it is undone at once.
    """
    marks = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with model.disable_adapter():
        _mark(marks)
        yield
    _mark(marks)


def _mark(marks: list[tuple[Tensor, bool]]) -> None:
    for parameter, requires_grad in marks:
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the base model, under the names they have without an adapter."""
    plain = {}
    for name, tensor in base_model_of(model).state_dict(keep_vars=True).items():
        parts = name.split(".")
        if not _ADAPTER_PARTS.intersection(parts):
            plain[".".join(part for part in parts if part not in _WRAPPER_PARTS)] = tensor
    return plain


def is_adapter_name(name: str) -> bool:
    """Whether a parameter of a ``PeftModel`` belongs to the adapter, by its name."""
    return not _ADAPTER_PARTS.isdisjoint(name.split("."))


def adapter_digest(model: Any, digest: "hashlib._Hash", add: Callable[[str, Tensor], None]) -> None:
    """Adds an adapter to a fingerprint: what its config makes of the weights, and the weights."""
    config = adapter_config_of(model)
    names = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
    digest.update(repr([(name, getattr(config, name)) for name in names]).encode())
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if is_adapter_name(name):
            add(name, tensor)


def skeleton_of(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config on the meta device: names and shapes, no numbers."""
    config = type(config).from_dict(config.to_dict())
    # the class itself: under ZeRO-3 from_config would start to partition
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)
    return model


def numel(parameter: Any) -> int:
    """Number of weights, where the tensor does not say: partitioned, or two in a byte."""
    count = int(getattr(parameter, "ds_numel", parameter.numel()))  # ZeRO-3's are empty in between
    if type(parameter).__name__ == "Params4bit":
        count *= 2 * parameter.element_size()
    return count


def describe_parameters(model: nn.Module) -> str:
    """How many parameters are trained and how many frozen, by dtype."""
    numels: Counter[tuple[bool, torch.dtype]] = Counter()
    for parameter in model.parameters():
        numels[parameter.requires_grad, parameter.dtype] += numel(parameter)
    return ", ".join(
        f"{count:,} {'trained' if is_trained else 'frozen'} in {dtype}".replace("torch.", "")
        for (is_trained, dtype), count in sorted(numels.items(), key=str, reverse=True)
    )
