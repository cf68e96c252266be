"""What a script written for TRL's DPOTrainer may say, and what becomes of it here.

An option of TRL or transformers is in one of four places:

    a field of SDPOConfig    it means here what it means there
    ``TRLOptions``           it is accepted; where it cannot matter here, the log says so once
    ``_REFUSED``, ``_ONLY``  values that would not do here what they say, with what to do instead
    ``REMOVED``              names that TRL itself has given up, with what has replaced them

TRL 1.16 counts pairs per device; here a step has ``train_batch_size`` pairs, whatever the hardware.
Its two options are multiplied where they are given, and only there: see ``pairs_per_step``.
"""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import BitsAndBytesConfig, TrainingArguments

from sdpo_scale.modeling.adapters import check_adapter_options

__all__ = [
    "AUTO",
    "DEFAULT_PAIRS",
    "IN_MODEL_CONFIG",
    "PER_DEVICE",
    "REMOVED",
    "TRLOptions",
    "check_arguments",
    "check_values",
    "leave_to_model_config",
    "pairs_per_step",
    "refusal",
    "take_auto",
    "take_quantization",
    "with_pairs_per_step",
    "without_effect",
]

logger = logging.getLogger(__name__)

AUTO = ("max_tokens", "train_batch_size")
"""Numbers that may be ``auto``."""
DEFAULT_PAIRS = 32
PER_DEVICE = 8
"""Pairs for each device where TRL and transformers are not told."""

_MOVES = (
    "a reference that moves during training is scored anew at every move, and its weights belong "
    "into checkpoints, which is not built; train in rounds instead: end a run after so many steps, "
    "and give its output as model (and ref_model) of the next"
)
_REFUSED = {
    "auto_find_batch_size": "the batch never changes with memory; lower max_tokens instead",
    "label_smoothing_factor": "it belongs to classification; set label_smoothing",
    "neftune_noise_alpha": "noise in the policy alone would make it differ from the reference",
    "torch_compile": "compiled packs are not tested",
    "use_liger_kernel": "the head is already chunked, and patched models are not tested; leave it "
    "out",
    "prediction_loss_only": "evaluation returns metrics only",
    "dataloader_drop_last": "every pair of an epoch is trained on, and each of a smaller last step "
    "weighs what it weighs in any other; leave it out",
    "router_aux_loss_coef": "no mixture of experts is supported",
    "activation_offloading": "leave it out and keep activation_checkpointing: true, which holds "
    "one input per layer; lower max_tokens if that does not fit",
    "sync_ref_model": _MOVES,
    "ref_model_mixup_alpha": _MOVES,
    "ref_model_sync_steps": _MOVES,
}
"""Options that would not do here what they say → what to do instead."""
_ONLY = {
    "disable_dropout": (True, "log-probabilities must be functions of the parameters alone"),
    "train_sampling_strategy": (
        ("random", "sequential"),
        "packing needs no grouping by length; choose 'random' or 'sequential'",
    ),
}
"""Options of which some values are accepted → those, and why no other."""
_WITHOUT_EFFECT = {
    "padding_free": "there is no padding",
    "pad_to_multiple_of": "there is no padding",
    "pad_token": "there is no padding",
    "precompute_ref_log_probs": "the reference is always computed once, before training, and kept",
    "precompute_ref_batch_size": "packs for the reference are filled up to max_tokens",
    "per_device_eval_batch_size": "packs for evaluation are filled up to score_max_tokens",
    "eval_accumulation_steps": "evaluation holds sums, no logits",
    "dataset_num_proc": "pairs are tokenized once, by one process for each cache folder",
}
"""Options that are accepted and change nothing → why."""

REMOVED = {
    "max_prompt_length": "leave it out: max_length bounds prompt + response, and truncation_mode "
    "keep_end cuts the prompt's start first",
    "max_completion_length": "leave it out: max_length bounds prompt + response",
    "max_target_length": "leave it out: max_length bounds prompt + response",
    "rpo_alpha": "write loss_type: [sigmoid, sft] and loss_weights: [1.0, rpo_alpha]",
    "cpo_alpha": "write loss_type: [sigmoid, sft], loss_weights: [1.0, cpo_alpha] and "
    "reference_free: true",
    "generate_during_eval": "evaluate a checkpoint with a script of your own; it is a plain model",
    "use_liger_loss": "leave it out: the head is already chunked",
    "use_logits_to_keep": "leave it out: the head always sees response positions only",
    "force_use_ref_model": "leave it out: ref_model may be given beside an adapter",
    "base_model_attribute_name": "leave it out: families are known by their config",
    "model_adapter_name": "a run trains one adapter; leave it out",
    "ref_adapter_name": "set adapter_reference: start or base",
    "ref_model_init_kwargs": "ref_model is read as model is, with model_init_kwargs; or load it "
    "yourself and pass SDPOTrainer(ref_model=...)",
    "tools": "give a column tools in the rows",
    "label_pad_token_id": "leave it out: there is no padding",
    "padding_value": "leave it out: there is no padding",
    "is_encoder_decoder": "only causal language models are supported",
    "dataset_kwargs": "leave it out: rows are tokenized as they are",
    "streaming": "a streaming source has no length, which schedule and order of pairs need; give "
    "files, whose rows are tokenized to disk once, and max_steps to end early",
}
"""Names that users of TRL's older releases and its scripts type → what to do instead."""

