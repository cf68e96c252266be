"""FLOPs, time and peak memory of pruned activation checkpointing.

    OMP_NUM_THREADS=1 python tests/benchmarks/recompute.py [--json]     # about 2 minutes

One forward and backward of a pack of 16 pairs (2,048 tokens) through a Llama of 8 layers: without
checkpointing, with transformers' own, and pruned with all, half and a quarter of the pairs kept.
GFLOPs are torch's count (attention on the CPU counts 0), times are medians in alternating order and
given as ratios to transformers' checkpointing, peak memory is the most bytes of live tensors beyond
parameters and their gradients (on CUDA, of the allocator).
"""

import argparse
import gc
import json
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.packing.layout import build_layout, select_rows

NUM_PAIRS, PROMPT, RESPONSE = 16, 48, 40
KEPT = {"pruned, all kept": 16, "pruned, 1/2 kept": 8, "pruned, 1/4 kept": 4}
VARIANTS = ("stored", "checkpointing", *KEPT)
ROUNDS = 5


class PeakBytes(TorchDispatchMode):
    """Bytes of the storages that operations return, from birth to death."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage())
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config).to(device).train()
    bind_logprob_forward(model, backend="sdpa")
    recompute = PrunedRecompute.bind(model)
    rng = np.random.default_rng(0)
    parts = (PROMPT, RESPONSE, RESPONSE)
    pairs = [
        tuple(rng.integers(0, 4096, n).astype(np.int32) for n in parts) for _ in range(NUM_PAIRS)
    ]
    runs = {name: _runner(name, model, recompute, build_layout(pairs)) for name in VARIANTS}
    for run in runs.values():  # gradients exist from here on, so they are in no peak
        run()
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(ROUNDS):
        for name in VARIANTS if number % 2 == 0 else VARIANTS[::-1]:
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["checkpointing"])
    results = {
        name: {
            "gflops": _gflops(run),
            "time_ratio": statistics.median(seconds[name]) / base,
            "peak_mib": _peak_bytes(run, device) / 2**20,
        }
        for name, run in runs.items()
    }
    if options.json:
        print(json.dumps(results))
        return
    print("| variant | GFLOPs | time / checkpointing | peak MiB |")
    print("|---|---|---|---|")
    for name, r in results.items():
        print(f"| {name} | {r['gflops']:.1f} | {r['time_ratio']:.2f} | {r['peak_mib']:.0f} |")


def _runner(name: str, model: Any, recompute: PrunedRecompute, layout: Any) -> Callable[[], None]:
    num_kept = KEPT.get(name, NUM_PAIRS)
    lengths = [(RESPONSE, RESPONSE)] * num_kept + [(0, 0)] * (NUM_PAIRS - num_kept)
    weights = torch.zeros(NUM_PAIRS * 2 * RESPONSE)
    weights[: num_kept * 2 * RESPONSE] = 1.0

    def run() -> None:
        if name == "checkpointing":
            model.activation_checkpointing_enable()
        else:
            model.activation_checkpointing_disable()
        if name in KEPT:
            recompute.begin()
        logprobs = model(pack=layout, with_norms=True).logprobs_R
        if name in KEPT:
            recompute.keep(select_rows(layout, lengths))
        (logprobs * weights.to(logprobs.device)).sum().backward()

    return run


def _gflops(run: Callable[[], None]) -> float:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() / 1e9


def _peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        resting = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - resting
    gc.collect()
    with PeakBytes() as tracker:
        run()
    return tracker.peak


if __name__ == "__main__":
    main()
