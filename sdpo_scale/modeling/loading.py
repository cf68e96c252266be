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
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.fsdp import is_fsdp_enabled

from sdpo_scale import demo
from sdpo_scale.modeling.adapted import (
    adapter_digest,
    base_model_of,
    base_state,
    is_adapted,
    numel,
)
from sdpo_scale.modeling.attention import select_backend
from sdpo_scale.modeling.families import (
    check_config,
    executed_experts,
    has_attention_sinks,
    has_attention_softcap,
)
from sdpo_scale.modeling.logprobs import bind_logprob_forward

__all__ = [
    "empty_model",
    "load_config",
    "load_model",
    "load_tokenizer",
    "matmul_parameters",
    "model_fingerprint",
    "prepare_model",
]

logger = logging.getLogger(__name__)


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

    Under ZeRO-3 parameters are partitioned as they are read. Under FSDP2 with
    ``fsdp_cpu_ram_efficient_loading`` the first process alone reads them, and the others get empty
    ones, whose memory is never touched, until shards are handed out; buffers that are in no file,
    such as rotary frequencies, come from the first process in ``Sharding.share_buffers``.
    """
    kwargs.setdefault("dtype", torch.float32)
    is_quantized = "quantization_config" in kwargs
    if is_fsdp_enabled() and dist.get_rank() > 0 and not is_quantized:
        return _empty_copy(name, **kwargs)
    return AutoModelForCausalLM.from_pretrained(name, **kwargs)


def _empty_copy(name: str, *, dtype: torch.dtype | str, **kwargs: Any) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(name, **kwargs)
    model = empty_model(config, dtype=dtype, trust_remote_code=kwargs.get("trust_remote_code"))
    model.to_empty(device="cpu")  # not meta: Accelerate tells parameters apart by their addresses
    model.tie_weights()
    return model.eval()


def empty_model(config: PreTrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """A model of a config whose parameters have shapes and no memory, to be counted or filled."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **kwargs)
    return model


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
        has_softcap=has_attention_softcap(model.config),
        has_sinks=has_attention_sinks(model.config),
    )
    logger.info("attention: %s (%s)", backend, reason)
    bind_logprob_forward(base_model_of(model), backend=backend)


def matmul_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Parameters in matrix products of one token: ``body_parameters`` and ``head_parameters``.

    Also how many of both are trained, ``trained_body_parameters`` and ``trained_head_parameters``:
    frozen ones have no gradient of their own to compute. Of a layer's experts those count that a
    token passes through.
    """
    base = base_model_of(model)
    head: Any = base.get_output_embeddings()
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables.add(id(head.weight))
    executed, num_experts = executed_experts(base.config)

    def count(name: str, parameter: Tensor) -> int:
        share = executed if ".experts." in name else num_experts
        return numel(parameter) * share // num_experts

    body = [
        (count(name, parameter), parameter.requires_grad)
        for name, parameter in model.named_parameters()
        # the copy that is trained takes part, its original does not
        if id(parameter) not in tables and "original_module" not in name
    ]
    return {
        "body_parameters": sum(size for size, _ in body),
        "head_parameters": numel(head.weight),
        "trained_body_parameters": sum(size for size, is_trained in body if is_trained),
        "trained_head_parameters": numel(head.weight) if head.weight.requires_grad else 0,
    }


def model_fingerprint(
    model: PreTrainedModel,
    *,
    gathered: Callable[[Tensor], AbstractContextManager[None]] | None = None,
    with_adapter: bool = True,
) -> str:
    """SHA-256 over the config and the bytes of every parameter and buffer.

    Contents, not names or times: weights replaced in the same folder give another fingerprint.
    Without its adapter, a model has the fingerprint of its base model.

    Args:
        model: any model.
        gathered: a context within which a tensor of the model is whole, if it is not already.
        with_adapter: whether the adapter, where the model has one, counts.
    """
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for key in ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"):
        config.pop(key, None)
    digest.update(repr(sorted(config.items(), key=lambda item: item[0])).encode())

    def add(name: str, tensor: Tensor) -> None:
        with gathered(tensor) if gathered is not None else nullcontext():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            contiguous = tensor.detach().to("cpu").contiguous()
            digest.update(contiguous.view(-1).view(torch.uint8).numpy().data)

    for name, tensor in sorted(base_state(model).items()):
        add(name, tensor)
    if with_adapter and is_adapted(model):
        adapter_digest(model, digest, add)
    return digest.hexdigest()
