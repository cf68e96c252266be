"""Invariants that every run checks on itself, cheaply, and logs.

Before the first step: a pair in a pack has the log-probabilities it has alone and in the plain
model; the longest pack that the data allows fits. At the first step: policy and reference agree, so
the loss is its value at margin 0. A violation is an error: numbers after it would mean something
else than they say.
"""

import logging
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sdpo_scale.data.pairs import Pair
from sdpo_scale.metrics import MetricSums
from sdpo_scale.objectives import margin_zero_loss
from sdpo_scale.packing.layout import PackLayout, build_layout
from sdpo_scale.step import StepOptions

__all__ = ["TOLERANCE", "check_first_step", "check_packed_pair", "longest_pack"]

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
    per_token = metrics.pair_sums["absolute_log_ratio"] / (2 * metrics.num_pairs)
    if not per_token <= TOLERANCE[dtype]:
        raise RuntimeError(
            f"the policy differs from the reference before the first update: mean |log-ratio| "
            f"{per_token:.2e} nats per token, {dtype} explains {TOLERANCE[dtype]:.0e}; loss "
            f"{metrics.loss:.6f} instead of {expected:.6f}"
        )
    logger.info(
        "check: first step at margin 0: loss %.6f (exactly %.6f), |log-ratio| %.1e nats/token",
        metrics.loss,
        expected,
        per_token,
    )
