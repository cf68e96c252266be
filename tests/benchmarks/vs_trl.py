"""Pairs per second and peak memory beside TRL's DPOTrainer.

    OMP_NUM_THREADS=1 python tests/benchmarks/vs_trl.py --json        # about 50 minutes on one core

Prints a table, or with --json {"chat": {"speedup": ..., "peak_ratio": ..., ...}, "long": {...}}.

Both trainers take the same optimizer steps: a random Llama of 34 M parameters in float32, the same
pairs in the same order, 8 pairs a step, AdamW, no truncation. TRL runs as its defaults say: 8 pairs
a device batch, padded, with a live reference model; and once more with precomputed reference
log-probabilities. Each measurement is a process of its own and their order is mirrored (ours, TRL,
TRL precomputed, TRL, ours). The first step, on short pairs, warms up and is not counted. A variant
that the system kills for its memory has no numbers (null).

    step_seconds     wall time of an optimizer step: forward, backward, clip, update, metrics
    speedup          TRL's default step time / (our step time + scoring the step's reference): one
                     epoch, in which TRL's live reference and our cache each score a pair once
    step_speedup     TRL's default step time / our step time: epochs after the first
    precomputed_...  the same against TRL with precompute_ref_log_probs, both without scoring
    peak_ratio       our peak memory / TRL's default, both above what the process holds before
                     its first step
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VARIANTS = ("sdpo_scale", "trl", "trl_precomputed")
ORDER = ("sdpo_scale", "trl", "trl_precomputed", "trl", "sdpo_scale")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--data", nargs="+", default=["chat", "long"], choices=["chat", "long"])
    parser.add_argument("--checkpointing", nargs="+", default=["on", "off"], choices=["on", "off"])
    parser.add_argument("--steps", type=int, default=1, help="counted steps of each measurement")
    parser.add_argument("--pairs-per-step", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        variant, data, checkpointing = options.worker
        print(json.dumps(_measure(variant, data, checkpointing == "on", options)))
        return
    results: dict[str, dict[str, Any]] = {}
    for data in options.data:
        by_mode = {mode: _compare(data, mode, options) for mode in options.checkpointing}
        results[data] = {**by_mode[options.checkpointing[0]], "by_checkpointing": by_mode}
    if options.json:
        print(json.dumps(results))
    else:
        _print_table(results)


def _compare(data: str, checkpointing: str, options: argparse.Namespace) -> dict[str, float | None]:
    """Measures the variants in mirrored order and compares medians."""
    measured: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for variant in ORDER:
        command = [sys.executable, __file__, "--worker", variant, data, checkpointing]
        for name in ("steps", "pairs_per_step", "max_tokens"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == -signal.SIGKILL:
            print(variant, data, checkpointing, "out of memory", file=sys.stderr)
            continue
        if done.returncode:
            sys.exit(f"{variant} on {data} failed:\n{done.stderr}")
        measured[variant].append(json.loads(done.stdout.splitlines()[-1]))
        print(variant, data, checkpointing, measured[variant][-1], file=sys.stderr)

    def median(variant: str, name: str) -> float | None:
        found = measured[variant]
        return statistics.median(m[name] for m in found) if found else None

    ours, default, precomputed = (median(variant, "step_seconds") for variant in VARIANTS)
    scoring = median("sdpo_scale", "scoring_seconds_per_step")
    peak, default_peak, precomputed_peak = (median(v, "peak_bytes") for v in VARIANTS)
    return {
        "speedup": _ratio(default, ours and scoring and ours + scoring),
        "step_speedup": _ratio(default, ours),
        "precomputed_step_speedup": _ratio(precomputed, ours),
        "peak_ratio": _ratio(peak, default_peak),
        "precomputed_peak_ratio": _ratio(peak, precomputed_peak),
        "pairs_per_second": _ratio(options.pairs_per_step, ours),
        "trl_pairs_per_second": _ratio(options.pairs_per_step, default),
        "peak_gib": _ratio(peak, 2**30),
        "trl_peak_gib": _ratio(default_peak, 2**30),
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _measure(
    variant: str, data: str, checkpointing: bool, options: argparse.Namespace
) -> dict[str, float]:
    """Trains in this process; step 1 is not counted."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    # where memory runs out, this process is to be killed and no other
    Path("/proc/self/oom_score_adj").write_text("1000")
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    tokenizer = AutoTokenizer.from_pretrained(HERE / "small-lm")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    lines = (HERE / "data" / f"{data}.jsonl").read_text("utf-8").split("\n")
    size = options.pairs_per_step
    rows = [json.loads(line) for line in lines[: options.steps * size] if line]
    rows = _warm_up_rows(size) + rows

    class Timer(TrainerCallback):
        """Wall time of each step, and the memory held before the first counted one."""

        seconds: list[float] = []  # noqa: RUF012
        resting_bytes = 0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if len(self.seconds) == 0:
                self.resting_bytes = _resident_bytes()
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    timer = Timer()
    common = {
        "num_train_epochs": 1,
        "learning_rate": 1e-6,
        "max_length": None,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "activation_checkpointing": checkpointing,
        "train_sampling_strategy": "sequential",
    }
    with tempfile.TemporaryDirectory() as folder:
        common["output_dir"] = folder
        train = _train_ours if variant == "sdpo_scale" else _train_trl
        scoring = train(model, tokenizer, rows, common, timer, variant, options)
    counted = timer.seconds[1:]
    return {
        "step_seconds": sum(counted) / len(counted),
        # the warm-up pairs are scored too, but are a hundredth of the tokens
        "scoring_seconds_per_step": scoring / len(counted),
        "peak_bytes": _peak_resident_bytes() - timer.resting_bytes,
        "resting_bytes": timer.resting_bytes,
    }


