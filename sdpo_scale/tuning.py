"""``max_tokens: auto`` and ``train_batch_size: auto``: numbers that are measured on the device.

Packs of growing size go through the step's forward and backward, with the loss times 0 and all
gradients in place from an earlier pack. They are the worst that the run can come to: copies of its
longest pair, all kept, as a pack may keep all of its pairs whatever is pruned. The optimizer's
state and DDP's buckets, which are not there yet, are added. On a GPU a peak is what the allocator
has reserved and what lies outside of it; on a CPU, the bytes of tensors that live (not DeepSpeed's
own). Parameters and random state stay as they are, and gradients are gone afterwards.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sdpo_scale.config import SDPOConfig
from sdpo_scale.data.pairs import Pair
from sdpo_scale.data.reference import NonFiniteError
from sdpo_scale.inputs import RunInputs
from sdpo_scale.memory.budget import measured_tokens, parse_bytes
from sdpo_scale.memory.footprint import OPTIMIZER_BYTES, optimizer_kind
from sdpo_scale.memory.simulation import LiveBytes
from sdpo_scale.record import Ranks
from sdpo_scale.sharding import Sharding
from sdpo_scale.token_limit import write_json
from sdpo_scale.trl_options import DEFAULT_PAIRS

__all__ = ["Tuner", "worst_pack"]

logger = logging.getLogger(__name__)

GiB = 2**30
_FILL = 0.95
"""Of a pack, what pairs of different lengths fill on average."""
_OPTIONS = ["activation_checkpointing", "activation_checkpointing_kwargs", "score_max_tokens"]
_OPTIONS += ["optim", "load_in_4bit", "gradient_reduction", "memory_budget"]


class Tuner:
    """Finds a run's ``auto`` numbers."""

    NAME = "tuned.json"

    def __init__(
        self, args: SDPOConfig, inputs: RunInputs, sharding: Sharding, *, run: Callable[..., Any]
    ) -> None:
        """Takes the run's options, inputs and ranks, and its ``SDPOTrainer.run_pairs``."""
        self._args, self._inputs, self._sharding, self._run = args, inputs, sharding, run
        self._ranks, self._pruning = sharding.ranks, args.pruning_options
        self.path = args.output_path / self.NAME
        self.is_made_later = sharding.name != "none"  # what FSDP2 and ZeRO train, by Trainer.train
        self._execution = self._pruning.execution(recomputes=bool(args.activation_checkpointing))
        data = [part for part in (inputs.train, inputs.eval) if part is not None]
        longest = [part[int(part.lengths.sum(axis=1).argmax())] for part in data]
        self._longest = max(longest, key=lambda pair: sum(map(len, pair.tokens)))
        self._least = sum(map(len, self._longest.tokens))
        is_auto = "train_batch_size" in args.is_auto
        most = len(inputs.train) if is_auto else args.train_batch_size
        in_a_step = int(np.sort(inputs.train.lengths.sum(axis=1))[-most:].sum())
        self._most = max(self._least, min(in_a_step, args.score_max_tokens or in_a_step))
        self._device, self._memory = "cpu", 0
        if args.device.type == "cuda":
            properties = torch.cuda.get_device_properties(args.device)
            self._device, self._memory = properties.name, properties.total_memory
        self._valid_for = self._validity()  # now: Trainer.train may change the model's config

    def complete(self, model: nn.Module) -> None:
        """Puts numbers in the place of ``auto``.

        Raises:
            ValueError: nothing was measured of a model that is sharded later, or as ``measure``.
        """
        args = self._args
        if "max_tokens" in args.is_auto:
            found = self._ranks.gather(self._read())[0]  # the first rank's view decides
            if found is None and self.is_made_later:
                raise ValueError(
                    f"max_tokens: auto under {self._sharding.name} takes what was measured before, "
                    f"and {self.path} is not valid for this run: start sdpo-scale tune with the "
                    "same config and launcher first"
                )
            args.max_tokens = (found or self.measure(model))["max_tokens"]
        if "train_batch_size" in args.is_auto:
            args.train_batch_size = self._pairs_per_step()

    def measure(self, model: nn.Module) -> dict[str, Any]:
        """Measures packs, on all ranks together, and writes what it returns into the file.

        Args:
            model: what is trained, in the form that it is executed in.

        Raises:
            ValueError: the longest pair does not fit into the budget.
        """
        args, given = self._args, self._args.memory_budget
        own = parse_bytes(given) if isinstance(given, str) else int(given * self._memory)
        budget = min(self._ranks.gather(own))
        was_training, self._is_warm = model.training, False
        self._enable_checkpointing()
        model.train()
        peak = partial(self._peak, model)
        try:
            peaks = measured_tokens(peak, budget, least=self._least, most=self._most)
        finally:
            model.zero_grad()
            model.train(was_training)
            if args.device.type == "cuda":  # the run reports peaks of its own
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(args.device)
        known = {tokens: peak for tokens, peak in peaks.items() if peak < math.inf}
        best = max((tokens for tokens, peak in known.items() if peak <= budget), default=None)
        if best is None:
            raise ValueError(
                f"max_tokens: auto: the longest pair, {self._least} tokens, needs "
                f"{peaks[self._least] / GiB:.4f} GiB, and memory_budget {given} is "
                f"{budget / GiB:.4f} GiB: lower max_length, shard over more ranks, or raise it"
            )
        result = {"max_tokens": best, "peak_bytes": known[best], "budget_bytes": budget}
        result |= {"measured": list(known.items()), "valid_for": self._valid_for}
        if self._ranks.is_first_of_node:
            write_json(self.path, result)
        self._ranks.wait(f"{self.path} to be written")
        text = "max_tokens: auto → %d, peak %.4f of %.4f GiB, %d packs measured; written to %s"
        logger.info(text, best, known[best] / GiB, budget / GiB, len(peaks), self.path)
        return result

    def _peak(self, model: nn.Module, tokens: int) -> float:
        """Bytes of the fullest rank with packs of so many tokens; infinite if one ran out."""
        peak = math.inf
        execute = partial(self._execute, model, tokens)
        with suppress(torch.OutOfMemoryError):
            if not self._is_warm:  # gradients appear, libraries take their workspaces
                execute()
                self._is_warm = True
            on_gpu = self._args.device.type == "cuda"
            peak = _reserved(execute, self._args.device) if on_gpu else _tracked(execute, model)
            peak += self._missing_bytes(model)
        return max(self._ranks.gather(peak))

    def _execute(self, model: nn.Module, tokens: int) -> None:
        """One micro-batch, and the larger one without gradient that two passes begin with."""
        scored = self._args.score_max_tokens or 2 * tokens
        passes = [(tokens, 0.0), (scored, None)][: 1 + (self._execution == "two_pass")]
        for size, weight in passes:
            pairs = worst_pack(self._longest, size)
            options = {"weight": weight, "with_statistics": True, "max_tokens": size}
            # a loss without reference may overflow; the work was done all the same
            with suppress(NonFiniteError), torch.set_grad_enabled(weight is not None):
                self._run(model, (pairs, None), ranks=Ranks(), **options)

    def _missing_bytes(self, model: nn.Module) -> float:
        """What training holds besides: the optimizer's state, and DDP's copies of gradients."""
        if self._sharding.name.startswith("ZeRO"):  # its engine has made its states by now
            return 0.0
        trained = [_local(p) for p in model.parameters() if p.requires_grad]
        state = OPTIMIZER_BYTES[optimizer_kind(self._args.optim)] * sum(t.numel() for t in trained)
        is_ddp = not self.is_made_later and self._ranks.world_size > 1
        return state + is_ddp * sum(t.nbytes for t in trained)

    def _enable_checkpointing(self) -> None:
        """As ``Trainer.train`` does it (transformers 5.24), where that has not begun yet."""
        if self._args.activation_checkpointing and not self.is_made_later:
            rest: Any = dict(self._args.activation_checkpointing_kwargs or {})  # type: ignore[arg-type]
            own = {name: rest.pop(name) for name in ("every_n_layers", "offload") if name in rest}
            model: Any = self._inputs.model
            options = {"activation_checkpointing_kwargs": rest or None, **own}
            model.activation_checkpointing_enable(**options)

    def _validity(self) -> dict[str, str]:
        """What the answer depends on → its value in this run."""
        args, model, adapter = self._args, self._inputs.model, self._inputs.adapter
        left_out = ("_name_or_path", "transformers_version")
        shape = {n: v for n, v in model.config.to_dict().items() if n not in left_out}
        text = json.dumps(shape, sort_keys=True, default=str)
        return {
            "model config": hashlib.sha256(text.encode()).hexdigest()[:16],
            "dtype": f"{model.dtype} parameters, {args.compute_dtype or model.dtype} products",
            "adapter": adapter.description if adapter else "none",
            **{option: str(getattr(args, option)) for option in _OPTIONS},
            "pruning execution": self._execution,
            "tokens of longest pair and step": f"{self._least}, {self._most}",
            "sharding": f"{self._sharding.name}, {self._ranks.world_size} ranks",
            "device": f"{self._device}, {self._memory} bytes",
            "torch": str(torch.__version__),
        }

    def _read(self) -> dict[str, Any] | None:
        """What the file holds, if it is valid for this run; what differs is logged."""
        if not self.path.is_file():
            return None
        found: dict[str, Any] = json.loads(self.path.read_text("utf-8"))  # complete or absent
        saved, now = found["valid_for"], self._valid_for
        changed = [f"{n} {saved.get(n)} → {now[n]}" for n in now if saved.get(n) != now[n]]
        if changed:
            logger.warning("%s is not valid for this run: %s", self.path, "; ".join(changed))
            return None
        logger.info("max_tokens: auto → %d, measured before (%s)", found["max_tokens"], self.path)
        return found

    def _pairs_per_step(self) -> int:
        args, kept, why = self._args, 1.0, "pruning is off"
        if self._execution == "two_pass" and self._pruning.keep_fraction is not None:
            kept = self._pruning.keep_fraction
            why = f"the backward's packs hold the {kept:g} that is kept"
        elif self._pruning.is_active:
            why = f"pruning {args.pruning} adds none here: a pack may keep all of its pairs"
        lengths, world_size = self._inputs.train.lengths, self._ranks.world_size
        filled = _FILL * args.max_tokens / float(lengths.sum(axis=1).mean())
        dense = max(1, int(filled))
        packs = math.ceil(DEFAULT_PAIRS / (dense * world_size))
        pairs = min(packs * world_size * max(dense, int(filled / kept)), len(lengths))
        logger.info(
            "train_batch_size: auto → %d pairs: %d micro-batches on each of %d ranks, as many as "
            "%d pairs need without pruning (%s); learning_rate stays %g, no rule was applied",
            *(pairs, packs, world_size, DEFAULT_PAIRS, why, args.learning_rate),
        )
        return pairs


