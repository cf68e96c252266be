"""What a step prunes: options, presets and what a budget means.

Stages in the order of execution; each is unbiased given the one before:

    presample      whole pairs, from the importance they had when last seen: nothing is executed
    prefix         one cut level per pair: what lies beyond is not executed (telescoping)
    branch         pairs or responses whose backward runs, from exact coefficients
    train_prefix   one cut level per kept pair in the backward
    position       response positions in the head's backward
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpo_scale.estimator.branches import (
    budget_scale,
    fraction_scale,
    importance_probabilities,
)
from sdpo_scale.estimator.prefixes import SURVIVAL_SHAPES, PrefixDesign

__all__ = ["PRESETS", "Pruning"]

Floats = NDArray[np.float64]

PRESETS: dict[str, dict[str, Any]] = {
    "off": {},
    # at most a fifth more gradient noise; prunes little while coefficients are alike, more later
    "exact-budget": {"branches": "importance", "variance_inflation": 1.2},
    # half of the tokens in the backward, whose working set shrinks with them; all positions, since
    # the head holds one chunk of logits however many there are
    "memory": {"branches": "importance", "keep_fraction": 0.5},
    # all stages; from the second epoch on most of the pairs are not executed at all
    "fastest": {
        "presample": True,
        "prefix": "uniform_floor",
        "branches": "importance",
        "keep_fraction": 0.3,
        "position_fraction": 0.5,
    },
    # uniform in everything, as published
    "paper": {
        "prefix": "uniform_floor",
        "branches": "uniform",
        "keep_fraction": 0.7,
        "positions": "uniform",
        "position_fraction": 0.5,
    },
}
"""Name → fields of :class:`Pruning`."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "branches": ("importance", "uniform"),
    "branch_unit": ("pair", "response"),
    "branch_sampling": ("systematic", "pivotal"),
    "branch_execution": ("auto", "two_pass", "checkpoint"),
    "positions": ("importance", "uniform"),
}