_ARGUMENTS = {
    "data_collator": "packs are made by the step itself",
    "compute_metrics": "evaluation holds no logits; its metrics are TRL's",
    "preprocess_logits_for_metrics": "evaluation holds no logits",
    "tokenizer": "it is called processing_class",
    "model_init": "give model",
    "formatting_func": "give rows in one of TRL's preference formats",
}
"""Arguments of TRL's and transformers' trainers → why not, or what instead."""


IN_MODEL_CONFIG = (
    *("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    *("lora_modules_to_save", "use_rslora", "use_dora", "load_in_8bit", "load_in_4bit"),
    *("bnb_4bit_quant_type", "use_bnb_nested_quant"),
)
"""Options of SDPOConfig that TRL's scripts have from ``ModelConfig``."""


def leave_to_model_config(config_class: Any) -> None:
    """Keeps transformers' and TRL's argument parsers from seeing what ``ModelConfig`` has as well.

    TRL's scripts parse ``DPOConfig`` and ``ModelConfig`` together, and ``argparse`` refuses two
    options of one name. Parsers pass over fields that the constructor does not take. This one does
    take them, having been made before; in scripts they come back to the trainer as ``peft_config``
    and ``quantization_config``.
    """
    for name in IN_MODEL_CONFIG:
        config_class.__dataclass_fields__[name].init = False


@dataclass
class TRLOptions:
    """Options of TRL's ``DPOConfig`` that have no other place in ``SDPOConfig``."""

    per_device_train_batch_size: int | None = field(default=None)
    """Given: ``train_batch_size`` is this × ``gradient_accumulation_steps`` × ranks."""
    gradient_accumulation_steps: int | None = field(default=None)
    """Given: as above. Micro-batches themselves follow from ``max_tokens``."""
    per_device_eval_batch_size: int | None = field(default=None)
    """No effect."""
    trust_remote_code: bool = field(default=False)
    """Passed to ``from_pretrained``."""
    disable_dropout: bool = field(default=True)
    """Dropout is off; False is refused."""
    router_aux_loss_coef: float | None = field(default=None)
    """Refused: no mixture of experts is supported."""
    dataset_num_proc: int | None = field(default=None)
    """No effect."""
    padding_free: bool = field(default=False)
    """No effect: there is no padding."""
    pad_to_multiple_of: int | str | None = field(default=None)
    """No effect: there is no padding."""
    pad_token: str | None = field(default=None)
    """No effect: there is no padding."""
    precompute_ref_log_probs: bool = field(default=False)
    """No effect: the reference is always computed before training."""
    precompute_ref_batch_size: int | None = field(default=None)
    """No effect: packs are filled up to ``max_tokens``."""
    activation_offloading: bool = field(default=False)
    """Refused."""
    sync_ref_model: bool = field(default=False)
    """Refused: the reference does not move."""
    ref_model_mixup_alpha: float = field(default=0.6)
    """Refused, as ``sync_ref_model``."""
    ref_model_sync_steps: int = field(default=512)
    """Refused, as ``sync_ref_model``."""

    def __new__(cls, *_: Any, **options: Any) -> "TRLOptions":
        """Refuses names that TRL has given up, before Python would call them unexpected."""
        for name in options.keys() & REMOVED.keys():
            raise ValueError(f"option {name!r} is refused: {REMOVED[name]}")
        return super().__new__(cls)


def refusal(name: str, value: Any) -> str | None:
    """Why an option's value is refused, or None if it is not."""
    if name in _REFUSED and value not in (_default(name), None):
        return _REFUSED[name]
    accepted, advice = _ONLY.get(name, (value, ""))
    if value not in (accepted if isinstance(accepted, tuple) else (accepted,)):
        return advice
    return None


def without_effect(name: str) -> str | None:
    """Why an option is accepted and changes nothing, or None if it does."""
    return _WITHOUT_EFFECT.get(name)


def check_values(options: Any) -> None:
    """Refuses values that would not do what they say, and names those that change nothing.

    Args:
        options: an ``SDPOConfig``.

    Raises:
        ValueError: names the option, its value and what to do.
    """
    for name in (*_REFUSED, *_ONLY):
        value = getattr(options, name)
        advice = refusal(name, value)
        if advice is not None:
            raise ValueError(f"option {name} = {value!r} is refused: {advice}")
    for name, reason in _WITHOUT_EFFECT.items():
        value = getattr(options, name)
        if value not in (_default(name), None, "auto"):
            logger.warning("option %s = %r has no effect: %s", name, value, reason)


def _default(name: str) -> Any:
    """What an option is where it is not given."""
    here = {f.name: f.default for f in dataclasses.fields(TRLOptions)}
    return here[name] if name in here else TrainingArguments.__dataclass_fields__[name].default


def pairs_per_step(
    train_batch_size: int | None, per_device: int | None, accumulation: int | None, *, ranks: int
) -> int:
    """Pairs per optimizer step over all ranks.

    Args:
        train_batch_size: as given, None if not.
        per_device: ``per_device_train_batch_size`` as given, None if not.
        accumulation: ``gradient_accumulation_steps`` as given, None if not.
        ranks: number of ranks.

    Raises:
        ValueError: both are given and contradict each other.
    """
    if per_device is None and accumulation is None:
        return DEFAULT_PAIRS if train_batch_size is None else train_batch_size
    each, times = per_device or PER_DEVICE, accumulation or 1
    product = each * times * ranks
    text = (
        f"per_device_train_batch_size {each} × gradient_accumulation_steps {times} × {ranks} "
        f"rank{'s' if ranks > 1 else ''} = {product}"
    )
    if train_batch_size not in (None, product):
        raise ValueError(
            f"train_batch_size is {train_batch_size}, but {text}: give one of them; "
            "train_batch_size counts pairs per optimizer step over all ranks"
        )
    logger.info("train_batch_size = %d pairs per optimizer step: %s", product, text)
    return product


def take_auto(options: Any) -> frozenset[str]:
    """Which of an ``SDPOConfig``'s numbers are ``auto``; defaults stand for them from here on.

    Raises:
        ValueError: a word that is not ``auto``, or sizes per device beside it.
    """
    given = {name: v for name in AUTO if isinstance(v := getattr(options, name), str)}
    for name, value in given.items():
        if value != "auto":
            raise ValueError(f"{name} {value!r} is neither a number nor auto")
        setattr(options, name, type(options).__dataclass_fields__[name].default)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if "train_batch_size" in given and getattr(options, name) is not None:
            raise ValueError(f"train_batch_size is auto, but {name} is given: drop one of them")
    return frozenset(given)


def with_pairs_per_step(options: Mapping[str, Any], *, ranks: int) -> dict[str, Any]:
    """The options with ``train_batch_size`` for a number of ranks that are not there."""
    names = ("train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    given = [options.get(name) for name in names]
    if given[1:] == [None, None]:
        return dict(options)
    others = {name: value for name, value in options.items() if name not in names}
    return {**others, "train_batch_size": pairs_per_step(*given, ranks=ranks)}


def take_quantization(options: Any, quantization_config: Any, model: Any) -> None:
    """Makes a ``BitsAndBytesConfig`` that TRL's scripts pass the options that it stands for.

    Args:
        options: an ``SDPOConfig``, which gets them.
        quantization_config: of TRL's ``get_quantization_config``, or None.
        model: what the trainer was given.

    Raises:
        ValueError: another kind of config, or a model that has been read already.
    """
    if quantization_config is None:
        return
    if not isinstance(quantization_config, BitsAndBytesConfig):
        raise ValueError(
            f"quantization_config is a {type(quantization_config).__name__}; only "
            "BitsAndBytesConfig(load_in_4bit=True) is supported"
        )
    if not isinstance(model, str | None):
        raise ValueError(
            "quantization_config acts when a model is read: give the model's name, or leave it out"
        )
    options.load_in_4bit = quantization_config.load_in_4bit
    options.load_in_8bit = quantization_config.load_in_8bit
    options.bnb_4bit_quant_type = quantization_config.bnb_4bit_quant_type
    options.use_bnb_nested_quant = quantization_config.bnb_4bit_use_double_quant
    check_adapter_options(options)


def check_arguments(given: Mapping[str, Any], options: Any) -> None:
    """Refuses arguments of TRL's trainers that have no meaning here; None is accepted for each.

    Releases before 0.9 took options such as ``beta`` as arguments of the trainer.

    Args:
        given: the arguments.
        options: an ``SDPOConfig``.

    Raises:
        ValueError: names the argument and what to do.
        TypeError: an argument that is none of TRL's.
    """
    names = [option.name for option in dataclasses.fields(options)]
    as_option = {name: f"it is an option: SDPOConfig({name}=...)" for name in names}
    advice = {**as_option, **REMOVED, **_ARGUMENTS}
    for name, value in given.items():
        if name not in advice:
            raise TypeError(f"SDPOTrainer has no argument {name!r}")
        if value is not None:
            raise ValueError(f"argument {name} of SDPOTrainer is refused: {advice[name]}")
