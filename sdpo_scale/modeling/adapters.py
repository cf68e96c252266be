"""LoRA and QLoRA through peft: what may be adapted, and the base model as reference.

A run's model is then a ``PeftModel`` around the model that :mod:`.loading` reads. What this file
decides:

    which adapters   those whose log-probabilities are functions of the parameters alone, that leave
                     the head to the chunked loss, and that an export gives back exactly; others
                     are refused before weights are read
    the reference    a new adapter starts at the base model, which is scored with the adapter off:
                     its cache is that of the plain model, whatever the adapter. An adapter that
                     training continues is scored as it is, or off, as ``adapter_reference`` says

peft is imported where it is needed: runs without adapters do without it.
"""

import copy
import dataclasses
import importlib.util
import logging
import warnings
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils.peft_utils import find_adapter_config_file

from sdpo_scale.modeling.adapted import (
    adapter_config_of,
    base_model_of,
    describe_parameters,
    is_adapted,
    is_adapter_name,
    skeleton_of,
)

__all__ = [
    "Adapter",
    "check_adapter_options",
    "plan_adapter",
    "quantization",
]

logger = logging.getLogger(__name__)

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "bias": (("none",), "biases of the base model are not switched off with the adapter"),
    "init_lora_weights": ((True, "gaussian"), "the adapter would not start as the base model"),
    "target_parameters": ((None, []), "only modules are tested"),
    "trainable_token_indices": ((None,), "set modules_to_save to the embedding instead"),
    "layer_replication": ((None,), "the export would be another architecture"),
    "alora_invocation_tokens": ((None,), "it depends on tokens, which packs share"),
    "lora_bias": ((False,), "merging it needs biases that the base model has not"),
}
"""Fields of ``LoraConfig`` → the values that are accepted, and why no other."""

_NO_MERGE = (
    "merge_adapter = True is refused with a quantized model (load_in_4bit): the merged weights "
    "would be rounded to its precision; export the adapter and merge it into the base model in "
    "full precision"
)


def check_adapter_options(options: Any) -> None:
    """Checks the adapter options of a config among themselves.

    Args:
        options: an ``SDPOConfig``.

    Raises:
        ValueError: names the option and a way out.
    """
    for name, choices in (
        ("adapter_reference", ("start", "base")),
        ("bnb_4bit_quant_type", ("nf4", "fp4")),
    ):
        if getattr(options, name) not in choices:
            raise ValueError(
                f"{name} {getattr(options, name)!r} is unknown; choose {' or '.join(choices)}"
            )
    if options.lora_dropout != 0:
        raise ValueError(
            f"lora_dropout = {options.lora_dropout} is refused: log-probabilities must be "
            "functions of the parameters alone; set it to 0 (TRL switches it off as well, by "
            "disable_dropout)"
        )
    for name in ("lora_r", "lora_alpha"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(options, name)}")
    _check_effect(options)
    if options.load_in_8bit:
        raise ValueError(
            "load_in_8bit = True is refused: the first step's policy was off its own reference by "
            "0.04 nats per token (bitsandbytes 0.50), so its log-probabilities are not functions "
            "of the parameters alone; use load_in_4bit"
        )
    if options.load_in_4bit and options.merge_adapter:
        raise ValueError(_NO_MERGE)


