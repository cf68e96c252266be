"""``sdpo-scale convert-trl``: a config or command line of ``trl dpo`` as a config of this project.

Options that mean the same keep their names; the rest is said: under which name it goes on, what it
becomes, or why it is left out. What TRL does without being told, and this project would do
otherwise, is written into the config where it decides the result, and said where it does not.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from sdpo_scale.config import SDPOConfig, nearest
from sdpo_scale.options import ALIASES, parse_yaml
from sdpo_scale.trl_options import PER_DEVICE, REMOVED, refusal, without_effect

__all__ = ["Conversion", "convert_trl", "read_trl"]

_LEFT_OUT = {
    "attn_implementation": "attention is chosen for packs: flash-attn, else PyTorch's",
    "lora_dropout": "dropout is off, as TRL's disable_dropout makes it",
    "lora_task_type": "there is one task",
    "lora_target_parameters": "only modules are adapted; set lora_target_modules",
    "bnb_4bit_quant_storage": "4-bit weights are stored under the dtype of products",
    "dataset_config": "data sets are read by name and split; give files for another configuration",
    "ignore_bias_buffers": "buffers are not synchronized",
    "test_split_size": "set eval_holdout: one prompt in so many",
    "config": "its options are part of this conversion",
    "num_processes": "the launcher decides: torchrun --nproc-per-node N, accelerate launch",
    "num_machines": "the launcher decides",
    "accelerate_config": "give the file to accelerate launch --config_file",
    "env": "set the variables where the job is started",
}
"""Options of TRL's scripts and command that have no counterpart → why, or what instead."""

_OTHERWISE = (
    "evaluation runs before the first step as well, where there are evaluation pairs; TRL: "
    "eval_on_start: false",
    "rows that cannot be used stop the run before it starts; TRL drops prompts over max_length "
    "without a word; set on_bad_row: skip to leave rows out, counted and listed",
    "metrics go to metrics.jsonl, and to TensorBoard where it is installed; TRL: report_to: none",
)
"""What differs whatever the options are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The options for ``sdpo-scale train`` and all that differs."""

    options: dict[str, Any]
    differences: list[str]

    def to_yaml(self) -> str:
        """The config, with the differences as comments at its top."""
        comments = "".join(f"# - {line}\n" for line in self.differences)
        body = yaml.safe_dump(self.options, sort_keys=False, allow_unicode=True)
        return f"# Converted from TRL. Differences:\n{comments}{body}"


@dataclass(slots=True)
class _Draft:
    options: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.differences.append(text)

    def init_kwarg(self, name: str, value: Any) -> None:
        given = self.options.setdefault("model_init_kwargs", {})
        given.setdefault(name, value)


def convert_trl(source: str) -> Conversion:
    """Converts a YAML file, a file with a command line, or a command line.

    Raises:
        ValueError: it is none of these.
    """
    given = read_trl(source)
    draft = _Draft()
    for name, value in given.items():
        _convert(draft, name, value)
    _add_evaluation(draft, given)
    _add_step_size(draft)
    _drop_ignored_smoothing(draft)
    for text in _OTHERWISE:
        draft.say(text)
    here = {"use_cpu": True, "deepspeed": None, "fsdp": None, "bf16": False, "fp16": False}
    try:
        SDPOConfig(**{**draft.options, **here})
    except (ValueError, TypeError) as error:
        draft.say(f"sdpo-scale train will refuse this config: {error}")
    return Conversion(options=draft.options, differences=draft.differences)


def read_trl(source: str) -> dict[str, Any]:
    """Option of TRL → value as YAML reads it.

    Raises:
        ValueError: neither options nor a file with options.
    """
    path = Path(source)
    is_file = len(source) < 1000 and path.is_file()
    text = path.read_text("utf-8") if is_file else source
    if is_file and not _is_command_line(text):
        values = parse_yaml(text, where=source)
        if not isinstance(values, dict):
            raise ValueError(f"{source}: expected a mapping of options or a command line")
        return {str(name).replace("-", "_"): value for name, value in values.items()}
    if not is_file and "--" not in source:
        raise ValueError(f"{source!r} is neither a file nor the command line of trl dpo")
    lines = text.replace("\\\n", " ").splitlines()
    return _arguments(shlex.split("\n".join(lines), comments=True))


def _is_command_line(text: str) -> bool:
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return any(word.startswith("--") and len(word) > 2 for word in words)


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """Options after the script's name, those of the file that ``--config`` names included."""
    starts = [n + 1 for n, word in enumerate(words) if word == "dpo" or word.endswith(".py")]
    remaining = list(words[starts[-1] if starts else 0 :])
    options: dict[str, Any] = {}
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            continue
        name, equals, text = word[2:].partition("=")
        texts = [text] if equals else []
        while not equals and remaining and not remaining[0].startswith("--"):
            texts.append(remaining.pop(0))
        name = name.replace("-", "_")
        if not texts and name.startswith("no_"):
            name, texts = name.removeprefix("no_"), ["false"]
        values = [parse_yaml(t, where=f"option {name}: {t!r}") for t in texts or ["true"]]
        options[name] = values[0] if len(values) == 1 else values
    if "config" in options:
        options = {**read_trl(str(options["config"])), **options}
    return options


