"""The objective of a run: the options that name it, their checks, and what they make together.

    ℓ = w · ( Σ_i weight_i · loss_i(s(A⁺), s(A⁻)) + weight_sft · sft ),   A^± = Σ_t α_t · a_t

with s of ``f_divergence_type``, α_t of ``ld_alpha`` and w of ``use_weighting``; by default s is the
identity and α_t and w are 1. All of it depends on one pair's tokens and on known counts. Names,
values and defaults are those of TRL's DPOConfig, and of its CPOConfig for ``simpo``.
"""

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sdpo_scale.objectives import DIVERGENCES, OBJECTIVES, Objective

__all__ = [
    "OBJECTIVE_OPTIONS",
    "WeightedSum",
    "check_objective_options",
    "describe_objective",
    "objective_of",
]

OBJECTIVE_OPTIONS = (
    *("loss_type", "loss_weights", "beta", "label_smoothing", "reference_free", "discopop_tau"),
    *("simpo_gamma", "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "use_weighting"),
)
"""Options that the objective depends on."""

_DEFAULTS = {"discopop_tau": 0.05, "simpo_gamma": 0.5, "f_alpha_divergence_coef": 0.5}

_SORTS = (
    "it sorts log-ratios within a micro-batch, so its value would change with packing and with the "
    "number of ranks; a loss here is a function of one pair"
)
_REFUSED = {
    "aot": _SORTS,
    "aot_unpaired": _SORTS,
    "alphapo": "its reward is a power of the response's probability, which is 0 in floating point "
    "for long responses; choose simpo",
    "cpo": "write loss_type: [sigmoid, sft], loss_weights: [1.0, cpo_alpha] and reference_free: "
    "true",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum:
    """A loss made of others; called like each of them."""

    parts: tuple[tuple[float, Callable[..., Tensor]], ...]
    """Weights and losses."""
    score: Callable[[Tensor], Tensor]
    """Of ``DIVERGENCES``, applied to both sums."""

    def __call__(self, chosen_sum_P: Tensor, rejected_sum_P: Tensor, **options: object) -> Tensor:
        """Signature of ``objectives.sigmoid``."""
        chosen_P, rejected_P = self.score(chosen_sum_P), self.score(rejected_sum_P)
        losses = [w * function(chosen_P, rejected_P, **options) for w, function in self.parts]
        return torch.stack(losses).sum(dim=0)


def objective_of(options: Any) -> Objective:
    """The objective that checked options name.

    Args:
        options: an ``SDPOConfig``, or anything with the attributes ``OBJECTIVE_OPTIONS``.
    """
    names, weights = _losses(options)
    parts, sft_weight = [], 0.0
    for name, weight in zip(names, weights, strict=True):
        row = OBJECTIVES[name]
        given = {row.option: getattr(options, row.option)} if row.option is not None else {}
        parts.append((weight, partial(row.function, **given) if given else row.function))
        sft_weight += weight * row.sft_weight
    alone = parts[0][1] if len(parts) == 1 and weights[0] == 1 else None
    if alone is None or options.f_divergence_type != "reverse_kl":
        score = DIVERGENCES[options.f_divergence_type]
        alone = WeightedSum(
            parts=tuple(parts), score=partial(_scored, score, options.f_alpha_divergence_coef)
        )
    return Objective(
        function=alone,
        takes_label_smoothing=any(OBJECTIVES[name].takes_label_smoothing for name in names),
        takes_divergence=all(OBJECTIVES[name].takes_divergence for name in names),
        sft_weight=sft_weight,
        ld_alpha=options.ld_alpha,
        use_weighting=options.use_weighting,
    )


def check_objective_options(options: Any) -> None:
    """Checks the options of the objective among themselves.

    Args:
        options: as for :func:`objective_of`.

    Raises:
        ValueError: names the option and a way out.
    """
    names = _check_losses(options)
    if not options.beta > 0:
        raise ValueError(f"beta must be positive, got {options.beta}")
    _check_label_smoothing(options, names)
    _check_divergence(options, names)
    for name, what in (("discopop_tau", "discopop"), ("simpo_gamma", "simpo")):
        _refuse_without_effect(options, name, what in names, f"loss_type {what}")
    if not options.discopop_tau > 0:
        raise ValueError(f"discopop_tau must be positive, got {options.discopop_tau}")
    if not 0 <= options.simpo_gamma < math.inf:
        raise ValueError(f"simpo_gamma must be at least 0, got {options.simpo_gamma}")
    if options.ld_alpha is not None and not 0 <= options.ld_alpha <= 1:
        raise ValueError(f"ld_alpha must be in [0, 1], got {options.ld_alpha}")
    if "simpo" in names and not options.reference_free:
        raise ValueError("loss_type 'simpo' has no reference model: set reference_free: true")
    if "sft" in names and options.use_weighting:
        raise ValueError(
            "use_weighting multiplies each pair's loss, and sft is a mean over tokens of all "
            "pairs, which TRL multiplies by the mean weight of a micro-batch: drop one of them"
        )


def describe_objective(options: Any) -> str:
    """The objective in one line, for the model card; options at their defaults are left out."""
    names, weights = _losses(options)
    sums = [name if w == 1 else f"{w} {name}" for name, w in zip(names, weights, strict=True)]
    parts = [" + ".join(sums), f"beta {options.beta}", f"label smoothing {options.label_smoothing}"]
    known = [row.option for row in map(OBJECTIVES.get, names) if row is not None and row.option]
    if options.f_divergence_type != "reverse_kl":
        parts.append(options.f_divergence_type)
        known += ["f_alpha_divergence_coef"] * (options.f_divergence_type == "alpha_divergence")
    known += ["ld_alpha"] * (options.ld_alpha is not None)
    parts += [f"{name} {getattr(options, name)}" for name in known]
    parts += [name for name in ("use_weighting", "reference_free") if getattr(options, name)]
    return ", ".join(parts)


def _losses(options: Any) -> tuple[list[str], list[float]]:
    names = options.loss_type if isinstance(options.loss_type, list) else [options.loss_type]
    weights = options.loss_weights
    return names, [1.0] * len(names) if weights is None else weights


def _check_losses(options: Any) -> Sequence[str]:
    names = options.loss_type if isinstance(options.loss_type, list) else [options.loss_type]
    if not names:
        raise ValueError("loss_type is an empty list: name at least one loss")
    for name in names:
        if name in _REFUSED:
            raise ValueError(f"loss_type {name!r} is refused: {_REFUSED[name]}")
        if name not in OBJECTIVES:
            close = difflib.get_close_matches(str(name), list(OBJECTIVES), n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"loss_type {name!r} is unknown{hint}; choose one of {', '.join(OBJECTIVES)}"
            )
    weights = options.loss_weights
    if weights is None:
        return names
    if not isinstance(weights, list) or any(type(w) not in (int, float) for w in weights):
        raise ValueError(f"loss_weights must be a list of numbers, got {weights!r}")
    if len(weights) != len(names):
        raise ValueError(
            f"loss_weights has {len(weights)} numbers for {len(names)} losses in loss_type"
        )
    if any(not 0 <= w < math.inf for w in weights) or not any(weights):
        raise ValueError(
            f"loss_weights must be at least 0, and one of them positive, got {weights}"
        )
    return names


def _check_label_smoothing(options: Any, names: Sequence[str]) -> None:
    epsilon = options.label_smoothing
    if not 0 <= epsilon < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {epsilon}")
    takers = [name for name, row in OBJECTIVES.items() if row.takes_label_smoothing]
    if epsilon and not set(names) & set(takers):
        raise ValueError(
            f"label_smoothing = {epsilon} has no effect with loss_type {options.loss_type!r}; "
            f"set it to 0 or choose one of {', '.join(takers)}"
        )
    if "exo_pair" in names and not epsilon:
        raise ValueError(
            "loss_type 'exo_pair' takes the logarithm of label_smoothing, which is 0: set it to "
            "1e-3, as its authors recommend"
        )


def _check_divergence(options: Any, names: Sequence[str]) -> None:
    kind = options.f_divergence_type
    if kind not in DIVERGENCES:
        raise ValueError(
            f"f_divergence_type {kind!r} is unknown; choose one of {', '.join(DIVERGENCES)}"
        )
    _refuse_without_effect(
        options,
        "f_alpha_divergence_coef",
        kind == "alpha_divergence",
        "f_divergence_type alpha_divergence",
    )
    if not math.isfinite(options.f_alpha_divergence_coef):
        raise ValueError(
            f"f_alpha_divergence_coef must be finite, got {options.f_alpha_divergence_coef}"
        )
    if kind == "reverse_kl":
        return
    wrong = [name for name in names if not OBJECTIVES[name].takes_divergence]
    if wrong:
        right = [name for name, row in OBJECTIVES.items() if row.takes_divergence]
        raise ValueError(
            f"f_divergence_type {kind!r} has an unknown constant that does not cancel in loss_type "
            f"{wrong[0]!r}; choose among {', '.join(right)}, or f_divergence_type reverse_kl"
        )
    if options.reference_free:
        raise ValueError(
            f"f_divergence_type {kind!r} needs a reference model: of the uniform one a constant is "
            "left out, which cancels with reverse_kl only; set reference_free: false"
        )


def _refuse_without_effect(options: Any, name: str, has_effect: bool, needed: str) -> None:
    value = getattr(options, name)
    if not has_effect and value != _DEFAULTS[name]:
        raise ValueError(f"{name} = {value} has no effect without {needed}; leave it out")


def _scored(score: Callable[[Tensor, float], Tensor], alpha: float, sum_P: Tensor) -> Tensor:
    return score(sum_P, alpha)
