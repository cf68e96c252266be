"""Held-out quality, time and FLOPs of pruned training beside dense training.

    OMP_NUM_THREADS=1 python tests/benchmarks/quality.py --json       # about 45 minutes on one core

A Llama of 6.5 M parameters (small-lm/) is trained on 3 in 4 of the 63 chat pairs, activation
checkpointing on, the same number of steps for every variant and seed; the seed orders the pairs and
drives the draws. Prints a table, or with --json one object per variant:

    eval_loss, eval_accuracy    on the held-out prompts after the last step: mean and standard
                                deviation over the seeds
    step_seconds                mean time of an optimizer step; `speedup` is the dense variant's
                                over it, in the same run
    flops_ratio                 FLOPs executed over those of the dense variant
    variance_inflation          predicted, mean over the run, and over its last quarter (`_late`)
    noise_adjusted_speedup      dense FLOPs / FLOPs / variance inflation, mean over the run
    clipped_fraction            share of steps whose gradient was clipped

`random-keep` is the control: uniform inclusion at the budget of exact-budget. Variants alternate
within each seed, each run is a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "exact-budget": {"pruning": "exact-budget"},
    "random-keep": {"pruning": "exact-budget", "pruning_kwargs": {"branches": "uniform"}},
    "memory": {"pruning": "memory"},
    "paper": {"pruning": "paper"},
}
PRUNING = ("variance_inflation", "noise_adjusted_speedup", "backward_fraction", "max_weight")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(_train(options.worker[0], int(options.worker[1]), options)))
        return
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in options.variants}
    with tempfile.TemporaryDirectory() as cache:
        for seed in range(options.seeds):
            order = options.variants if seed % 2 == 0 else options.variants[::-1]
            for variant in order:
                runs[variant].append(_run(variant, seed, cache, options))
    results = {variant: _summary(found, runs.get("dense")) for variant, found in runs.items()}
    if options.json:
        print(json.dumps(results))
    else:
        _print_table(results)


def _run(variant: str, seed: int, cache: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", variant, str(seed), "--cache", cache]
    command += ["--steps", str(options.steps), "--learning-rate", str(options.learning_rate)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{variant} with seed {seed} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(variant, seed, result, file=sys.stderr, flush=True)
    return result


def _train(variant: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch

    from sdpo_scale import SDPOConfig, SDPOTrainer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() as folder:
        args = SDPOConfig(
            output_dir=folder,
            cache_dir=options.cache,
            model=str(HERE / "small-lm"),
            train_dataset=str(HERE / "data" / "chat.jsonl"),
            eval_holdout=4,
            max_length=None,
            train_batch_size=8,
            max_tokens=8192,
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=2,
            activation_checkpointing=True,
            seed=seed,
            eval_on_start=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            **VARIANTS[variant],
        )
        trainer = SDPOTrainer(args=args)
        trainer.score()
        trainer.train()
        evaluation = trainer.evaluate()
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        late = steps[-len(steps) // 4 :]
        return {
            "eval_loss": evaluation["eval_loss"],
            "eval_accuracy": evaluation["eval_rewards/accuracies"],
            # the first step of a process also fills its caches
            "step_seconds": statistics.mean(8 / s["pairs_per_second"] for s in steps[1:]),
            "flops": trainer.state.total_flos,
            "clipped_fraction": steps[-1]["clipped_fraction"],
            **{f"{n}": _mean(steps, n) for n in PRUNING},
            **{f"{n}_late": _mean(late, n) for n in PRUNING},
        }


def _mean(steps: list[dict[str, float]], name: str) -> float:
    return statistics.mean(step.get(f"pruning/{name}", 1.0) for step in steps)


def _summary(
    runs: list[dict[str, float]], dense: list[dict[str, float]] | None
) -> dict[str, float | None]:
    summary: dict[str, float | None] = {
        name: statistics.mean(run[name] for run in runs) for name in runs[0]
    }
    for name in ("eval_loss", "eval_accuracy"):
        spread = statistics.stdev(run[name] for run in runs) if len(runs) > 1 else None
        summary[f"{name}_spread"] = spread
    if dense:
        for name, ratio in (("step_seconds", "speedup"), ("flops", "flops_ratio")):
            ratios = [d[name] / r[name] for d, r in zip(dense, runs, strict=True)]
            summary[ratio] = statistics.median(ratios)
        summary["flops_ratio"] = 1 / summary["flops_ratio"]
    return summary


def _print_table(results: dict[str, dict[str, float | None]]) -> None:
    columns = {
        "eval_loss": "{:.4f} ± {:.4f}",
        "eval_accuracy": "{:.3f} ± {:.3f}",
        "step_seconds": "{:.2f}",
        "speedup": "{:.2f}",
        "flops_ratio": "{:.2f}",
        "variance_inflation": "{:.2f}",
        "variance_inflation_late": "{:.2f}",
        "noise_adjusted_speedup": "{:.2f}",
        "noise_adjusted_speedup_late": "{:.2f}",
        "clipped_fraction": "{:.2f}",
    }
    print("| variant | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for variant, result in results.items():
        cells = [
            form.format(result[name] or 0.0, result.get(f"{name}_spread") or 0.0)
            for name, form in columns.items()
        ]
        print(f"| {variant} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
