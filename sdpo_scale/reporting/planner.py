"""Peaks of one run's micro-batches on GPUs that are not there.

A shallow model of the run's config is simulated at two depths for a few sizes of packs; straight
lines through these peaks give those of the run's depth and of sizes between.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from sdpo_scale.config import SDPOConfig
from sdpo_scale.inputs import RunInputs
from sdpo_scale.memory.budget import largest_tokens
from sdpo_scale.memory.footprint import (
    SHARDINGS,
    Footprint,
    Line,
    States,
    Working,
    footprint,
    grown,
    optimizer_kind,
)
from sdpo_scale.memory.simulation import Execution, PackShape, simulate_peaks, with_depth
from sdpo_scale.modeling.loading import empty_model
from sdpo_scale.modeling.logprobs import CHUNK_BYTES

__all__ = ["Machine", "Planner", "sharding_of"]

GiB = 2**30
_DEPTHS = (3, 4)
"""The smallest that a peak is simulated at; tests compare with deeper models."""
_LARGEST = 32768
"""Tokens of a simulated pack; peaks of larger ones are on the line through two of up to as many."""
_NOTHING = (Line(0.0, 0.0),)


def sharding_of(options: Mapping[str, Any]) -> str:
    """How parameters would be sharded: ``ZeRO-1`` to ``ZeRO-3``, ``FSDP2``, or ``none``.

    Raises:
        ValueError: the DeepSpeed configuration cannot be read.
    """
    config = options.get("deepspeed")
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"deepspeed {options['deepspeed']!r} cannot be read: {error}"
            ) from None
    if config:
        stage = config.get("zero_optimization", {}).get("stage", 0)
        return f"ZeRO-{stage}" if stage else "none"
    is_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true" or options.get("fsdp")
    return "FSDP2" if is_fsdp else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs that are planned for."""

    memory: int
    """Bytes of one GPU."""
    world_size: int
    sharding: str
    """Of ``memory.footprint.SHARDINGS``."""

    @classmethod
    def of(
        cls, options: Mapping[str, Any], *, world_size: int, memory: int = 0, sharding: str = ""
    ) -> "Machine":
        """GPUs with a kind of sharding in any case, or the one that a run's options lead to."""
        known = {name.lower(): name for name in SHARDINGS}
        kind = known.get(sharding.lower(), sharding) or sharding_of(options)
        if not sharding and kind == "none" and world_size > 1:
            kind = "DDP"
        return cls(memory=memory, world_size=world_size, sharding=kind)

    def __post_init__(self) -> None:
        """Checks what a user may have typed.

        Raises:
            ValueError: names the option.
        """
        if self.world_size < 1:
            raise ValueError(f"--world-size must be at least 1, got {self.world_size}")
        if self.sharding not in SHARDINGS:
            raise ValueError(
                f"--sharding {self.sharding!r} is unknown; choose one of {', '.join(SHARDINGS)}"
            )


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A run and the GPUs that it is planned for."""

    options: Mapping[str, Any]
    args: SDPOConfig
    config: PreTrainedConfig
    pair: tuple[int, int, int]
    """Mean tokens of prompt, chosen and rejected."""
    machine: Machine
    num_trained: int | None = None
    """Parameters with gradients; all if None."""
    num_parameters: int = 0
    _curves: dict[str, "_Curve"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters = {id(p): p.numel() for p in empty_model(self.config).parameters()}
        object.__setattr__(self, "num_parameters", sum(parameters.values()))

    @classmethod
    def of_run(
        cls, options: Mapping[str, Any], args: SDPOConfig, inputs: RunInputs, machine: Machine
    ) -> "Planner":
        """Of a run whose inputs were prepared, weights or not."""
        trained = {id(p): p.numel() for p in inputs.model.parameters() if p.requires_grad}
        prompt, chosen, rejected = (
            max(1, round(float(mean))) for mean in inputs.train.lengths.mean(axis=0)
        )
        return cls(
            options=options,
            args=args,
            config=inputs.model.config,
            pair=(prompt, chosen, rejected),
            machine=machine,
            num_trained=sum(trained.values()),
        )

    def variant(
        self, name: str, checkpointing: str, kept: float = 1.0, *, passes: int = 1
    ) -> dict[str, Any]:
        """One row of the table.

        Args:
            name: of the row.
            checkpointing: ``off`` or ``pruned``.
            kept: expected share of a step's tokens in the backward.
            passes: 2 if what is kept is packed anew, into micro-batches as large as dense ones. In
                one pass any pack may keep all of its pairs, and in the first step every one does.
        """
        curve = self.curve(checkpointing)
        now = curve.footprint(self.args.max_tokens)
        most = curve.largest()
        pairs = most // sum(self.pair)
        in_step = math.floor(pairs / kept) if passes == 2 else pairs
        per_step = self.args.train_batch_size / self.machine.world_size
        return {
            "name": name,
            "checkpointing": checkpointing,
            "kept": kept,
            "bytes": now.to_dict(),
            "total_bytes": now.total,
            "expected_bytes": self._expected(checkpointing, kept if passes == 1 else 1.0),
            "fits": now.total <= self.machine.memory,
            "largest_max_tokens": most,
            "pairs_per_micro_batch": pairs,
            "micro_batches_per_step": math.ceil(per_step / in_step) if in_step else None,
            "pairs_per_step_of_one_micro_batch": in_step * self.machine.world_size,
            "flops_per_step": self._flops(checkpointing, kept, passes=passes),
            "gathered_bytes_per_micro_batch": self._gathered(),
        }

    def own(self) -> Footprint:
        """Peak of a rank with the run's own options."""
        recomputes = bool(self.args.activation_checkpointing)
        is_pruned = self.args.pruning_options.execution(recomputes=recomputes) == "checkpoint"
        curve = self.curve("pruned" if recomputes or is_pruned else "off")
        return curve.footprint(self.args.max_tokens)

    def _expected(self, checkpointing: str, kept: float) -> float:
        """Peak of a pack that keeps what is expected, and two standard deviations more."""
        curve = self.curve(checkpointing)
        return (curve.pruned(kept) if kept < 1 else curve.footprint(self.args.max_tokens)).total

    def curve(self, checkpointing: str) -> "_Curve":
        """The peak of a variant by tokens, simulated once however many presets share it."""
        if checkpointing not in self._curves:
            self._curves[checkpointing] = _Curve(planner=self, checkpointing=checkpointing)
        return self._curves[checkpointing]

    def total_of(self, working: Working) -> Footprint:
        """The footprint with a working set."""
        is_zero = self.machine.sharding.startswith("ZeRO")
        element = 2 if is_zero else 4  # DeepSpeed trains float32 copies of 16-bit parameters
        return footprint(
            num_parameters=self.num_parameters,
            num_layers=self.config.num_hidden_layers,
            num_trained=self.num_trained,
            working=working,
            sharding=self.machine.sharding,
            world_size=self.machine.world_size,
            states=States(
                optimizer=optimizer_kind(self.args.optim),
                parameter_bytes=element,
                gradient_bytes=element,
            ),
        )

    def simulated(self, tokens: int) -> Footprint:
        """Peak of a rank, with a micro-batch of the whole model."""
        peaks = simulate_peaks(self.config, self.pack(tokens), self.execution("pruned"))
        return self.total_of((Line(max(peaks), 0.0),))

    def warnings(self, variants: list[dict[str, Any]]) -> list[str]:
        """What does not fit and the nearest change that does."""
        found = []
        now = variants[1 if self.args.activation_checkpointing else 0]
        if not now["fits"]:
            fitting = [v for v in variants if v["largest_max_tokens"] >= sum(self.pair)]
            text = (
                f"max_tokens {self.args.max_tokens} needs {now['total_bytes'] / GiB:.1f} GiB with "
                f"{now['name']}, a GPU has {self.machine.memory / GiB:.1f}: "
            )
            if now["largest_max_tokens"] >= sum(self.pair):
                text += f"set max_tokens to {now['largest_max_tokens']}"
            elif fitting:
                text += f"use {fitting[0]['name']} with max_tokens "
                text += str(fitting[0]["largest_max_tokens"])
            else:
                text += "shard over more GPUs (FSDP2 or ZeRO-3), or train an adapter (use_peft)"
            found.append(text)
        if self.machine.sharding == "ZeRO-3":
            found.append(
                "ZeRO-3's working set is taken from FSDP2's, with DeepSpeed's buckets added; it "
                "was not simulated"
            )
        if self.num_trained not in (None, self.num_parameters):
            found.append(
                "adapter: gradients on their way are counted as if all parameters were trained, "
                "an upper bound"
            )
        return found

    def execution(self, checkpointing: str) -> Execution:
        """How a micro-batch of this run is executed on a GPU."""
        shards = self.machine.world_size if self.machine.sharding in ("FSDP2", "ZeRO-3") else 1
        is_zero = self.machine.sharding.startswith("ZeRO")
        is_mixed = self.options.get("bf16") is not False  # on GPUs it is the default
        return Execution(
            num_shards=shards,
            checkpointing=checkpointing,
            parameter_dtype=torch.bfloat16 if is_zero and shards == 1 else torch.float32,
            compute_dtype=torch.bfloat16 if is_mixed else torch.float32,
            chunk_bytes=CHUNK_BYTES["cuda"],
        )

    def pack(self, tokens: int, kept: float = 1.0) -> PackShape:
        """A pack of about so many tokens, with a share of its pairs in the backward.

        Pairs are drawn one by one, so that a pack may hold more of them than the share: two
        standard deviations of that are added.
        """
        count = max(1, round(tokens / sum(self.pair)))
        most = kept + 2 * math.sqrt(kept * (1 - kept) / count)
        num_kept = min(count, math.ceil(most * count))
        rows = [self.pair[1:] if k < num_kept else (0, 0) for k in range(count)]
        return PackShape(
            lengths=(self.pair,) * count, kept=None if num_kept == count else tuple(rows)
        )

    def _flops(self, checkpointing: str, kept: float, *, passes: int) -> float:
        """Of matrix products with parameters, all ranks: 2 per parameter, token and pass."""
        backward = (
            3 if checkpointing == "pruned" else 2
        )  # twice a forward; recomputation is one more
        per_token = 1 + (backward + (passes == 2)) * kept
        tokens = self.args.train_batch_size * sum(self.pair)
        return 2.0 * self.num_parameters * tokens * per_token

    def _gathered(self) -> float:
        """Bytes that a rank receives, parameters in 16 bits, for the forward and the backward."""
        if self.machine.sharding not in ("FSDP2", "ZeRO-3"):
            return 0.0
        others = (self.machine.world_size - 1) / self.machine.world_size
        return 2 * 2 * self.num_parameters * others


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """The peak of one variant as a function of the micro-batch's tokens."""

    planner: Planner
    checkpointing: str
    _known: dict[int, Working] = field(default_factory=dict)
    """Tokens of simulated packs → their working sets."""

    def footprint(self, tokens: int) -> Footprint:
        """Peak of a rank with micro-batches of so many tokens, simulated at this size."""
        return self.planner.total_of(self._working(self._fitted(tokens)))

    def largest(self) -> int:
        """The most tokens that fit: simulated nearby, then on the line through what is nearest."""
        memory = self.planner.machine.memory
        now = self._fitted(self.planner.args.max_tokens)
        limit = max(_LARGEST, 2 * now)
        resting = self.planner.total_of(_NOTHING).total
        share = (memory - resting) / (self.footprint(now).total - resting)
        nearby = self._fitted(min(int(now * max(share, 0.0)), limit))
        self._working(nearby if nearby != now else self._fitted(2 * now))
        most = self._most()
        if most >= sum(self.planner.pair):
            self._working(self._fitted(min(most, limit)))
            most = self._most()
        return most

    def _most(self) -> int:
        return largest_tokens(lambda t: self._between(t).total, self.planner.machine.memory)

    def _between(self, tokens: int) -> Footprint:
        """On the line through the two simulated sizes that are nearest."""
        low, high = sorted(sorted(self._known, key=lambda size: abs(size - tokens))[:2])
        line = grown(self._known[low], self._known[high], tokens=(low, high), to=tokens)
        return self.planner.total_of(line)

    def pruned(self, kept: float) -> Footprint:
        """Peak at ``max_tokens`` if a share is kept: layers store the inputs of all rows anyway."""
        tokens = self._fitted(self.planner.args.max_tokens)
        peaks = zip(self._peaks(tokens, _DEPTHS[0], kept), self._working(tokens), strict=True)
        return self.planner.total_of(
            tuple(Line(peak - _DEPTHS[0] * line.stored, line.stored) for peak, line in peaks)
        )

    def _working(self, tokens: int) -> Working:
        if tokens not in self._known:
            low, high = (self._peaks(tokens, depth) for depth in _DEPTHS)
            lines = (Line.through(_DEPTHS, peaks) for peaks in zip(low, high, strict=True))
            self._known[tokens] = tuple(lines)
        return self._known[tokens]

    def _peaks(self, tokens: int, depth: int, kept: float = 1.0) -> tuple[int, ...]:
        return simulate_peaks(
            with_depth(self.planner.config, depth),
            self.planner.pack(tokens, kept),
            self.planner.execution(self.checkpointing),
        )

    def _fitted(self, tokens: int) -> int:
        """Tokens of the pack that comes closest."""
        each = sum(self.planner.pair)
        return max(1, round(tokens / each)) * each
