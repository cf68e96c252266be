"""SDPOConfig: every option of a run and its checks.

It is a transformers ``TrainingArguments``: what those know (schedulers, optimizers, trackers,
saving, the Hub) is set under the names their users know. The fields below are added or have another
default.
"""

import difflib
import importlib.util
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import TrainingArguments

from sdpo_scale.data.formats import RESERVED_OPTIONS
from sdpo_scale.memory.budget import check_budget
from sdpo_scale.modeling.adapters import check_adapter_options
from sdpo_scale.objective_options import check_objective_options, objective_of
from sdpo_scale.objectives import Objective
from sdpo_scale.pruning import Pruning
from sdpo_scale.trl_options import (
    IN_MODEL_CONFIG,
    PER_DEVICE,
    TRLOptions,
    check_values,
    leave_to_model_config,
    pairs_per_step,
    take_auto,
)

__all__ = ["SDPOConfig", "nearest"]

logger = logging.getLogger(__name__)


@dataclass
class SDPOConfig(TRLOptions, TrainingArguments):  # type: ignore[misc]  # other defaults
    """Options of a training run; see ``TRLOptions`` and ``TrainingArguments`` for the others.

    Raises:
        ValueError: an option is out of range or contradicts another; names the option and a way
            out.
    """

    output_dir: str | None = field(default="sdpo-output")
    """Folder of the trained model, checkpoints and metrics.jsonl."""

    model: str | None = field(default=None)
    """Policy to train: a folder, a Hub name, or ``demo`` (SmolLM2-135M-Instruct)."""
    tokenizer: str | None = field(default=None)
    """Folder or Hub name of the tokenizer; the model's own if not given."""
    model_init_kwargs: dict[str, Any] | None = field(default=None)
    """Passed to ``from_pretrained``, e.g. ``{revision: ..., dtype: bfloat16}``; dtype is float32 if
    not given."""
    eos_token: str | None = field(default=None)
    """End-of-sequence token, where the tokenizer has none or another."""
    chat_template: str | None = field(default=None)
    """Chat template (Jinja text or a file), where the tokenizer has none or another."""

    chat_template_kwargs: dict[str, Any] | None = field(default=None)
    """Further variables for the chat template, e.g. ``{enable_thinking: false}``; those of a row's
    column of that name win."""

    use_peft: bool = field(default=False)
    """Train a LoRA adapter instead of the model; names and meanings of what follows are TRL's."""
    lora_r: int = field(default=16)
    """Rank of the adapter."""
    lora_alpha: int = field(default=32)
    """The adapter is scaled by ``lora_alpha / lora_r``."""
    lora_dropout: float = field(default=0.0)
    """Must be 0: log-probabilities are functions of the parameters alone."""
    lora_target_modules: str | list[str] | None = field(default=None)
    """Names of the modules to adapt, ``all-linear``, or a pattern; peft's choice for the family if
    not given."""
    lora_modules_to_save: list[str] | None = field(default=None)
    """Modules to train whole beside the adapter."""
    use_rslora: bool = field(default=False)
    """Scale by ``lora_alpha / √lora_r``."""
    use_dora: bool = field(default=False)
    """Train magnitudes apart from directions (DoRA)."""
    load_in_4bit: bool = field(default=False)
    """Read the frozen base model in 4 bits (QLoRA)."""
    load_in_8bit: bool = field(default=False)
    """Refused by name."""
    bnb_4bit_quant_type: str = field(default="nf4")
    """``nf4`` or ``fp4``."""
    use_bnb_nested_quant: bool = field(default=False)
    """Quantize the constants of 4-bit weights as well."""
    adapter_reference: str = field(default="start")
    """Reference of an adapter whose training continues: ``start``, the adapter as it is then, or
    ``base``, the model without it. A new adapter starts as its base model: both are the same."""
    merge_adapter: bool = field(default=False)
    """Save the base model with the adapter merged in; checkpoints hold the adapter."""

    train_dataset: Any = field(default=None)
    """Preference pairs: .jsonl, .json, .csv, .parquet, a ``save_to_disk`` folder, a Hub name,
    ``demo``, or a list of these, in which an entry may be ``{path: ..., weight: 2, split: ...,
    subset: ..., revision: ...}``; a weight is the number of copies of each pair in an epoch."""
    eval_dataset: Any = field(default=None)
    """Pairs to evaluate on, in the same forms."""
    train_split: str = field(default="train")
    """Split of ``train_dataset`` where it has splits."""
    eval_split: str = field(default="test")
    """Split of ``eval_dataset`` where it has splits."""
    eval_holdout: int | None = field(default=None)
    """Hold out one prompt in so many for evaluation (sha256 of the prompt modulo this number is 0);
    all pairs of a prompt are on the same side."""
    max_train_samples: int | None = field(default=None)
    """Use at most so many training pairs, the first ones."""
    max_eval_samples: int | None = field(default=None)
    """Use at most so many evaluation pairs, the first ones."""
    max_length: int | None = field(default=1024)
    """Most tokens of prompt + response; longer responses are cut, and the log says how many."""
    truncation_mode: str = field(default="keep_start")
    """``keep_start`` cuts the response's end; ``keep_end`` cuts the prompt's start first."""
    on_bad_row: str = field(default="error")
    """``error`` names unusable rows and stops; ``skip`` leaves them out, counted and listed."""
    cache_dir: str | None = field(default=None)
    """Folder of tokenized rows and reference log-probabilities; the user's cache folder if not
    given."""

    train_batch_size: int = field(default=None)  # type: ignore[assignment]
    """Pairs per optimizer step over all ranks, 32 if not given. A number never changes with
    hardware. ``auto`` fills the M micro-batches of each rank that a dense step of 32 pairs needs:
    M × ranks × ⌊0.95 · max_tokens / (kept · mean tokens of a pair)⌋, at most all pairs. kept is
    ``keep_fraction`` where the backward has packs of its own (``branch_execution: two_pass``), else
    1: a pack that keeps all of its pairs must fit. The learning rate stays as it is."""
    max_tokens: int = field(default=8192)
    """Most tokens of one micro-batch. Changes speed and memory, never the result. ``auto``: what
    ``sdpo-scale tune`` has measured for this run and left in ``output_dir``, or is measured first;
    under FSDP2 and ZeRO the former."""
    memory_budget: float | str = field(default=0.9)
    """What ``max_tokens: auto`` may use: a share of the GPU's memory, or a size such as 60GiB."""

    gradient_reduction: str = field(default="micro_batch")
    """When FSDP2 sums gradients over ranks: after each ``micro_batch``, into shards, or after the
    ``last`` one of a step, which communicates less and keeps every layer's whole gradient until
    then. DDP does the latter, ZeRO the former."""

    loss_type: str | list[str] = field(default="sigmoid")
    """A loss of ``OBJECTIVES`` in ``objectives.py``, or several, which are added."""
    loss_weights: list[float] | None = field(default=None)
    """What each of several losses weighs; 1 if not given."""
    beta: float = field(default=0.1)
    """Inverse temperature β of the objective."""
    label_smoothing: float = field(default=0.0)
    """ε of sigmoid (conservative DPO), robust, exo_pair and simpo."""
    discopop_tau: float = field(default=0.05)
    """Temperature τ of discopop."""
    simpo_gamma: float = field(default=0.5)
    """Target margin γ of simpo."""
    f_divergence_type: str = field(default="reverse_kl")
    """Divergence from the reference: reverse_kl, forward_kl, js_divergence or alpha_divergence."""
    f_alpha_divergence_coef: float = field(default=0.5)
    """α of alpha_divergence."""
    ld_alpha: float | None = field(default=None)
    """Weight of the longer response's tokens beyond the shorter one's length (LD-DPO)."""
    use_weighting: bool = field(default=False)
    """Weigh each pair by how likely the policy is to generate it (WPO)."""
    ref_model: str | None = field(default=None)
    """Reference model, a folder or a Hub name; the model as it is before training if not given."""
    reference_free: bool = field(default=False)
    """Use the uniform reference: log-ratios are the policy's log-probabilities."""

    pruning: str = field(default="off")
    """off, exact-budget, memory, fastest or paper: what is left out at random and made up for by
    weights, see ``PRESETS`` in ``pruning.py``."""
    variance_inflation: float | None = field(default=None)
    """Budget of the preset: acceptable second moment of the gradient, as a multiple of the dense
    one."""
    keep_fraction: float | None = field(default=None)
    """The other form of the budget: share of the tokens whose backward runs."""
    pruning_kwargs: dict[str, Any] | None = field(default=None)
    """Other fields of ``Pruning`` that differ from the preset's."""
    score_max_tokens: int | None = field(default=None)
    """Most tokens of one micro-batch where no gradient is needed; twice ``max_tokens`` if not
    given."""

    # str stands second in such types: what transformers' and TRL's argument parsers take it for
    resume_from_checkpoint: Literal[True, False] | str | None = field(  # type: ignore[assignment]
        default=None
    )
    """A checkpoint's folder, true for the latest one in ``output_dir``, or ``auto``: the latest one
    if there is any."""
    learning_rate: float = field(default=1e-6)
    """Initial learning rate."""
    logging_steps: float = field(default=10)
    """Optimizer steps between two lines of metrics."""
    activation_checkpointing: bool | None = field(default=True)
    """Recompute activations in the backward instead of storing them."""
    bf16: bool | None = field(default=None)  # type: ignore[assignment]
    """Compute in bfloat16 (autocast); by default where the GPU supports it."""
    eval_on_start: bool = field(default=True)
    """Evaluate before the first step, where there are evaluation pairs."""
    report_to: list[str] | str | None = field(default=None)
    """Trackers; by default TensorBoard where it is installed."""
    logging_nan_inf_filter: bool = field(default=False)
    """Off: a NaN stops the run instead of being averaged away."""
    dataloader_pin_memory: bool = field(default=False)
    """Off: what workers hand over are token ids, laid out later."""

    def __post_init__(self) -> None:
        """Checks options among themselves and resolves those that depend on the machine."""
        if self.gradient_checkpointing is not None:
            self.activation_checkpointing = self.gradient_checkpointing
            self.gradient_checkpointing = None
        self.loss_type = _one_loss(self.loss_type)
        self.is_auto = take_auto(self)
        check_budget(self.memory_budget)
        check_values(self)
        check_objective_options(self)
        self._check_data_options()
        check_adapter_options(self)
        _ = self.pruning_options
        if self.bf16 is None:
            on_gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
            self.bf16 = not self.fp16 and not self.use_cpu and on_gpu
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if self.report_to is None:
            has_tensorboard = importlib.util.find_spec("tensorboard") is not None
            self.report_to = ["tensorboard"] if has_tensorboard else []
        self.disable_tqdm = True  # the run shows its own progress
        if self.deepspeed is not None:
            self.deepspeed = _deepspeed_options(self.deepspeed)
        step_size = (self.train_batch_size, *self._take_sizes_per_device())
        super().__post_init__()
        self.train_batch_size = pairs_per_step(*step_size, ranks=self.world_size)
        if self.use_cpu and dist.is_initialized():
            # transformers 5.24 hands ddp_timeout to process groups of GPUs only
            dist.distributed_c10d._set_pg_timeout(self.ddp_timeout_delta)
        if self.ddp_find_unused_parameters is None:
            # every parameter takes part in every micro-batch, and layers that are recomputed are
            # not in the graph that the search would walk
            self.ddp_find_unused_parameters = False
        if self.n_gpu > 1:
            raise ValueError(
                f"{self.n_gpu} GPUs are visible to one process: start one process for each "
                f"(torchrun --nproc-per-node {self.n_gpu} -m sdpo_scale ...), or set "
                "CUDA_VISIBLE_DEVICES to one of them"
            )

    def to_dict(self) -> dict[str, Any]:
        """Every option, for trackers and logs."""
        return {**super().to_dict(), **{name: getattr(self, name) for name in IN_MODEL_CONFIG}}

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Autocast's dtype; None where products run in the parameters' dtype."""
        if self.bf16:
            return torch.bfloat16
        return torch.float16 if self.fp16 else None

    @property
    def cache_path(self) -> Path:
        """The folder of tokenized rows and reference log-probabilities."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(base).expanduser() / "sdpo_scale"

    @property
    def output_path(self) -> Path:
        """``output_dir`` as a path."""
        assert self.output_dir is not None, "TrainingArguments fills it in"
        return Path(self.output_dir)

    @property
    def objective(self) -> Objective:
        """The loss that ``loss_type`` and the options after it name."""
        return objective_of(self)

    @property
    def pruning_options(self) -> Pruning:
        """The preset with the options that change it."""
        budget = {
            "variance_inflation": self.variance_inflation,
            "keep_fraction": self.keep_fraction,
        }
        given = {name: value for name, value in budget.items() if value is not None}
        return Pruning.from_options(self.pruning, {**(self.pruning_kwargs or {}), **given})

    def _take_sizes_per_device(self) -> tuple[int | None, int | None]:
        """What was given; from here on they are the transformers loop's: one batch a step."""
        given = self.per_device_train_batch_size, self.gradient_accumulation_steps
        self.per_device_train_batch_size = self.per_device_eval_batch_size = PER_DEVICE
        self.gradient_accumulation_steps = 1
        return given

    def _check_data_options(self) -> None:
        for name, choices in (
            ("truncation_mode", ("keep_start", "keep_end")),
            ("on_bad_row", ("error", "skip")),
            ("gradient_reduction", ("micro_batch", "last")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is unknown; choose {' or '.join(choices)}"
                )
        minimum = {
            "train_batch_size": 1,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "max_tokens": 3,
            "max_length": 2,
            "eval_holdout": 2,
            "max_train_samples": 1,
            "max_eval_samples": 1,
        }
        for name, least in minimum.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        most = 0 if "max_tokens" in self.is_auto else self.max_tokens
        if self.score_max_tokens is not None and self.score_max_tokens < most:
            raise ValueError(
                f"score_max_tokens is {self.score_max_tokens}, less than max_tokens "
                f"({self.max_tokens}): without gradient at least as much fits"
            )
        if not isinstance(self.chat_template_kwargs or {}, dict):
            raise ValueError(
                f"chat_template_kwargs must map names to values, got {self.chat_template_kwargs!r}"
            )
        reserved = sorted(RESERVED_OPTIONS & (self.chat_template_kwargs or {}).keys())
        if reserved:
            raise ValueError(
                f"chat_template_kwargs: {reserved[0]!r} is no variable of a template; drop it"
            )
        if self.eval_holdout is not None and self.eval_dataset is not None:
            raise ValueError(
                "eval_holdout takes evaluation pairs from train_dataset, but eval_dataset is set "
                "as well; drop one of them"
            )


leave_to_model_config(SDPOConfig)


def _one_loss(given: str | list[str] | None) -> str | list[str]:
    """The name in a list of one; transformers' parser makes lists that were not given None."""
    if given is None:
        return "sigmoid"
    return given[0] if isinstance(given, list) and len(given) == 1 else given


def _deepspeed_options(given: str | dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's options, with what follows from the run's own left to be filled in.

    Batch sizes have no meaning there, since a step has ``train_batch_size`` pairs however they are
    executed. Clipping that only one of both sides knows of would silently not happen.
    """
    if isinstance(given, str):
        path = Path(given)
        if not path.is_file():
            raise ValueError(f"option deepspeed: there is no file {given!r}")
        try:
            options = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"option deepspeed: {given} is not JSON: {error}") from error
    else:
        options = dict(given)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in sizes:
        if options.get(name, "auto") != "auto":
            logger.warning(
                "option deepspeed: %s = %s has no effect, train_batch_size and max_tokens decide",
                name,
                options[name],
            )
        options[name] = "auto"
    options.setdefault("gradient_clipping", "auto")
    return options


def nearest(name: str, names: Any) -> str:
    """The end of an error message: the known name that is closest, if any is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""
