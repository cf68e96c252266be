"""``sdpo-scale``: parse and dispatch.

    sdpo-scale train CONFIG [--field value ...] [--json]    train, evaluate, save
    sdpo-scale train CONFIG --dry-run [--world-size N]      what that would do; starts nothing
    sdpo-scale score CONFIG [--field value ...] [--json]    fill the reference cache only
    sdpo-scale verify CONFIG [--num_draws N] [--warmup_steps N] [--field value ...] [--json]
                                                            is the pruned gradient unbiased?
    sdpo-scale check-data CONFIG [--rows N] [--field value ...] [--json]
                                                            rows, lengths, duplicates, decoded pairs
    sdpo-scale plan CONFIG|llama-3-70b [--gpu-memory 80GiB] [--world-size N] [--sharding KIND]
                    [--simulate] [--plot FILE.png] [--json] peak memory, and the most that fits
    sdpo-scale tune CONFIG [--memory-budget 0.9|60GiB] [--field value ...] [--json]
                                                            measure what max_tokens: auto takes
    sdpo-scale convert-trl SOURCE [--output FILE] [--json]  TRL's YAML or command line as a config

CONFIG is a YAML file or ``demo``; fields are those of ``SDPOConfig``.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["main"]


class _StoppedError(Exception):
    """A run that was asked to stop and has saved its state."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit code: 0; 1 if verify finds a bias, check-data an unusable row, or a rank fails; 2
        if something the user gave cannot be used; 130 if interrupted; 143 if stopped by SIGTERM,
        after a checkpoint.
    """
    parser = argparse.ArgumentParser(
        prog="sdpo-scale",
        description="DPO training on packed preference pairs",
        allow_abbrev=False,
        epilog="Any option of SDPOConfig follows as --field value and wins over the file.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("train", "train, evaluate and save a model"),
        ("score", "compute the reference log-probabilities only; resumable"),
        ("verify", "compare pruned draws of a step with its dense gradient"),
        ("check-data", "read, tokenize and describe the pairs; no weights are needed"),
        ("tune", "measure the largest micro-batches that fit, for max_tokens: auto"),
    ):
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_argument("config", metavar="CONFIG", help="a YAML file, or demo")
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        if name == "train":
            _add_launch_options(command)
        if name == "check-data":
            command.add_argument(
                "--rows", type=int, default=3, metavar="N", help="pairs to show decoded"
            )
        if name == "verify":
            command.add_argument("--num_draws", type=int, default=100, metavar="N")
            command.add_argument(
                "--warmup_steps", type=int, default=4, metavar="N", help="steps taken before"
            )
    _add_plan(commands)
    _add_convert(commands)
    options, fields = parser.parse_known_args(arguments)
    _start_logging()
    result = _result_or_code(options, fields)
    if isinstance(result, int):
        return result
    if os.environ.get("RANK", "0") != "0":
        return 0
    _print(options, result)
    return 0 if result.get("unbiased", True) and not result.get("refused_rows") else 1


def _print(options: argparse.Namespace, result: dict[str, Any]) -> None:
    if options.json:
        print(json.dumps(result))
    elif options.command == "convert-trl":
        print(result["yaml"], end="")
    elif options.command == "train" and options.dry_run:
        from sdpo_scale.reporting.dry_run import describe

        print("\n".join(describe(result)))
    elif options.command == "check-data":
        from sdpo_scale.reporting.check_data import show

        show(result, Console())
    elif options.command == "plan":
        from sdpo_scale.reporting.plan import show as show_plan

        show_plan(result, Console())
    else:
        _show(result)


def _result_or_code(options: argparse.Namespace, fields: Sequence[str]) -> dict[str, Any] | int:
    # imported late: --help and misspelt commands should not wait for torch
    from sdpo_scale.data.reference import NonFiniteError
    from sdpo_scale.failures import report

    try:
        return _run(options, fields)
    except (ValueError, OSError, ModuleNotFoundError, NonFiniteError) as error:
        report(error, is_users=True)
        return 2
    except _StoppedError as stop:
        if os.environ.get("RANK", "0") == "0":
            print(stop, file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        print("interrupted; what was saved before is complete", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("WORLD_SIZE", "1") == "1" and not isinstance(error, MemoryError):
            raise
        report(error, is_users=False)
        return 1


def _add_launch_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dry-run", action="store_true", help="check, tokenize and plan; load and start nothing"
    )
    command.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks that the job is meant to have: planned for, or else checked",
    )
    command.add_argument(
        "--expect-variables",
        metavar="A,B",
        help="environment variables without which a rank refuses to start",
    )


def _add_plan(commands: Any) -> None:
    command = commands.add_parser(
        "plan", help="predict memory and what fits; no GPU is needed", allow_abbrev=False
    )
    command.add_argument(
        "config",
        metavar="CONFIG",
        help="a YAML file, or a known model: llama-3-8b, qwen2.5-32b, ...",
    )
    command.add_argument("--gpu-memory", default="80GiB", metavar="SIZE", help="of one GPU")
    command.add_argument("--world-size", type=int, default=8, metavar="N", help="number of GPUs")
    command.add_argument("--sharding", metavar="KIND", help="none, DDP, ZeRO-1 to ZeRO-3 or FSDP2")
    command.add_argument(
        "--simulate", action="store_true", help="take the whole model through a step as well"
    )
    command.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the peaks")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_convert(commands: Any) -> None:
    command = commands.add_parser(
        "convert-trl", help="turn a config of trl dpo into one for train", allow_abbrev=False
    )
    command.add_argument(
        "source", metavar="SOURCE", help="a YAML file, or a command line in quotes"
    )
    command.add_argument("--output", metavar="FILE", help="write the config there")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _run(options: argparse.Namespace, fields: Sequence[str]) -> dict[str, Any]:
    from sdpo_scale.failures import check_variables, check_world
    from sdpo_scale.options import read_config, read_options

    if options.command == "convert-trl":
        return _convert(options, fields)
    if options.command == "train" and options.dry_run:
        from sdpo_scale.reporting.dry_run import dry_run

        world_size = options.world_size or int(os.environ.get("WORLD_SIZE", "1"))
        return dry_run(read_options(options.config, fields), world_size=world_size)
    if options.command == "plan":
        return _plan(options, fields)
    if options.command == "check-data":
        from sdpo_scale.reporting.check_data import check_data

        return check_data(read_options(options.config, fields), num_rows=options.rows)
    if options.command == "train":
        check_world(options.world_size)
        check_variables(options.expect_variables)
    run: dict[str, Callable[[Any], dict[str, Any]]] = {
        "train": _train,
        "score": _score,
        "verify": partial(_verify, options),
        "tune": _tune,
    }
    if options.command == "tune":
        fields = [*fields, "--max_tokens", "auto"]
    return run[options.command](read_config(options.config, fields))


def _plan(options: argparse.Namespace, fields: Sequence[str]) -> dict[str, Any]:
    from sdpo_scale.options import read_options
    from sdpo_scale.reporting.plan import check_plot, plan, plot

    if options.plot is not None:
        check_plot(options.plot)
    result = plan(
        read_options(options.config, fields),
        gpu_memory=options.gpu_memory,
        world_size=options.world_size,
        sharding=options.sharding,
        simulates=options.simulate,
    )
    if options.plot is not None:
        plot(result, options.plot)
    return result


def _convert(options: argparse.Namespace, fields: Sequence[str]) -> dict[str, Any]:
    from sdpo_scale.convert import convert_trl

    if fields:
        raise ValueError(f"convert-trl takes one command line: put it in quotes; got {fields[0]!r}")
    conversion = convert_trl(options.source)
    if options.output is not None:
        Path(options.output).write_text(conversion.to_yaml(), "utf-8")
    return {
        "config": conversion.options,
        "differences": conversion.differences,
        "yaml": conversion.to_yaml(),
        "output": options.output,
    }


def _start_logging() -> None:
    from rich.logging import RichHandler

    from sdpo_scale.callbacks import CONSOLE

    logger = logging.getLogger("sdpo_scale")
    is_first_rank = os.environ.get("RANK", "0") == "0"
    logger.setLevel(logging.INFO if is_first_rank else logging.ERROR)
    if logger.handlers:
        return
    if (
        CONSOLE.is_terminal and is_first_rank
    ):  # above the bars; elsewhere lines stay whole, for tools to read
        logger.addHandler(
            RichHandler(console=CONSOLE, show_time=False, show_level=False, show_path=False)
        )
    else:
        logger.addHandler(logging.StreamHandler())


def _trainer(args: Any) -> Any:
    from transformers.utils.logging import disable_progress_bar

    from sdpo_scale.trainer import SDPOTrainer

    disable_progress_bar()
    return SDPOTrainer(args=args)


def _end(trainer: Any) -> None:
    """Leaves together: a rank that exits early would break the connections of the others."""
    from sdpo_scale.waiting import wait_for_all

    wait_for_all("all ranks to finish")
    trainer.accelerator.end_training()


def _score(args: Any) -> dict[str, Any]:
    start = time.perf_counter()
    trainer = _trainer(args)
    counts = trainer.score()
    _end(trainer)
    return {**counts, "seconds": round(time.perf_counter() - start, 1)}


def _verify(options: argparse.Namespace, args: Any) -> dict[str, Any]:
    from sdpo_scale.reporting.verify import verify

    return verify(args, num_draws=options.num_draws, warmup_steps=options.warmup_steps)


def _tune(args: Any) -> dict[str, Any]:
    from sdpo_scale.reporting.tune import tune
    from sdpo_scale.waiting import wait_for_all

    result = tune(args)
    wait_for_all("all ranks to finish")
    return result


def _train(args: Any) -> dict[str, Any]:
    start = time.perf_counter()
    trainer = _trainer(args)
    trained = trainer.train(args.resume_from_checkpoint)
    if trainer.stop_signal.was_received:
        _end(trainer)
        raise _StoppedError(
            f"stopped by SIGTERM after step {trained.global_step}; its checkpoint is complete, "
            "resume_from_checkpoint: auto goes on from it"
        )
    history = trainer.state.log_history
    evaluations = [entry for entry in history if "eval_loss" in entry]
    best = trainer.state.best_global_step if args.load_best_model_at_end else None
    if best is not None:  # the saved model is that of an earlier evaluation
        evaluations += [entry for entry in evaluations if entry["step"] == best]
    elif trainer.inputs.eval is not None and (
        not evaluations or evaluations[-1]["step"] != trained.global_step
    ):
        evaluations.append({**trainer.evaluate(), "step": trained.global_step})
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    _end(trainer)
    return {
        "output_dir": str(Path(args.output_dir).resolve()),
        "steps": trained.global_step,
        "train_loss": trained.training_loss,
        "eval_before": evaluations[0] if evaluations else None,
        "eval_after": evaluations[-1] if evaluations else None,
        "pairs_per_second": trained.metrics["train_samples_per_second"],
        "peak_memory_gib": trainer.step_log.numbers.get("peak_memory_gib"),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _show(result: dict[str, Any]) -> None:
    console = Console()
    before, after = result.get("eval_before"), result.get("eval_after")
    if before and after:
        table = Table(title="held-out pairs")
        for heading in ("metric", f"step {before['step']}", f"step {after['step']}"):
            table.add_column(heading, justify="right")
        for name in ("loss", "rewards/accuracies", "rewards/margins"):
            values = [f"{entry[f'eval_{name}']:.4f}" for entry in (before, after)]
            table.add_row(name, *values)
        console.print(table)
    for name, value in result.items():
        if not isinstance(value, dict) and value is not None:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            console.print(f"{name.replace('_', ' ')}: {text}", highlight=False, soft_wrap=True)
