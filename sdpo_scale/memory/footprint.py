"""Predicted peak bytes of a rank, by category, from a model's parameters and a plan's numbers.

What rests on a rank between micro-batches follows from counts of parameters alone. What a
micro-batch adds is taken from simulations of a shallow model (``memory/simulation.py``): all layers
of a decoder are alike, so a peak is a straight line in their number,

    peak(L) = working + L · stored,

with ``stored`` what each layer keeps for the backward (its input with activation checkpointing, its
activations without) and ``working`` the layer or head that is at work, with its gathered parameters
and gradients on their way. Two depths determine it. Each phase of a micro-batch has such a line,
and the highest one is the micro-batch's; a test compares with other depths.

Units: bytes.
"""

from dataclasses import dataclass
from typing import Any

__all__ = [
    "OPTIMIZER_BYTES",
    "SHARDINGS",
    "Footprint",
    "Line",
    "States",
    "Working",
    "footprint",
    "grown",
    "optimizer_kind",
]

OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0, "adafactor": 0.1, "sgd": 0.0}
"""State per trained parameter: Adam's two moments in float32, or in 8 bits (a block of 256 shares a
scale); of Adafactor the sums over rows and columns, well under a tenth of a byte for each weight of
a matrix; plain SGD has none."""

SHARDINGS = ("none", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2")

GiB = 2**30
_CONTEXT = int(0.75 * GiB)
"""CUDA context, cuBLAS workspaces and NCCL buffers; between 0.5 and 1 GiB on data-center GPUs."""
_RESERVE = 0.05
"""Of all else: what the caching allocator cannot use, with expandable segments."""
_ZERO_BUCKETS = 2 * 5 * 10**8
"""DeepSpeed's ``reduce_bucket_size`` and ``allgather_bucket_size`` or prefetch bucket, elements."""


def optimizer_kind(name: Any) -> str:
    """Of ``OPTIMIZER_BYTES``, what an ``optim`` of transformers is like."""
    text = str(getattr(name, "value", name))
    if "8bit" in text:
        return "adamw_8bit"
    found = [known for known in OPTIMIZER_BYTES if text.startswith(known)]
    return found[0] if found else "adamw"


@dataclass(frozen=True, slots=True)
class Line:
    """A peak as a function of the number of layers."""

    working: float
    """Bytes whatever the number of layers."""
    stored: float
    """Bytes for each layer."""

    def at(self, num_layers: int) -> float:
        """Bytes of a model with so many layers."""
        return self.working + num_layers * self.stored

    @classmethod
    def through(cls, depths: tuple[int, int], peaks: tuple[float, float]) -> "Line":
        """The line through the peaks of two depths."""
        slope = (peaks[1] - peaks[0]) / (depths[1] - depths[0])
        return cls(peaks[0] - depths[0] * slope, slope)

    def towards(self, other: "Line", share: float) -> "Line":
        """This line at 0, the other at 1, and straight on."""
        working = self.working + share * (other.working - self.working)
        return Line(working, self.stored + share * (other.stored - self.stored))


Working = tuple[Line, ...]
"""What a micro-batch adds in each of its phases, for any depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What a rank keeps for each parameter."""

    optimizer: str = "adamw"
    """Of ``OPTIMIZER_BYTES``."""
    parameter_bytes: int = 4
    """Of one element of a parameter."""
    gradient_bytes: int = 4
    """Of one element of a gradient."""
    offload_optimizer: bool = False
    """Optimizer state and master weights are in the host's memory."""
    offload_parameters: bool = False
    """Parameters are in the host's memory until they are gathered."""

    def __post_init__(self) -> None:
        """Checks the optimizer.

        Raises:
            ValueError: it is unknown.
        """
        if self.optimizer not in OPTIMIZER_BYTES:
            known = ", ".join(OPTIMIZER_BYTES)
            raise ValueError(f"optimizer {self.optimizer!r} is unknown; choose one of {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Peak bytes of a rank by category."""

    parameters: float
    master_weights: float
    gradients: float
    optimizer: float
    stored_activations: float
    """What all layers keep for the backward."""
    working: float
    """The layer or head at work: activations, gathered parameters, gradients on their way."""
    buckets: float
    """Buffers that gradients are reduced in."""
    context: float
    reserve: float
    """For fragmentation."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.to_dict().values())

    def to_dict(self) -> dict[str, float]:
        """Category → bytes."""
        return {name: getattr(self, name) for name in self.__slots__}


def grown(small: Working, large: Working, *, tokens: tuple[int, int], to: int) -> Working:
    """The working set at another number of tokens, a straight line through those of two.

    Args:
        small: at the first of ``tokens``.
        large: at the second.
        tokens: of the two packs, with pairs in the same proportions.
        to: tokens of the pack that is asked for.
    """
    share = (to - tokens[0]) / (tokens[1] - tokens[0])
    return tuple(line.towards(other, share) for line, other in zip(small, large, strict=True))


def footprint(
    *,
    num_parameters: int,
    num_layers: int,
    working: Working,
    sharding: str,
    world_size: int,
    num_trained: int | None = None,
    states: States | None = None,
    on_device: bool = True,
) -> Footprint:
    """Peak bytes of a rank.

    Args:
        num_parameters: of the whole model.
        num_layers: its decoder layers.
        working: what a micro-batch adds in each phase, simulated under this sharding.
        sharding: of ``SHARDINGS``.
        world_size: ranks that states are sharded over.
        num_trained: parameters with gradients; all if None.
        states: what is kept for each parameter; float32 and AdamW if None.
        on_device: False for no context and no reserve.

    Raises:
        ValueError: an unknown sharding.
    """
    states = states or States()
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding {sharding!r} is unknown; choose one of {', '.join(SHARDINGS)}")
    trained = num_parameters if num_trained is None else num_trained
    shards = dict.fromkeys(_sharded(sharding), world_size)
    parameters = num_parameters * states.parameter_bytes / shards.get("parameters", 1)
    updated = 0.0 if states.offload_optimizer else trained / shards.get("optimizer", 1)
    # DeepSpeed keeps float32 copies of 16-bit parameters beside the optimizer's state
    has_masters = sharding.startswith("ZeRO") and states.parameter_bytes == 2
    line = max(working, key=lambda line: line.at(num_layers))
    parts = {
        "parameters": 0.0 if states.offload_parameters else parameters,
        "master_weights": 4 * updated if has_masters else 0.0,
        "gradients": trained * states.gradient_bytes / shards.get("gradients", 1),
        "optimizer": updated * OPTIMIZER_BYTES[states.optimizer],
        "stored_activations": num_layers * line.stored,
        "working": line.working,
        "buckets": _buckets(sharding, trained, states),
    }
    context = float(_CONTEXT) if on_device else 0.0
    reserve = _RESERVE * sum(parts.values()) if on_device else 0.0
    return Footprint(**parts, context=context, reserve=reserve)


def _sharded(sharding: str) -> tuple[str, ...]:
    """Which states a kind of sharding spreads over ranks."""
    return {
        "ZeRO-1": ("optimizer",),
        "ZeRO-2": ("optimizer", "gradients"),
        "ZeRO-3": ("optimizer", "gradients", "parameters"),
        "FSDP2": ("optimizer", "gradients", "parameters"),
    }.get(sharding, ())


def _buckets(sharding: str, trained: int, states: States) -> float:
    if sharding == "DDP":  # buckets hold a copy of every gradient
        return float(trained * states.gradient_bytes)
    if sharding.startswith("ZeRO"):
        return float(min(_ZERO_BUCKETS, 2 * trained) * states.parameter_bytes)
    return 0.0  # FSDP2's are part of what was simulated
