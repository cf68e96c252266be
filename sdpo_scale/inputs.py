"""From options to what a run consists of: tokenizer, pairs, model, in the order of their cost.

Everything that a user can get wrong is refused before the weights are read.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from sdpo_scale.config import SDPOConfig
from sdpo_scale.data.pairs import PairDataset
from sdpo_scale.data.preference import PreparationReport
from sdpo_scale.memory.budget import check_budget
from sdpo_scale.modeling.adapted import is_adapted, prepare_checkpointing
from sdpo_scale.modeling.adapters import (
    Adapter,
    plan_adapter,
    quantization,
)
from sdpo_scale.modeling.families import check_config, position_limit
from sdpo_scale.modeling.loading import (
    empty_model,
    load_config,
    load_model,
    load_tokenizer,
    resolve_model_name,
)
from sdpo_scale.objective_options import OBJECTIVE_OPTIONS
from sdpo_scale.run_data import prepare_run_data

__all__ = ["GivenReference", "RunInputs", "prepare_inputs"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenReference:
    """A reference model that is not the policy as it is before training."""

    model: PreTrainedModel | str
    """The model, or the name it is read by when it is needed."""
    config: PreTrainedConfig
    init_kwargs: dict[str, Any]
    """How it is read."""

    @property
    def name(self) -> str:
        """Folder or Hub name, as far as it is known."""
        return self.model if isinstance(self.model, str) else str(self.config._name_or_path)

    def load(self) -> PreTrainedModel:
        """The model with its weights."""
        if not isinstance(self.model, str):
            return self.model
        logger.info("reference: reading %s", self.model)
        return load_model(self.model, **self.init_kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Tokenizer, pairs and model of a run."""

    model: PreTrainedModel
    model_name: str
    """As the user gave it, for messages and the model card."""
    adapter: Adapter | None
    """What is trained, where it is not the model itself."""
    tokenizer: PreTrainedTokenizerBase
    train: PairDataset
    eval: PairDataset | None
    reports: dict[str, PreparationReport]
    """``train`` and, if there is one, ``eval`` → what preparation kept, cut and left out."""
    reference: GivenReference | None
    """A reference given apart; None for the model as it is before training."""
    data_key: dict[str, str]
    """What token ids depend on besides rows: parts of the reference cache's key."""

    @property
    def base_name(self) -> str:
        """The model that was trained, or that the adapter belongs to."""
        if self.adapter is not None and self.adapter.folder is not None:
            return self.adapter.base_name
        return self.model_name

    @property
    def is_adapter_off_in_reference(self) -> bool:
        """Whether the reference is the model without its adapter."""
        return self.adapter is not None and self.adapter.is_off_in_reference

    def starts_at_reference(self, args: SDPOConfig) -> bool:
        """Whether all log-ratios are 0 before the first update."""
        starts_there = self.adapter is None or self.adapter.starts_at_reference
        return starts_there and self.reference is None and not args.reference_free

    def fingerprints(self, args: SDPOConfig) -> dict[str, str]:
        """Of what every rank must have in common: pairs, and options that a step depends on."""
        names: tuple[str, ...] = ("train_batch_size", "max_tokens", "seed", "data_seed")
        names += ("learning_rate", "max_steps", "num_train_epochs", *OBJECTIVE_OPTIONS)
        parts = {"training pairs": self.train, "evaluation pairs": self.eval}
        return {
            **{name: str(getattr(args, name)) for name in names},
            **{name: part.path.name if part else "" for name, part in parts.items()},  # a digest
            "pruning": repr(args.pruning_options),
            "adapter": "" if self.adapter is None else self.adapter.description,
            "ref_model": self.reference.name if self.reference else "the model at its start",
        }


def prepare_inputs(
    args: SDPOConfig,
    *,
    model: PreTrainedModel | str | None,
    tokenizer: PreTrainedTokenizerBase | None,
    train_dataset: Any,
    eval_dataset: Any,
    ref_model: PreTrainedModel | str | None = None,
    peft_config: Any = None,
    loads_weights: bool = True,
) -> RunInputs:
    """Loads, tokenizes and checks what a run needs.

    Arguments given here win over the options of the same name.

    Args:
        args: the options.
        model: a model, a folder or Hub name, or None for ``args.model``.
        tokenizer: a tokenizer, or None for ``args.tokenizer`` or the model's own.
        train_dataset: training pairs in any accepted form, or None for ``args.train_dataset``.
        eval_dataset: evaluation pairs, or None for ``args.eval_dataset`` or the held-out prompts.
        ref_model: a model, a folder or Hub name, or None for ``args.ref_model``.
        peft_config: a ``peft.LoraConfig``, or None for the one that ``args`` describes, if any.
        loads_weights: False for a model without memory behind its parameters.

    Raises:
        ValueError: an option or a model that cannot be used, naming it.
        DataError: an unusable row, naming file, row and column.
    """
    is_measured = "max_tokens" in args.is_auto and loads_weights
    check_budget(args.memory_budget, needs_size=is_measured and args.device.type == "cpu")
    model = _required(model, args.model, option="model")
    train_dataset = _required(train_dataset, args.train_dataset, option="train_dataset")
    eval_dataset = eval_dataset if eval_dataset is not None else args.eval_dataset
    init_kwargs = _init_kwargs(args)
    hub_options = _hub_options(init_kwargs)
    if isinstance(model, str):
        name, model = model, resolve_model_name(model, cache_dir=args.cache_path)
    else:
        name = model.config._name_or_path
    adapter = plan_adapter(args, model, peft_config, **hub_options)
    quantized = quantization(args, args.compute_dtype or torch.float32)
    reference = _reference(args, ref_model, model=model, init_kwargs=init_kwargs)
    if isinstance(model, str):
        folder = model
        if adapter is not None and adapter.folder is not None:
            model = resolve_model_name(adapter.base_name, cache_dir=args.cache_path)
        path = folder if (Path(folder) / "tokenizer_config.json").is_file() else model
        config = load_config(model, **hub_options, **_router_options(init_kwargs))
        if adapter is not None:
            adapter.check(config)
    else:
        path = name
        config = model.config
        check_config(config, name=name or type(model).__name__)
    if tokenizer is None:
        tokenizer = load_tokenizer(
            args.tokenizer or path,
            eos_token=args.eos_token,
            chat_template=args.chat_template,
            **_hub_options(init_kwargs if args.tokenizer is None else {}),
        )
    data = prepare_run_data(args, tokenizer, train_dataset=train_dataset, eval_dataset=eval_dataset)
    for part, report in data.reports.items():
        for owner in [config, *([reference.config] if reference is not None else [])]:
            _check_against_model(report, owner, args=args, part=part)
    if isinstance(model, str):
        quantized_kwargs = {**quantized, **init_kwargs}
        model = load_model(model, **quantized_kwargs) if loads_weights else empty_model(config)
    if adapter is not None:
        model = adapter.attach(model, seed=args.seed, merges=args.merge_adapter)
        prepare_checkpointing(model, args)
    return RunInputs(
        model=model,
        model_name=name,
        adapter=adapter,
        tokenizer=tokenizer,
        train=data.train,
        eval=data.eval,
        reports=data.reports,
        reference=reference,
        data_key=data.key,
    )