def _convert(draft: _Draft, name: str, value: Any) -> None:
    if name in _SPECIAL:
        _SPECIAL[name](draft, value)
        return
    known = {f.name for f in fields(SDPOConfig)}
    target = ALIASES.get(name, name)
    advice = REMOVED.get(name) or _LEFT_OUT.get(name)
    if advice is not None:
        draft.say(f"{name}: {value!r} is left out: {advice.removeprefix('leave it out: ')}")
    elif target not in known:
        draft.say(f"{name}: {value!r} is left out: unknown here{nearest(name, known)}")
    elif (reason := refusal(target, value)) is not None:
        draft.say(f"{name}: {value!r} is left out, as it would be refused: {reason}")
    elif (reason := without_effect(target)) is not None:
        draft.say(f"{name}: {value!r} is left out, as it has no effect: {reason}")
    else:
        draft.options[target] = value
        if target != name:
            draft.say(f"{name} is called {target}")


def _datasets(draft: _Draft, value: Any) -> None:
    paths = [entry.get("path") if isinstance(entry, Mapping) else entry for entry in value or []]
    if not paths:
        return
    draft.options["train_dataset"] = paths if len(paths) > 1 else paths[0]
    draft.say("datasets is called train_dataset, and wins over dataset_name as in TRL")
    for entry in value:
        given = entry if isinstance(entry, Mapping) else {}
        for name in sorted(n for n, v in given.items() if v is not None and n != "path"):
            draft.say(f"datasets: {name} of {given['path']!r} is left out: give files")


def _streaming(draft: _Draft, value: Any) -> None:
    if value:
        draft.say(f"streaming: {value!r} is left out: {REMOVED['streaming']}")


def _revision(draft: _Draft, value: Any) -> None:
    draft.init_kwarg("revision", value)
    draft.say("model_revision is part of model_init_kwargs: {revision: ...}")


def _dtype(draft: _Draft, value: Any) -> None:
    draft.init_kwarg("dtype", value)
    draft.say("dtype is part of model_init_kwargs: {dtype: ...}")


def _init_kwargs(draft: _Draft, value: Any) -> None:
    given = parse_yaml(value, where="model_init_kwargs") if isinstance(value, str) else value
    for name, part in (given or {}).items():
        if name == "attn_implementation":
            draft.say(f"model_init_kwargs: {name} is left out: {_LEFT_OUT[name]}")
        else:
            draft.options.setdefault("model_init_kwargs", {})[name] = part


_SPECIAL: dict[str, Callable[[_Draft, Any], None]] = {
    "datasets": _datasets,
    "streaming": _streaming,
    "dataset_streaming": _streaming,
    "model_revision": _revision,
    "dtype": _dtype,
    "torch_dtype": _dtype,
    "model_init_kwargs": _init_kwargs,
}


def _add_evaluation(draft: _Draft, given: Mapping[str, Any]) -> None:
    """TRL's script evaluates on the test split of the same data set, if at all."""
    if given.get("eval_strategy", "no") in ("no", False):
        draft.options.pop("eval_split", None)
        return
    if "eval_dataset" not in draft.options and "train_dataset" in draft.options:
        draft.options["eval_dataset"] = draft.options["train_dataset"]
        split = draft.options.get("eval_split", "test")
        draft.say(f"eval_dataset names what TRL's script takes by itself: the split {split!r}")


def _add_step_size(draft: _Draft) -> None:
    each = draft.options.setdefault("per_device_train_batch_size", PER_DEVICE)
    times = draft.options.get("gradient_accumulation_steps", 1)
    draft.say(
        f"a step has {each} × {times} × ranks pairs, as there; train_batch_size: "
        f"{each * times} (times the ranks) instead of both keeps it on any hardware"
    )
    draft.say(
        "micro-batches are packs of at most max_tokens tokens (8192): speed and memory, never the "
        "result"
    )


def _drop_ignored_smoothing(draft: _Draft) -> None:
    loss = draft.options.get("loss_type", "sigmoid")
    smoothing = draft.options.get("label_smoothing")
    if smoothing and loss in ("sigmoid", ["sigmoid"]):
        del draft.options["label_smoothing"]
        draft.say(
            f"label_smoothing: {smoothing} is left out: TRL's sigmoid ignores it; here it would "
            "act (conservative DPO)"
        )