_NUMBERS = (
    *("variance_inflation", "keep_fraction", "min_probability", "position_fraction"),
    *("prefix_parameter", "train_prefix_parameter"),
)


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """What is pruned and how much; a preset's fields, each of which can be set.

    Raises:
        ValueError: a value out of range or an unknown name, with the option.
    """

    presample: bool = False
    """Draw pairs before anything is executed, from what they were worth when last seen."""
    prefix: str | tuple[float, ...] | None = None
    """Survival of the executed prefix: uniform_floor, geometric, or S_1 … S_K as a list."""
    prefix_levels: int | tuple[int, ...] = 4
    """Number K of cut levels at fractions k/K, or token counts of the levels before the last."""
    prefix_parameter: float = 0.5
    """Probability of the whole pair (uniform_floor) or of each further level (geometric)."""
    train_prefix: str | tuple[float, ...] | None = None
    """Survival of the prefix in the backward; forms of ``prefix``."""
    train_prefix_levels: int | tuple[int, ...] = 4
    train_prefix_parameter: float = 0.5
    branches: str | None = None
    """Inclusion probabilities of the backward: importance or uniform."""
    branch_unit: str = "pair"
    """What is kept or not: pair or response."""
    branch_sampling: str = "systematic"
    """Fixed-size design over the step in two passes: systematic or pivotal."""
    branch_execution: str = "auto"
    """two_pass, checkpoint (pruned activation checkpointing), or auto: checkpoint whenever
    activation checkpointing is on, else two passes where past steps say that they pay."""
    variance_inflation: float | None = None
    """Acceptable second moment of the gradient, as a multiple of the dense one."""
    keep_fraction: float | None = None
    """Share of the tokens whose backward runs; the other form of the budget."""
    min_probability: float = 0.1
    """Floor under every inclusion probability: no weight exceeds its inverse per stage."""
    position_fraction: float | None = None
    """Share of the response positions in the head's backward."""
    positions: str = "importance"
    """Probabilities of positions: importance or uniform."""

    def __post_init__(self) -> None:
        """Checks types, names and ranges."""
        self._check_types()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "branches" and value is None):
                raise ValueError(f"pruning option {name}: {value!r} is not {' or '.join(choices)}")
        for name in ("keep_fraction", "min_probability", "position_fraction"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"pruning option {name} must be in (0, 1], got {value}")
        self._check_budget()
        if self.branch_unit == "response" and self.train_prefix is not None:
            raise ValueError("train_prefix cuts pairs; set branch_unit: pair")
        _ = self.prefix_design, self.train_prefix_design

    def _check_types(self) -> None:
        for f in fields(self):
            value, wanted = getattr(self, f.name), None
            if f.name == "presample":
                wanted = None if isinstance(value, bool) else "true or false"
            elif f.name.endswith("prefix_levels"):
                counts = value if isinstance(value, tuple) else (value,)
                wanted = (
                    None if all(type(n) is int for n in counts) else "a number or a list of them"
                )
            elif f.name in _NUMBERS and value is not None:
                wanted = None if type(value) in (int, float) else "a number"
            if wanted is not None:
                raise ValueError(f"pruning option {f.name}: {value!r} is not {wanted}")

    def _check_budget(self) -> None:
        if self.variance_inflation is not None and not self.variance_inflation >= 1:
            raise ValueError(
                f"variance_inflation must be at least 1, got {self.variance_inflation}"
            )
        budgets = (self.variance_inflation is not None) + (self.keep_fraction is not None)
        if budgets == 2:
            raise ValueError("variance_inflation and keep_fraction are two forms of one budget")
        if (self.branches or self.presample) and budgets == 0:
            raise ValueError("pruning of branches needs variance_inflation or keep_fraction")
        if budgets and not (self.branches or self.presample):
            raise ValueError(
                "variance_inflation and keep_fraction act on branches and presample, and neither "
                "is on"
            )
        if self.presample and self.branches == "uniform":
            raise ValueError("presample draws by importance; set branches: importance")

    @classmethod
    def from_options(cls, preset: str, overrides: Mapping[str, Any]) -> "Pruning":
        """A preset with some of its fields changed.

        Args:
            preset: a key of ``PRESETS``.
            overrides: field → value; lists stand for tuples. One form of the budget replaces the
                other.

        Raises:
            ValueError: an unknown preset or field (with the nearest name), or a refused value.
        """
        if preset not in PRESETS:
            raise ValueError(f"pruning {preset!r} is unknown; choose one of {', '.join(PRESETS)}")
        known = [f.name for f in fields(cls)]
        for name in overrides:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f", did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"unknown pruning option {name!r}{hint}")
        values = dict(PRESETS[preset])
        if {"variance_inflation", "keep_fraction"} & overrides.keys():
            values.pop("variance_inflation", None)
            values.pop("keep_fraction", None)
        values.update({n: tuple(v) if isinstance(v, list) else v for n, v in overrides.items()})
        return cls(**values)

    @cached_property
    def prefix_design(self) -> PrefixDesign:
        """Levels of the executed prefix; one level, the whole pair, where it is not cut."""
        return _design(self.prefix, self.prefix_levels, self.prefix_parameter)

    @cached_property
    def train_prefix_design(self) -> PrefixDesign:
        """Levels of the backward's prefix."""
        return _design(self.train_prefix, self.train_prefix_levels, self.train_prefix_parameter)

    @property
    def is_active(self) -> bool:
        """Whether anything is pruned."""
        stages = (self.presample, self.prefix, self.train_prefix, self.branches)
        return any(stages) or self.position_fraction is not None

    @property
    def prunes_backward(self) -> bool:
        """Whether the backward runs on fewer tokens than the forward."""
        return self.branches is not None or self.train_prefix is not None

    def execution(self, *, recomputes: bool) -> str:
        """How the backward is pruned: checkpoint, two_pass, or single where it is not.

        Args:
            recomputes: whether activation checkpointing is on.
        """
        if not self.prunes_backward:
            return "single"
        if self.branch_execution == "auto":
            return "checkpoint" if recomputes else "two_pass"
        return self.branch_execution

    def without_backward_pruning(self) -> "Pruning":
        """The same for a step whose backward runs on everything that was executed."""
        return replace(
            self,
            branches=None,
            train_prefix=None,
            variance_inflation=self.variance_inflation if self.presample else None,
            keep_fraction=self.keep_fraction if self.presample else None,
        )

    def scale(
        self, importance_N: Floats, cost_N: Floats, step_N: NDArray[np.int64] | None = None
    ) -> float:
        """The c of ``importance_probabilities`` that this budget means for these branches.

        Presampling and branch pruning share the budget: each has its square root, since inflations
        and kept fractions of successive stages multiply. ``step_N`` as in ``budget_scale``.
        """
        share = 0.5 if self.presample and self.branches else 1.0
        if self.variance_inflation is not None:
            inflation = self.variance_inflation**share
            return budget_scale(
                importance_N,
                cost_N,
                inflation=inflation,
                floor=self.min_probability,
                step_N=step_N,
            )
        assert self.keep_fraction is not None
        return fraction_scale(
            importance_N,
            cost_N,
            keep_fraction=self.keep_fraction**share,
            floor=self.min_probability,
        )

    def probabilities(self, importance_N: Floats, cost_N: Floats, *, scale: float) -> Floats:
        """Inclusion probabilities π of branches, float [N]."""
        if self.branches == "uniform":
            inflation = self.variance_inflation
            kept = self.keep_fraction if inflation is None else 1 / inflation
            assert kept is not None
            return np.full(len(importance_N), max(kept, self.min_probability))
        return importance_probabilities(
            importance_N, cost_N, scale=scale, floor=self.min_probability
        )


def _design(
    shape: str | tuple[float, ...] | None, levels: int | tuple[int, ...], parameter: float
) -> PrefixDesign:
    if shape is None:
        return PrefixDesign(survival=(1.0,))
    counts = levels if isinstance(levels, tuple) else None
    if not isinstance(shape, str):
        return PrefixDesign(survival=shape, token_counts=counts)
    if shape not in SURVIVAL_SHAPES:
        raise ValueError(
            f"survival {shape!r} is unknown; choose {', '.join(SURVIVAL_SHAPES)} or a list"
        )
    num_levels = len(counts) + 1 if counts is not None else levels
    assert isinstance(num_levels, int)
    return PrefixDesign(survival=SURVIVAL_SHAPES[shape](num_levels, parameter), token_counts=counts)