def _reference(
    args: SDPOConfig, ref_model: Any, *, model: Any, init_kwargs: dict[str, Any]
) -> GivenReference | None:
    """The reference given apart, if there is one, checked but not read.

    Raises:
        ValueError: it is no model, the policy itself, of another kind, or there is to be none.
    """
    given = ref_model if ref_model is not None else args.ref_model
    if given is None:
        return None
    if args.reference_free:
        raise ValueError("reference_free and ref_model contradict each other; drop one of them")
    if given is model and not isinstance(given, str):
        raise ValueError(
            "ref_model is the object that is trained: leave it out, the model as it is before "
            "training is the reference"
        )
    # revision and subfolder are the policy's
    kwargs = {n: v for n, v in init_kwargs.items() if n not in ("revision", "subfolder")}
    if isinstance(given, str):
        given = resolve_model_name(given, cache_dir=args.cache_path)
        config = load_config(given, **_hub_options(kwargs))
        return GivenReference(model=given, config=config, init_kwargs=kwargs)
    if not (isinstance(given, PreTrainedModel) or is_adapted(given)):
        raise ValueError(
            f"ref_model is a {type(given).__name__}: give a model, its folder or its Hub name "
            "(the third argument is args)"
        )
    check_config(given.config, name=given.config._name_or_path or "ref_model")
    return GivenReference(model=given, config=given.config, init_kwargs={})


def _required(given: Any, configured: Any, *, option: str) -> Any:
    value = given if given is not None else configured
    if value is None:
        raise ValueError(f"option {option} is missing: set it in the config or pass --{option}")
    return value


def _init_kwargs(args: SDPOConfig) -> dict[str, Any]:
    trust = {"trust_remote_code": True} if args.trust_remote_code else {}
    return {**trust, **(args.model_init_kwargs or {})}


def _hub_options(init_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of the model's options that say where its files come from."""
    names = ("revision", "trust_remote_code", "token", "subfolder", "cache_dir", "local_files_only")
    return {name: init_kwargs[name] for name in names if name in init_kwargs}


def _router_options(init_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those that decide whether the config is refused for its router's loss."""
    names = ("output_router_logits", "router_aux_loss_coef")
    return {name: init_kwargs[name] for name in names if name in init_kwargs}


def _check_against_model(
    report: PreparationReport, config: PreTrainedConfig, *, args: SDPOConfig, part: str
) -> None:
    """Compares what the data holds with what model and micro-batch can hold.

    Raises:
        ValueError: a token id without an embedding, a pair longer than ``max_tokens``, or a
            sequence longer than the model's positions reach.
    """
    if report.max_token_id >= config.vocab_size:
        raise ValueError(
            f"{part} data, {report.max_token_id_row}: token id {report.max_token_id} needs "
            f"{report.max_token_id + 1} embedding rows, the model has {config.vocab_size}; "
            "tokenizer and model do not belong together"
        )
    if "max_tokens" not in args.is_auto and report.longest_pair > args.max_tokens:
        raise ValueError(
            f"{part} data, {report.longest_pair_row}: the pair has {report.longest_pair} tokens "
            f"(prompt + both responses), max_tokens is {args.max_tokens}; both responses of a pair "
            "run in one micro-batch, so raise max_tokens or lower max_length"
        )
    limit = position_limit(config)
    if limit is not None and report.longest_sequence > limit.tokens:
        raise ValueError(
            f"{part} data: the longest sequence has {report.longest_sequence} tokens, more than "
            f"the model's {limit.tokens} positions ({limit.reason}); set max_length to "
            f"{limit.tokens}"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and report.longest_sequence > positions:
        logger.warning(
            "%s data: the longest sequence has %d tokens, the model was trained for %d positions; "
            "its rotary positions extrapolate, set max_length to %d to avoid that",
            part,
            report.longest_sequence,
            positions,
            positions,
        )
