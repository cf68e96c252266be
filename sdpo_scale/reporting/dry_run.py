"""What a run would do, without weights, without GPUs and in one process.

Options are checked and pairs are tokenized as the run would do it (and are found again by it), and
the steps are planned for the ranks that it is meant to have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import islice
from typing import Any

import numpy as np

from sdpo_scale.config import SDPOConfig
from sdpo_scale.inputs import RunInputs, prepare_inputs
from sdpo_scale.packing.plan import pair_costs, plan_ranks
from sdpo_scale.reporting.planner import Machine, Planner, sharding_of
from sdpo_scale.scoring import RunPairs
from sdpo_scale.trl_options import with_pairs_per_step

__all__ = ["config_without_devices", "describe", "dry_run"]

_MOST_STEPS_PLANNED = 100
"""Of an epoch, spread over it: enough for means, and a matter of seconds at any size of data."""


def dry_run(options: Mapping[str, Any], *, world_size: int) -> dict[str, Any]:
    """Checks, prepares and plans a run.

    Args:
        options: fields of ``SDPOConfig`` that the run was given.
        world_size: ranks that the run is meant to have.

    Returns:
        Section → name → value, as JSON can hold them: ``options`` that differ from their defaults,
        ``model``, ``data``, ``plan`` and the predicted ``memory`` of a rank, in GiB.

    Raises:
        ValueError: the run would be refused, with the reason that it would give.
        DataError: an unusable row.
    """
    sharding = sharding_of(options)
    args = config_without_devices(options, world_size=world_size)
    inputs = prepare_inputs(
        args,
        model=None,
        tokenizer=None,
        train_dataset=None,
        eval_dataset=None,
        loads_weights=False,
    )
    parameters = list(inputs.model.parameters())
    return {
        "options": _changed(options),
        "model": {
            "name": inputs.model_name,
            "family": inputs.model.config.model_type,
            "parameters": sum(p.numel() for p in parameters),
            "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        },
        "data": {
            "training_pairs": len(inputs.train),
            "evaluation_pairs": 0 if inputs.eval is None else len(inputs.eval),
            "tokens": int(inputs.train.lengths.sum()),
            "longest_pair": int(inputs.train.lengths.sum(axis=1).max()),
        },
        "plan": {
            "ranks": world_size,
            "sharding": sharding,
            **_plan(inputs, args, world_size=world_size),
        },
        "memory": _memory(options, inputs, args, Machine.of(options, world_size=world_size)),
    }


def config_without_devices(options: Mapping[str, Any], *, world_size: int = 1) -> SDPOConfig:
    """The config of a run on other machines, as far as it can be made on this one.

    What only devices can have would be refused without one, and the launcher's part is not started.

    Args:
        options: fields of ``SDPOConfig`` that the run was given.
        world_size: ranks that the run is meant to have.
    """
    here = {"use_cpu": True, "deepspeed": None, "bf16": False, "fp16": False}
    return SDPOConfig(**{**with_pairs_per_step(options, ranks=world_size), **here})


def describe(result: Mapping[str, Any]) -> Iterator[str]:
    """The lines that show the result of a dry run."""
    for section, values in result.items():
        yield f"{section}:"
        for name, value in values.items():
            text = f"{value:.3f}" if isinstance(value, float) and section != "options" else value
            yield f"  {name}: {text}"


def _memory(
    options: Mapping[str, Any], inputs: RunInputs, args: SDPOConfig, machine: Machine
) -> dict[str, Any]:
    try:
        parts = Planner.of_run(options, args, inputs, machine).own()
    except ValueError as error:
        return {"not_predicted": str(error)}
    sizes = {"peak": parts.total, **parts.to_dict()}
    return {f"{name}_gib": size / 2**30 for name, size in sizes.items() if size > 0}


def _changed(options: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(SDPOConfig)}
    return {name: value for name, value in options.items() if value != defaults[name]}


def _plan(inputs: RunInputs, args: SDPOConfig, *, world_size: int) -> dict[str, Any]:
    batches = RunPairs(inputs, args).train_batches()
    per_epoch = len(batches)
    steps = args.max_steps if args.max_steps > 0 else round(args.num_train_epochs * per_epoch)
    hidden_size = inputs.model.config.hidden_size
    tokens, counts, balances = [], [], []
    for indices in islice(batches, 0, None, -(-per_epoch // _MOST_STEPS_PLANNED)):
        lengths_P3 = inputs.train.lengths[indices]
        plans = plan_ranks(
            lengths_P3.sum(axis=1),
            pair_costs(lengths_P3[:, 0], lengths_P3[:, 1:], hidden_size),
            max_tokens=args.max_tokens,
            world_size=world_size,
        )
        tokens.append(int(lengths_P3.sum()))
        counts.append(len(plans.micro_batches[0]))
        balances.append(plans.balance)
    return {
        "pairs_per_step": args.train_batch_size,
        "steps_per_epoch": per_epoch,
        "steps": steps,
        "tokens_per_step": float(np.mean(tokens)),
        "micro_batches_per_step_and_rank": float(np.mean(counts)),
        "most_micro_batches": max(counts),
        "balance": float(np.mean(balances)),
        "worst_balance": float(max(balances)),
        "pruning": args.pruning,
        **{f"{name} (auto), assumed": getattr(args, name) for name in sorted(args.is_auto)},
    }