def worst_pack(pair: Pair, tokens: int) -> list[Pair]:
    """Copies of a pair, the last one shorter or a little longer, of exactly so many tokens."""
    lengths = [len(ids) for ids in pair.tokens]
    whole, rest = divmod(tokens, sum(lengths))
    third = rest // 3
    last = [rest - 2 * third, third, third] if third else [lengths[0] + rest, *lengths[1:]]
    pairs = []
    for sizes in [*[lengths] * (whole - (third == 0)), last]:
        ids = [np.resize(given, size) for given, size in zip(pair.tokens, sizes, strict=True)]
        pairs.append(replace(pair, prompt_ids=ids[0], chosen_ids=ids[1], rejected_ids=ids[2]))
    return pairs


def _tracked(execute: Callable[[], None], model: nn.Module) -> float:
    """Bytes of parameters, buffers and gradients, and of what lives beside them at once."""
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    held = [_local(t) for t in chain(model.parameters(), model.buffers(), gradients)]
    live = LiveBytes()
    for tensor in held:
        live.ignore(tensor)
    with live:
        execute()
    return float(live.peak + sum(tensor.nbytes for tensor in held))


def _reserved(execute: Callable[[], None], device: torch.device) -> float:
    """Bytes in use on a GPU: reserved by the allocator, and by whoever else is there."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    execute()
    return float(others + torch.cuda.max_memory_reserved(device))


def _local(tensor: Tensor) -> Tensor:
    part: Any = getattr(tensor, "ds_tensor", tensor)  # a rank's part under ZeRO-3
    local: Tensor = part.to_local() if isinstance(part, DTensor) else part
    return local
