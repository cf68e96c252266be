"""What fits: a run's peak memory on GPUs that are not there, and the largest micro-batches.

A row for each variant: activation checkpointing on or off, pruning presets. ``--simulate`` takes
the whole model through a micro-batch as well; ``planner.py`` says how the rest is predicted.

What pruning saves: in two passes, a step is scored without gradient and only what was kept is
packed for the backward, so as many micro-batches hold more pairs. In one pass with checkpointing,
layers recompute kept rows only, which lowers the usual peak; but any pack may keep all of its
pairs, and in the first step each does, so no larger ones are promised. ``exact-budget`` may keep
everything.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from sdpo_scale.inputs import prepare_inputs
from sdpo_scale.memory.architectures import ARCHITECTURES
from sdpo_scale.memory.budget import parse_bytes
from sdpo_scale.pruning import PRESETS
from sdpo_scale.reporting.dry_run import config_without_devices
from sdpo_scale.reporting.planner import Machine, Planner

__all__ = ["check_plot", "plan", "planner_of", "plot", "show"]

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
    machine = Machine.of(
        options,
        world_size=world_size,
        memory=parse_bytes(gpu_memory, option="--gpu-memory"),
        sharding=sharding or "",
    )
    planner = planner_of(options, machine)
    variants = list(_variants(planner))
    warnings = planner.warnings(variants)
    if simulates:
        variants[1]["simulated_bytes"] = planner.simulated(planner.args.max_tokens).total
    return {
        "model": {
            "name": str(options.get("model")),
            "parameters": planner.num_parameters,
            "layers": planner.config.num_hidden_layers,
        },
        "machine": asdict(machine),
        "pairs": dict(zip(("prompt", "chosen", "rejected"), planner.pair, strict=True)),
        "max_tokens": planner.args.max_tokens,
        "train_batch_size": planner.args.train_batch_size,
        "variants": variants,
        "warnings": warnings,
    }


def _variants(planner: Planner) -> Iterator[dict[str, Any]]:
    yield planner.variant("no checkpointing", "off")
    yield planner.variant("checkpointing", "pruned")
    kept = {
        name: float(fields.get("keep_fraction", 1.0))
        for name, fields in PRESETS.items()
        if name != "off"
    }
    for name, share in kept.items():
        yield planner.variant(f"{name}, checkpointing", "pruned", share)
    for name, share in kept.items():
        if share < 1:
            yield planner.variant(f"{name}, two passes", "pruned", share, passes=2)


def planner_of(options: Mapping[str, Any], machine: Machine) -> Planner:
    """Of a config with data, or of a known architecture with pairs of an assumed length.

    Args:
        options: as for :func:`plan`.
        machine: the GPUs.
    """
    name = options.get("model")
    if name in ARCHITECTURES:
        shape = dict(ARCHITECTURES[name])
        return Planner(
            options=options,
            args=config_without_devices({**options, "model": None}),
            config=AutoConfig.for_model(shape.pop("model_type"), **shape),
            pair=_ASSUMED,
            machine=machine,
        )
    args = config_without_devices(options)
    inputs = prepare_inputs(
        args,
        model=None,
        tokenizer=None,
        train_dataset=None,
        eval_dataset=None,
        loads_weights=False,
    )
    return Planner.of_run(options, args, inputs, machine)


def show(result: Mapping[str, Any], console: Console) -> None:
    """Prints what :func:`plan` found."""
    model, machine, pairs = result["model"], result["machine"], result["pairs"]
    console.print(
        f"{model['name']}: {model['parameters'] / 1e9:.2f}B parameters, {model['layers']} layers; "
        f"{machine['world_size']} × {machine['memory'] / GiB:.1f} GiB, {machine['sharding']}\n"
        f"pairs of {pairs['prompt']} + {pairs['chosen']} + {pairs['rejected']} tokens\n"
        f"peak at max_tokens {result['max_tokens']}; the largest max_tokens that fits, its pairs,\n"
        "and the pairs of a step with one such micro-batch on each GPU",
        highlight=False,
    )
    table = Table()
    for name in ("variant", "peak GiB", "usual", "max_tokens", "pairs", "step"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for variant in result["variants"]:
        table.add_row(
            variant["name"],
            f"{variant['total_bytes'] / GiB:.1f}",
            f"{variant['expected_bytes'] / GiB:.1f}",
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


def check_plot(path: Path) -> None:
    """Checks that a plot can be made, before what it shows is computed.

    Raises:
        ValueError: matplotlib is missing, or the file cannot be written there or in this form.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'sdpo-scale[plot]'")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {str(path)!r} must end with .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {str(path)!r}: there is no folder {str(path.parent)!r}")


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Writes the peaks of all variants as stacked bars, and the GPU's memory as a line."""
    from matplotlib.figure import Figure

    variants, machine = result["variants"], result["machine"]
    names = [variant["name"] for variant in variants]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(variants))
    for part in variants[0]["bytes"]:
        sizes = np.array([variant["bytes"][part] / GiB for variant in variants])
        if sizes.any():
            axes.barh(names, sizes, left=left, label=part.replace("_", " "))
            left += sizes
    axes.axvline(machine["memory"] / GiB, color="black", linestyle="--", label="GPU memory")
    axes.invert_yaxis()
    axes.set_xlabel(f"GiB of a rank at max_tokens {result['max_tokens']}")
    axes.set_title(
        f"{result['model']['name']} on {machine['world_size']} GPUs, {machine['sharding']}"
    )
    figure.legend(loc="outside right upper")
    figure.savefig(path)


def _show_bar(variant: Mapping[str, Any], console: Console) -> None:
    """Categories of the peak with bars that add up to the whole."""
    console.print(f"{variant['name']}:")
    start = 0.0
    for name, size in variant["bytes"].items():
        if size > 0:
            width = 47 * size / variant["total_bytes"]
            left, right = round(start), max(round(start + width), round(start) + 1)
            bar = " " * left + "█" * (right - left)
            console.print(
                f"  {name.replace('_', ' '):>20}{size / GiB:>8.2f} {bar}", highlight=False
            )
            start += width
