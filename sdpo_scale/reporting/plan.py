"""What fits: a run's peak memory on GPUs that are not there, and the largest micro-batches.

A row for each variant: activation checkpointing on or off, pruning presets. ``--simulate`` takes
the whole model through a micro-batch as well; ``planner.py`` says how the rest is predicted.

Pruning changes memory where the backward recomputes rows of what is kept only, so a preset counts
with the share of tokens that it keeps at most: ``exact-budget`` may keep all of them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PreTrainedConfig

from sdpo_scale.config import SDPOConfig
from sdpo_scale.inputs import prepare_inputs
from sdpo_scale.memory.architectures import ARCHITECTURES
from sdpo_scale.memory.budget import parse_bytes
from sdpo_scale.memory.footprint import SHARDINGS, Line, Working
from sdpo_scale.pruning import PRESETS
from sdpo_scale.reporting.dry_run import config_without_devices, sharding_of
from sdpo_scale.reporting.planner import Machine, Planner

__all__ = ["plan", "show"]

GiB = 2**30
_ASSUMED = (512, 256, 256)
"""Tokens of prompt, chosen and rejected where no data is at hand."""


def plan(
    options: Mapping[str, Any],
    *,
    gpu_memory: str,
    world_size: int,
    sharding: str | None = None,
    simulates: bool = False,
) -> dict[str, Any]:
    """Predicts memory and what fits.

    Args:
        options: fields of ``SDPOConfig`` that the run was given; ``model`` may be one of
            ``ARCHITECTURES``.
        gpu_memory: of one GPU, with its unit.
        world_size: number of GPUs.
        sharding: of ``SHARDINGS``, in any case; what the options say if None.
        simulates: also simulate the whole model at ``max_tokens``.

    Returns:
        ``model``, ``machine``, ``pairs``, ``variants`` and ``warnings``, as JSON can hold them.

    Raises:
        ValueError: an option that cannot be used, or a model that cannot be simulated.
    """
    known = {name.lower(): name for name in SHARDINGS}
    kind = sharding_of(options) if sharding is None else known.get(sharding.lower(), sharding)
    if sharding is None and kind == "none" and world_size > 1:
        kind = "DDP"
    memory = parse_bytes(gpu_memory, option="--gpu-memory")
    machine = Machine(memory=memory, world_size=world_size, sharding=kind)
    config, lengths, args = _model_and_pairs(options)
    planner = Planner(options=options, args=args, config=config, pair=lengths, machine=machine)
    variants = [planner.variant(*given) for given in _variants()]
    warnings = planner.warnings(variants)
    if simulates:
        peak = planner.simulated(args.max_tokens)
        whole = Working(start=Line(peak.start, 0.0), rest=Line(peak.rest, 0.0))
        variants[1]["simulated_bytes"] = planner.total_of(whole).total
    return {
        "model": {
            "name": str(options.get("model")),
            "parameters": planner.num_parameters,
            "layers": config.num_hidden_layers,
        },
        "machine": asdict(machine),
        "pairs": dict(zip(("prompt", "chosen", "rejected"), lengths, strict=True)),
        "max_tokens": args.max_tokens,
        "train_batch_size": args.train_batch_size,
        "variants": variants,
        "warnings": warnings,
    }


def _variants() -> list[tuple[str, str, float]]:
    """Name, checkpointing and share of tokens in the backward."""
    presets = [
        (f"{name}, checkpointing", "pruned", float(fields.get("keep_fraction", 1.0)))
        for name, fields in PRESETS.items()
        if name != "off"
    ]
    return [("no checkpointing", "off", 1.0), ("checkpointing", "pruned", 1.0), *presets]


def _model_and_pairs(
    options: Mapping[str, Any],
) -> tuple[PreTrainedConfig, tuple[int, int, int], SDPOConfig]:
    """The model's config, mean tokens of prompt, chosen and rejected, and the checked options."""
    name = options.get("model")
    if name in ARCHITECTURES:
        args = config_without_devices({**options, "model": None})
        shape = dict(ARCHITECTURES[name])
        return AutoConfig.for_model(shape.pop("model_type"), **shape), _ASSUMED, args
    args = config_without_devices(options)
    inputs = prepare_inputs(
        args,
        model=None,
        tokenizer=None,
        train_dataset=None,
        eval_dataset=None,
        loads_weights=False,
    )
    prompt, chosen, rejected = (
        max(1, round(float(mean))) for mean in inputs.train.lengths.mean(axis=0)
    )
    return inputs.model.config, (prompt, chosen, rejected), args


def show(result: Mapping[str, Any], console: Console) -> None:
    """Prints what :func:`plan` found."""
    model, machine, pairs = result["model"], result["machine"], result["pairs"]
    console.print(
        f"{model['name']}: {model['parameters'] / 1e9:.2f}B parameters, {model['layers']} layers; "
        f"{machine['world_size']} × {machine['memory'] / GiB:.1f} GiB, {machine['sharding']}\n"
        f"pairs of {pairs['prompt']} + {pairs['chosen']} + {pairs['rejected']} tokens; peak at "
        f"max_tokens {result['max_tokens']}, and the most that fits",
        highlight=False,
    )
    table = Table()
    for name in ("variant", "peak GiB", "largest max_tokens", "pairs", "pairs × GPUs"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for variant in result["variants"]:
        table.add_row(
            variant["name"],
            f"{variant['total_bytes'] / GiB:.1f}",
            str(variant["largest_max_tokens"]),
            str(variant["pairs_per_micro_batch"]),
            str(variant["pairs_per_step_of_one_micro_batch"]),
            style=None if variant["fits"] else "red",
        )
    console.print(table)
    _show_bar(result["variants"][1], console)
    simulated = result["variants"][1].get("simulated_bytes")
    if simulated is not None:
        predicted = result["variants"][1]["total_bytes"]
        console.print(
            f"simulated, whole model: {simulated / GiB:.2f} GiB; model: {predicted / GiB:.2f} GiB "
            f"({predicted / simulated - 1:+.1%})"
        )
    for warning in result["warnings"]:
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def _show_bar(variant: Mapping[str, Any], console: Console) -> None:
    """Categories of the peak with bars that add up to the whole."""
    console.print(f"{variant['name']}:")
    start = 0.0
    for name, size in variant["bytes"].items():
        if size > 0:
            width = 50 * size / variant["total_bytes"]
            left, right = round(start), max(round(start + width), round(start) + 1)
            bar = " " * left + "█" * (right - left)
            console.print(
                f"  {name.replace('_', ' '):>20}{size / GiB:>8.2f} {bar}", highlight=False
            )
            start += width