def _check_effect(options: Any) -> None:
    if options.use_peft:
        return
    defaults = {f.name: f.default for f in dataclasses.fields(options)}
    for name in ["use_rslora", "use_dora", *(n for n in defaults if n.startswith("lora_"))]:
        if getattr(options, name) != defaults[name]:
            raise ValueError(
                f"{name} = {getattr(options, name)!r} has no effect without use_peft: true"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of a run: a new one, or one whose training continues."""

    config: Any
    """The ``peft.LoraConfig``."""
    folder: str | None = None
    """Where a saved one is: a folder or a Hub name."""
    is_new: bool = True
    reference: str = "start"
    """``start`` or ``base``: of an adapter that is not new, what the reference is."""

    @property
    def base_name(self) -> str:
        """Folder or Hub name of the model that a saved adapter belongs to."""
        return str(self.config.base_model_name_or_path)

    @property
    def is_off_in_reference(self) -> bool:
        """Whether the reference is the base model: a new adapter starts there."""
        return self.is_new or self.reference == "base"

    @property
    def starts_at_reference(self) -> bool:
        """Whether all log-ratios are 0 before the first update."""
        return self.is_new or self.reference == "start"

    @property
    def description(self) -> str:
        """The options of the adapter as text, the same in every process."""
        options = self.config.to_dict()
        del options["base_model_name_or_path"]  # a node may have its own copy
        # sets have another order in each process
        sortable = ((n, sorted(v) if isinstance(v, set) else v) for n, v in options.items())
        return repr(sorted(sortable, key=lambda item: item[0]))

    def check(self, config: PreTrainedConfig) -> None:
        """Adapts the empty model of a config, so that mistakes show before weights are read.

        Raises:
            ValueError: a target that the model has not, or that cannot be adapted.
        """
        import peft

        empty, own_config = skeleton_of(config), copy.deepcopy(self.config)
        with warnings.catch_warnings(action="ignore"):  # they come again with the real model
            adapted = peft.get_peft_model(empty, own_config, low_cpu_mem_usage=True)
        _check_modules(adapted)

    def attach(self, model: PreTrainedModel, *, seed: int, merges: bool) -> PreTrainedModel:
        """The model with the adapter, ready to train.

        Args:
            model: the base model with its weights, or an adapted one, which stays as it is.
            seed: of a new adapter's weights: the same on every rank.
            merges: whether the export is to have the adapter merged in.

        Raises:
            ValueError: an adapter that cannot be trained here, or merged.
        """
        import peft

        if merges and getattr(base_model_of(model), "hf_quantizer", None) is not None:
            raise ValueError(_NO_MERGE)

        # DeepSpeed keeps float32 masters, and ZeRO-3 gathers parameters of one dtype together
        floats: Any = {"autocast_adapter_dtype": not is_deepspeed_zero3_enabled()}
        adapted: Any = model
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            # peft 0.21 asks by the name that transformers 5.24 has replaced; until it has the new
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            torch.manual_seed(seed)
            if self.folder is not None:
                adapted = peft.PeftModel.from_pretrained(
                    model, self.folder, config=self.config, is_trainable=True, **floats
                )
            elif self.is_new:
                adapted = peft.get_peft_model(model, self.config, **floats)
        _check_modules(adapted)
        _check_trained(adapted)
        reference = "the base model" if self.is_off_in_reference else "the adapter as it is now"
        logger.info("adapter: %s; reference: %s", describe_parameters(adapted), reference)
        trained: PreTrainedModel = adapted  # whose attributes it has
        return trained


def plan_adapter(
    options: Any, model: Any, peft_config: Any = None, **hub_options: Any
) -> Adapter | None:
    """The adapter of a run, of all the ways to ask for one; None if the model itself is trained.

    Args:
        options: an ``SDPOConfig``.
        model: a model, or the folder or Hub name of a model or adapter.
        peft_config: a ``LoraConfig`` of a new adapter; that of ``options`` if not given.
        hub_options: where the files of a model by name come from.

    Raises:
        ValueError: an adapter that cannot be trained here, two at once, or a package is missing.
    """
    wants_new = options.use_peft or peft_config is not None
    saved = _saved_adapter(model, hub_options) if isinstance(model, str) else None
    exists = saved is not None or (not isinstance(model, str) and is_adapted(model))
    if not (wants_new or exists):
        _refuse_options_of_adapters(options, model)
        return None
    if importlib.util.find_spec("peft") is None:
        raise ValueError("adapters need the package peft: pip install 'sdpo-scale[peft]'")
    if wants_new and exists:
        raise ValueError(
            "the model is an adapter already, and use_peft or peft_config asks for another: merge "
            "it first (merge_adapter), or leave them out to continue its training"
        )
    ambiguous = sorted({"revision", "subfolder"} & hub_options.keys())
    if saved is not None and ambiguous:
        raise ValueError(
            f"model_init_kwargs: {ambiguous[0]} could mean the adapter's or its base model's; "
            "download the adapter and give its folder as model"
        )
    if options.use_peft and peft_config is not None:
        raise ValueError("peft_config and use_peft: true both describe an adapter; give one")
    if options.load_in_4bit and not isinstance(model, str):
        raise ValueError(
            "load_in_4bit acts when a model is read: give its name, or a model that was loaded "
            "with a quantization_config"
        )
    if exists:
        config = adapter_config_of(model) if saved is None else saved
        folder = None if saved is None else model
        adapter = Adapter(config, folder, is_new=False, reference=options.adapter_reference)
    else:
        adapter = Adapter(peft_config if peft_config is not None else _new_config(options))
    _check_config(adapter.config)
    return adapter


def _refuse_options_of_adapters(options: Any, model: Any) -> None:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "the model's adapter was added by transformers: use peft.get_peft_model or "
            "PeftModel.from_pretrained, or give the adapter's folder as model"
        )
    for name in ("load_in_4bit", "merge_adapter"):
        if getattr(options, name):
            raise ValueError(f"{name} = True needs an adapter: set use_peft: true as well")


def quantization(options: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What ``from_pretrained`` is given to read a model in 4 bits; nothing otherwise.

    Args:
        options: an ``SDPOConfig``.
        dtype: of matrix products, and of what stays unquantized. 4-bit weights are stored under it
            as well: FSDP2 shards parameters of a floating dtype and casts those of another one,
            which would change their bits.

    Raises:
        ValueError: the package is missing.
    """
    if not options.load_in_4bit:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "load_in_4bit needs the package bitsandbytes: pip install 'sdpo-scale[qlora]'"
        )
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=options.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=options.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )
    return {"quantization_config": config, "dtype": dtype}


