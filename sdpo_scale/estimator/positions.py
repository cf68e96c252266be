"""Position sampling: which response positions enter the backward of the language-model head.

Shape legend: R response positions, P pairs.

Every executed position is scored; in the head's backward its gradient weight_t · ∇ log π(y_t) flows
through a row of logits as long as the vocabulary. Position t is kept with probability p_t and its
weight divided by p_t, so the expected gradient is the full one for any p > 0 (Horvitz–Thompson).
The norm of the gradient with respect to the logits, |weight_t| · ‖onehot(y_t) − softmax_t‖, is
known from the forward; p_t proportional to it has the least variance for its expected count.

Probabilities are normalized within a pair and the coins are keyed by the pair, so neither packing
nor rank can change a draw.
"""

import torch
from torch import Tensor

__all__ = ["position_probabilities"]


def position_probabilities(
    sizes_R: Tensor, lengths_P: Tensor, *, keep_fraction: float, floor: float
) -> Tensor:
    """p_t = min(1, max(floor, keep_fraction · n · size_t / Σ size)) over the n positions of a pair.

    Args:
        sizes_R: float [R] ≥ 0, |weight_t| · ‖onehot(y_t) − softmax_t‖; equal sizes give a uniform
            design; 0 for positions that are not in the backward anyway.
        lengths_P: int64 [P], positions of each pair, Σ = R.
        keep_fraction: expected share of the positions with a size that is kept, in (0, 1].
        floor: p_min in (0, 1].

    Returns:
        float [R] in [floor, 1]. Capping at 1 is not made up for elsewhere, so the expected share
        can be less than asked; the floor can make it more.
    """
    sums_P = torch.segment_reduce(sizes_R, "sum", lengths=lengths_P)
    counts_P = torch.segment_reduce((sizes_R > 0).to(sizes_R.dtype), "sum", lengths=lengths_P)
    factors_P = keep_fraction * counts_P / sums_P.clamp_min(torch.finfo(sums_P.dtype).tiny)
    factors_R = factors_P.repeat_interleave(lengths_P)
    return (sizes_R * factors_R).clamp(floor, 1.0)
