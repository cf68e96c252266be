"""Invariants that every run checks on itself, cheaply, and logs.

Before the first step: a pair in a pack has the log-probabilities it has alone and in the plain
model; the longest pack that the data allows fits. At the first step: policy and reference agree, so
the loss is its value at margin 0; every weight of an adapter moves. A violation is an error:
numbers after it would mean something else than they say.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sdpo_scale.data.pairs import Pair
from sdpo_scale.metrics import MetricSums
from sdpo_scale.objectives import margin_zero_loss
from sdpo_scale.packing.layout import PackLayout, build_layout
from sdpo_scale.step import StepOptions

__all__ = [
    "TOLERANCE",
    "AdapterCheck",
    "check_first_step",
    "check_packed_pair",
    "longest_pack",
]

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest mean difference of a token's log-probability, in nats, between two orders of computation.
A wrong mask or position moves it by about 1; rounding of logits near 10 moves it by 10 units of
rounding."""


def longest_pack(
    pair_tokens: NDArray[np.int64], *, max_tokens: int, max_pairs: int
) -> tuple[int, ...]:
    """The fullest pack that a step could hold: the longest pair, then the longest that still fit.

    Args:
        pair_tokens: int [N], tokens of each pair of the data set.
        max_tokens: the most tokens of a pack.
        max_pairs: the most pairs of a step.

    Returns:
        Indices into ``pair_tokens``.
    """
    chosen: list[int] = []
    room = max_tokens
    for index in np.argsort(-pair_tokens, kind="stable"):
        if len(chosen) == max_pairs:
            break
        if pair_tokens[index] <= room:
            chosen.append(int(index))
            room -= int(pair_tokens[index])
    return tuple(chosen)


@torch.no_grad()
def check_packed_pair(
    model: nn.Module,
    pairs: tuple[Pair, Pair],
    *,
    forward: Callable[[PackLayout], Tensor],
    dtype: torch.dtype,
) -> None:
    """Compares the second pair of a pack with the same pair alone and with the plain model.

    Args:
        model: a causal language model, for its ordinary forward on each sequence.
        pairs: two pairs, short ones to keep it cheap.
        forward: layout → float [R] log-probabilities.
        dtype: dtype of the model's matrix products, for the tolerance.

    Raises:
        RuntimeError: they differ by more than rounding explains.
    """
    pair = pairs[1]
    num_scored = len(pair.chosen_ids) + len(pair.rejected_ids)
    packed = forward(build_layout([p.tokens for p in pairs]))[-num_scored:].double()
    alone = forward(build_layout([pair.tokens])).double()
    device = packed.device
    plain = []
    for response in (pair.chosen_ids, pair.rejected_ids):
        ids = torch.from_numpy(np.concatenate([pair.prompt_ids, response]).astype(np.int64))
        logits = model(input_ids=ids[None].to(device), use_cache=False).logits[0].double()
        logprobs = torch.log_softmax(logits[:-1], dim=-1)
        targets = ids[1:, None].to(device)
        plain.append(logprobs.gather(1, targets)[-len(response) :, 0])
    for name, other in (("alone", alone), ("in the plain model", torch.cat(plain))):
        difference = float((packed - other).abs().mean())
        if not difference <= TOLERANCE[dtype]:
            raise RuntimeError(
                f"the pair of row {pair.pair_id} has other log-probabilities in a pack than "
                f"{name}: mean difference {difference:.2e} nats per token, {dtype} explains "
                f"{TOLERANCE[dtype]:.0e}"
            )
        logger.info("check: a packed pair equals the pair %s (%.1e nats/token)", name, difference)


def check_first_step(metrics: MetricSums, *, options: StepOptions, dtype: torch.dtype) -> None:
    """Checks that the run starts at margin 0: the policy is its own reference.

    Args:
        metrics: of the first step, before any update.
        options: the step's options.
        dtype: dtype of the model's matrix products, for the tolerance.

    Raises:
        RuntimeError: log-ratios are not 0 within rounding.
    """
    expected = margin_zero_loss(
        options.objective, beta=options.beta, label_smoothing=options.label_smoothing
    )
    stated = "" if expected is None else f" instead of {expected:.6f}"
    per_token = metrics.pair_sums["absolute_log_ratio"] / (2 * metrics.num_pairs)
    if not per_token <= TOLERANCE[dtype]:
        raise RuntimeError(
            f"the policy differs from the reference before the first update: mean |log-ratio| "
            f"{per_token:.2e} nats per token, {dtype} explains {TOLERANCE[dtype]:.0e}; loss "
            f"{metrics.loss:.6f}{stated}"
        )
    logger.info(
        "check: first step at margin 0: loss %.6f%s, |log-ratio| %.1e nats/token",
        metrics.loss,
        "" if expected is None else f" (exactly {expected:.6f})",
        per_token,
    )


class AdapterCheck(TrainerCallback):
    """After the first update, every weight that is trained must have moved.

    Checkpointing on frozen embeddings, a layer that was not adapted as meant, or a backend that
    drops gradients leave some at their start without any error. ``lora_A`` is left out: its
    gradient is 0 while ``lora_B`` is.
    """

    _PATIENCE = 3
    """Steps in which nothing moves at all before that is an error: pruning may keep no pair. Ten
    times as many under fp16, whose loss scaling skips the first steps until it fits."""

    def __init__(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Takes how ranks, each of which may hold a part of a weight, add up what they see."""
        self._sum = sum_over_ranks
        self._before: Tensor | None = None
        self._num_still = 0
        self._is_done = False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remembers the weights, unless the learning rate is 0, as in a warm-up's first step."""
        moves = any(group["lr"] > 0 for group in kwargs["optimizer"].param_groups)
        if moves and not self._is_done:
            self._before = _marks_of(kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compares them.

        Raises:
            RuntimeError: names weights that did not move while others did.
        """
        if self._before is None:
            return
        moved = (_marks_of(kwargs["model"]) != self._before).any(dim=1).double()
        self._before = None
        has_moved = (self._sum(moved) > 0).tolist()
        names = [name for name, _ in _must_move(kwargs["model"])]
        still = [name for name, moves in zip(names, has_moved, strict=True) if not moves]
        self._num_still += len(still) == len(names)
        patience = self._PATIENCE * (10 if args.fp16 else 1)
        if len(still) == len(names) and self._num_still < patience:
            return
        if still:
            raise RuntimeError(
                f"{len(still)} of {len(names)} trained weights did not change in step "
                f"{state.global_step}: they get no gradient: {', '.join(still[:5])}"
                f"{' …' if len(still) > 5 else ''}"
            )
        self._is_done = True
        logger.info("check: all %d trained weights of the adapter changed", len(names))


def _must_move(model: nn.Module) -> list[tuple[str, Tensor]]:
    named = model.named_parameters()
    return [(n, p) for n, p in named if p.requires_grad and "lora_A" not in n.split(".")]


def _marks_of(model: nn.Module) -> Tensor:
    """Sum and sum of squares of each weight's local part, float64 [n, 2]: changed, it has others.

    The sum alone would not do: of Adam's first step, as many entries may go up as down.
    """
    rows = []
    for _, parameter in _must_move(model):
        local: Any = getattr(parameter, "ds_tensor", parameter)  # a rank's part under ZeRO-3
        local = (local.to_local() if hasattr(local, "to_local") else local).detach().double()
        rows.append(torch.stack([local.sum(), local.square().sum()]))
    return torch.stack(rows)