def _warm_up_rows(size: int) -> list[dict[str, Any]]:
    """A step of short pairs."""
    say = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    return [
        {
            "prompt": say("user", f"Say yes. ({number})"),
            "chosen": say("assistant", "Yes."),
            "rejected": say("assistant", "No, I would rather not."),
        }
        for number in range(size)
    ]


def _train_ours(model, tokenizer, rows, common, timer, _variant, options) -> float:
    """Returns the seconds of scoring the reference, the model's fingerprint included."""
    from sdpo_scale import SDPOConfig, SDPOTrainer

    args = SDPOConfig(
        **common,
        train_batch_size=options.pairs_per_step,
        max_tokens=options.max_tokens,
        cache_dir=common["output_dir"] + "/cache",
    )
    trainer = SDPOTrainer(
        model=model, args=args, train_dataset=rows, processing_class=tokenizer, callbacks=[timer]
    )
    start = time.perf_counter()
    trainer.score()
    scoring = time.perf_counter() - start
    trainer.train()
    return scoring


def _train_trl(model, tokenizer, rows, common, timer, variant, options) -> float:
    """Returns 0: a live reference is part of the step, a precomputed one is not compared."""
    import copy

    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    precomputed = variant == "trl_precomputed"
    args = DPOConfig(
        **common,
        per_device_train_batch_size=options.pairs_per_step,
        gradient_checkpointing=None,
        precompute_ref_log_probs=precomputed,
        disable_tqdm=True,
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=None if precomputed else copy.deepcopy(model),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[timer],
    )
    trainer.train()
    return 0.0


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peak_resident_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _print_table(results: dict[str, dict[str, Any]]) -> None:
    names = [
        "pairs_per_second",
        "trl_pairs_per_second",
        "speedup",
        "step_speedup",
        "precomputed_step_speedup",
        "peak_gib",
        "trl_peak_gib",
        "peak_ratio",
    ]
    print("| data | checkpointing | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 2) + "|")
    for data, result in results.items():
        for mode, numbers in result["by_checkpointing"].items():
            values = [numbers[name] for name in names]
            cells = " | ".join("-" if v is None else f"{v:.2f}" for v in values)
            print(f"| {data} | {mode} | {cells} |")


if __name__ == "__main__":
    main()
