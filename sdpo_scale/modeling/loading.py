"""Tokenizer, config and model by name, with everything refused that could be silently wrong.

Order matters to users: config and tokenizer are small and come first, weights last, so that a wrong
option or row is named before anything expensive starts.
"""

import hashlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sdpo_scale import demo
from sdpo_scale.modeling.attention import select_backend
from sdpo_scale.modeling.logprobs import bind_logprob_forward

__all__ = [
    "FAMILIES",
    "check_config",
    "empty_model",
    "load_config",
    "load_model",
    "load_tokenizer",
    "matmul_parameters",
    "model_fingerprint",
    "prepare_model",
]

logger = logging.getLogger(__name__)

FAMILIES = ("gemma2", "llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of the families whose packed log-probabilities and gradients the tests compare
with the plain model's. Any other is refused: an attention or head detail that packs ignore would be
silently wrong."""


def resolve_model_name(name: str, *, cache_dir: Path) -> str:
    """``demo`` → the folder of the demonstration model; any other name is returned as it is."""
    return str(demo.model_path(cache_dir)) if name == "demo" else name


def load_config(name: str, **kwargs: Any) -> PreTrainedConfig:
    """The config of a model folder or Hub name.

    Raises:
        ValueError: its family is not supported, or there is no such model.
    """
    try:
        config = AutoConfig.from_pretrained(name, **kwargs)
    except OSError as error:
        raise ValueError(f"model {name!r} cannot be read: {error}") from error
    check_config(config, name=name)
    return config


def check_config(config: PreTrainedConfig, *, name: str) -> None:
    """Refuses a model whose family is not tested.

    Raises:
        ValueError: names the family and the supported ones.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model {name!r} is of family {config.model_type!r}, which is not tested with packed "
            f"attention yet; supported families: {', '.join(FAMILIES)}"
        )


def load_tokenizer(
    name: str, *, eos_token: str | None = None, chat_template: str | None = None, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub name, with the user's end token and chat template if given.

    Args:
        name: folder or Hub name.
        eos_token: replaces the tokenizer's end-of-sequence token.
        chat_template: a Jinja template, or the path of a file that holds one.
        kwargs: passed to ``AutoTokenizer.from_pretrained``.

    Raises:
        ValueError: there is no such tokenizer, or ``eos_token`` is not one token of its vocabulary.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    except OSError as error:
        raise ValueError(f"tokenizer {name!r} cannot be read: {error}") from error
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise ValueError(
                f"eos_token {eos_token!r} is not in the vocabulary of tokenizer {name!r}"
            )
        tokenizer.eos_token = eos_token
    if chat_template is not None:
        path = Path(chat_template)
        looks_like_path = "{" not in chat_template and "\n" not in chat_template
        if looks_like_path and not path.is_file():
            raise ValueError(
                f"chat_template {chat_template!r} is neither a file nor a Jinja template"
            )
        tokenizer.chat_template = path.read_text("utf-8") if looks_like_path else chat_template
    return tokenizer


def load_model(name: str, **kwargs: Any) -> PreTrainedModel:
    """The model of a folder or Hub name, parameters in float32 unless ``dtype`` says otherwise.

    Float32 parameters are the master weights: at DPO's learning rates (about 1e-6) an update is
    smaller than bfloat16's resolution and would be rounded away. Computation in bfloat16 is
    autocast's job.

    Under FSDP2 with ``fsdp_cpu_ram_efficient_loading`` the first process of each node reads them
    and the others hold empty ones until sharding; under ZeRO-3 they are partitioned as they are
    read.
    """
    kwargs.setdefault("dtype", torch.float32)
    return AutoModelForCausalLM.from_pretrained(name, **kwargs)


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of a config whose parameters have shapes and no memory, to be counted."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def prepare_model(
    model: PreTrainedModel, *, device: torch.device, compute_dtype: torch.dtype
) -> None:
    """Chooses the attention backend, says which and why, and binds the packed forward.

    Args:
        model: a causal language model of a supported family.
        device: where it will run.
        compute_dtype: dtype of its matrix products: autocast's, or its parameters'.
    """
    check_config(model.config, name=model.config._name_or_path or type(model).__name__)
    backend, reason = select_backend(
        device=device,
        dtype=compute_dtype,
        has_softcap=getattr(model.config, "attn_logit_softcapping", None) is not None,
    )
    logger.info("attention: %s (%s)", backend, reason)
    bind_logprob_forward(model, backend=backend)


def matmul_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Parameters in matrix products: ``body_parameters`` and ``head_parameters``."""
    modules: Any = model.get_output_embeddings(), model.get_input_embeddings()
    head, embedding = (module.weight for module in modules)
    tables = _numel(head) + (0 if head is embedding else _numel(embedding))
    num_parameters = sum(map(_numel, model.parameters()))
    return {"body_parameters": num_parameters - tables, "head_parameters": _numel(head)}


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # ZeRO-3's are empty in between


def model_fingerprint(
    model: PreTrainedModel,
    *,
    gathered: Callable[[Tensor], AbstractContextManager[None]] | None = None,
) -> str:
    """SHA-256 over the config and the bytes of every parameter and buffer.

    Contents, not names or times: weights replaced in the same folder give another fingerprint.

    Args:
        model: any model.
        gathered: a context within which a tensor of the model is whole, if it is not already.
    """
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for key in ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"):
        config.pop(key, None)
    digest.update(repr(sorted(config.items(), key=lambda item: item[0])).encode())
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        with gathered(tensor) if gathered is not None else nullcontext():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            contiguous = tensor.detach().to("cpu").contiguous()
            digest.update(contiguous.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
