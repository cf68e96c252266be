"""Peaks of one run's micro-batches on GPUs that are not there.

A shallow model of the run's config is simulated at two depths for a few sizes of packs; straight
lines through these peaks give those of the run's depth and of sizes between.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from sdpo_scale.config import SDPOConfig
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
from sdpo_scale.memory.simulation import Execution, PackShape, Peak, simulate_peak, with_depth
from sdpo_scale.modeling.loading import empty_model
from sdpo_scale.modeling.logprobs import CHUNK_BYTES

__all__ = ["Machine", "Planner"]

GiB = 2**30
_DEPTHS = (3, 4)
"""The smallest that a peak is simulated at; tests compare with deeper models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs that are planned for."""

    memory: int
    """Bytes of one GPU."""
    world_size: int
    sharding: str
    """Of ``memory.footprint.SHARDINGS``."""

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
    num_parameters: int = 0
    _curves: dict[tuple[str, float], "_Curve"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters = {id(p): p.numel() for p in empty_model(self.config).parameters()}
        object.__setattr__(self, "num_parameters", sum(parameters.values()))

    def variant(self, name: str, checkpointing: str, kept: float) -> dict[str, Any]:
        """One row of the table."""
        curve = self.curve(checkpointing, kept)
        now = curve.footprint(self.args.max_tokens)
        most = curve.largest()
        tokens_per_pair = sum(self.pair)
        pairs = most // tokens_per_pair
        per_step = self.args.train_batch_size / self.machine.world_size
        return {
            "name": name,
            "kept": kept,
            "bytes": now.to_dict(),
            "total_bytes": now.total,
            "fits": now.total <= self.machine.memory,
            "largest_max_tokens": most,
            "pairs_per_micro_batch": pairs,
            "micro_batches_per_step": math.ceil(per_step / pairs) if pairs else None,
            "pairs_per_step_of_one_micro_batch": pairs * self.machine.world_size,
            "flops_per_step": self._flops(checkpointing, kept),
            "gathered_bytes_per_micro_batch": self._gathered(),
        }

    def curve(self, checkpointing: str, kept: float) -> "_Curve":
        """The peak of a variant by tokens, simulated once however many presets share it."""
        key = (checkpointing, kept)
        if key not in self._curves:
            self._curves[key] = _Curve(planner=self, checkpointing=checkpointing, kept=kept)
        return self._curves[key]

    def total_of(self, working: Working) -> Footprint:
        """The footprint with a working set."""
        is_zero = self.machine.sharding.startswith("ZeRO")
        element = 2 if is_zero else 4  # DeepSpeed trains float32 copies of 16-bit parameters
        return footprint(
            num_parameters=self.num_parameters,
            num_layers=self.config.num_hidden_layers,
            working=working,
            sharding=self.machine.sharding,
            world_size=self.machine.world_size,
            states=States(
                optimizer=optimizer_kind(self.args.optim),
                parameter_bytes=element,
                gradient_bytes=element,
            ),
        )

    def simulated(self, tokens: int) -> Peak:
        """Peak of a micro-batch of the whole model, beyond parameters and gradients."""
        return simulate_peak(self.config, self.pack(tokens, 1.0), self.execution("pruned"))

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
        if self.args.use_peft:
            found.append("use_peft: planned as if all parameters were trained, an upper bound")
        return found

    def execution(self, checkpointing: str) -> Execution:
        """How a micro-batch of this run is executed on a GPU."""
        shards = self.machine.world_size if self.machine.sharding in ("FSDP2", "ZeRO-3") else 1
        is_zero = self.machine.sharding.startswith("ZeRO")
        return Execution(
            num_shards=shards,
            checkpointing=checkpointing,
            parameter_dtype=torch.bfloat16 if is_zero and shards == 1 else torch.float32,
            chunk_bytes=CHUNK_BYTES["cuda"],
        )

    def pack(self, tokens: int, kept: float) -> PackShape:
        """A pack of about so many tokens, with a share of its pairs in the backward."""
        count = max(1, round(tokens / sum(self.pair)))
        num_kept = math.ceil(kept * count)
        rows = [self.pair[1:] if k < num_kept else (0, 0) for k in range(count)]
        return PackShape(
            lengths=(self.pair,) * count, kept=None if num_kept == count else tuple(rows)
        )

    def _flops(self, checkpointing: str, kept: float) -> float:
        """Of matrix products with parameters, all ranks: 2 per parameter, token and pass."""
        passes = 1 + (3 if checkpointing == "pruned" else 2) * kept
        tokens = self.args.train_batch_size * sum(self.pair)
        return 2.0 * self.num_parameters * tokens * passes

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
    kept: float
    _known: dict[int, Working] = field(default_factory=dict)
    """Tokens of simulated packs → their working sets."""

    def footprint(self, tokens: int) -> Footprint:
        """Peak of a rank with micro-batches of so many tokens, simulated at this size."""
        return self.planner.total_of(self._working(self._fitted(tokens)))

    def largest(self) -> int:
        """The most tokens that fit, between sizes that were simulated, or next to one."""
        memory = self.planner.machine.memory
        now = self._fitted(self.planner.args.max_tokens)
        self._working(now)
        self._working(self._fitted(2 * now))
        most = largest_tokens(lambda tokens: self._between(tokens).total, memory)
        if most >= sum(self.planner.pair):
            self._working(self._fitted(most))
            most = largest_tokens(lambda tokens: self._between(tokens).total, memory)
        return most

    def _between(self, tokens: int) -> Footprint:
        """On the line through the two simulated sizes that are nearest."""
        low, high = sorted(sorted(self._known, key=lambda size: abs(size - tokens))[:2])
        line = grown(self._known[low], self._known[high], tokens=(low, high), to=tokens)
        return self.planner.total_of(line)

    def _working(self, tokens: int) -> Working:
        if tokens not in self._known:
            peaks = [self._peak(tokens, depth) for depth in _DEPTHS[: 2 if self.kept == 1 else 1]]
            if self.kept < 1:  # each layer stores the inputs of all rows, whatever is kept
                stored = self.planner.curve(self.checkpointing, 1.0).stored_per_token() * tokens
                start = Line(peaks[0].start - _DEPTHS[0] * stored, stored)
                working = Working(start=start, rest=Line(peaks[0].rest, 0.0))
            else:
                low, high = peaks
                working = Working(
                    start=Line.through(_DEPTHS, (low.start, high.start)),
                    rest=Line.through(_DEPTHS, (low.rest, high.rest)),
                )
            self._known[tokens] = working
        return self._known[tokens]

    def stored_per_token(self) -> float:
        """Bytes that a layer keeps for each token of a pack."""
        tokens = self._fitted(self.planner.args.max_tokens)
        return self._working(tokens).start.stored / tokens

    def _peak(self, tokens: int, depth: int) -> Peak:
        return simulate_peak(
            with_depth(self.planner.config, depth),
            self.planner.pack(tokens, self.kept),
            self.planner.execution(self.checkpointing),
        )

    def _fitted(self, tokens: int) -> int:
        """Tokens of the pack that comes closest."""
        each = sum(self.planner.pair)
        return max(1, round(tokens / each)) * each