def _saved_adapter(name: str, hub_options: dict[str, Any]) -> Any:
    """The config of a saved adapter, or None where the name is that of a model."""
    known = ("token", "cache_dir", "local_files_only", "revision", "subfolder")
    where = {n: v for n, v in hub_options.items() if n in known}
    if find_adapter_config_file(name, **where) is None:
        return None
    if importlib.util.find_spec("peft") is None:
        raise ValueError(
            f"model {name!r} is an adapter, which needs the package peft: "
            "pip install 'sdpo-scale[peft]'"
        )
    import peft

    return peft.PeftConfig.from_pretrained(name, **where)


def _new_config(options: Any) -> Any:
    import peft

    targets = options.lora_target_modules
    if isinstance(targets, list) and len(targets) == 1:
        (targets,) = targets  # TRL reads a single one as a pattern, or as all-linear
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        target_modules=targets,
        modules_to_save=options.lora_modules_to_save,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
    )


def _check_config(config: Any) -> None:
    """Refuses what of peft cannot be honoured.

    Raises:
        ValueError: names the field and its value.
    """
    import peft

    if not isinstance(config, peft.LoraConfig):
        kind = getattr(config, "peft_type", type(config).__name__)
        raise ValueError(f"adapters of type {kind!s} are not tested here; use peft.LoraConfig")
    for name, (accepted, reason) in _REFUSED.items():
        value = getattr(config, name, accepted[0])
        if value not in accepted:
            raise ValueError(
                f"peft_config: {name} = {value!r} is refused: {reason}; accepted: {accepted[0]!r}"
            )
    if config.lora_dropout:
        logger.warning(
            "lora_dropout %s is off in this run, as all dropout: log-probabilities must be "
            "functions of the parameters alone",
            config.lora_dropout,
        )


def _check_modules(model: Any) -> None:
    """Refuses adapters of the head and of embeddings that the loss or an export would lose.

    Raises:
        ValueError: names the module and what to do.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = base_model_of(model)
    is_tied = bool(base.config.tie_word_embeddings)
    tables = {"head": base.get_output_embeddings(), "embedding": base.get_input_embeddings()}
    for kind, module in tables.items():
        name = next(n for n, other in base.named_modules() if other is module)
        if is_tied and (isinstance(module, BaseTunerLayer) or hasattr(module, "modules_to_save")):
            raise ValueError(
                f"{name} is adapted, but head and embedding of this model are one weight: a merged "
                "or reloaded model would differ from the trained one; leave both out of "
                "lora_target_modules and lora_modules_to_save"
            )
        if isinstance(module, BaseTunerLayer):
            raise ValueError(
                f"{name}, the {kind}, is among lora_target_modules, which is not supported: the "
                f"loss computes it in chunks; train it whole with lora_modules_to_save: [{name}]"
            )


def _check_trained(model: Any) -> None:
    """Refuses weights that would train and then be missing from what is saved.

    Raises:
        ValueError: nothing is trained, or something that is not part of the adapter.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "the adapter is frozen: load it with PeftModel.from_pretrained(..., is_trainable=True)"
        )
    outside = [name for name in trained if not is_adapter_name(name)]
    if outside:
        raise ValueError(
            f"{outside[0]} (one of {len(outside)}) is trained but not part of the adapter, so it "
            "would not be saved; name its module in lora_modules_to_save"
        )
