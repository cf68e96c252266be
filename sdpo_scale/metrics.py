"""What is logged: names, units and the one reduction from pairs to numbers.

Names and meanings are those of TRL's DPOTrainer:

    rewards/chosen, rewards/rejected   β·A⁺ and β·A⁻, mean over pairs
    rewards/margins                    their difference
    rewards/accuracies                 share of pairs whose chosen reward is strictly larger, 0 to 1
    logps/chosen, logps/rejected       policy log-probability of a response, nats, mean over pairs
    logits/chosen, logits/rejected     logits, mean over the vocabulary and response tokens
    entropy                            of the next-token distribution, nats, mean over tokens
    mean_token_accuracy                share of chosen tokens that were the most probable, 0 to 1
    num_tokens                         tokens seen so far, each prompt counted once per response

Logits, entropy and mean_token_accuracy cost a pass over the logits; they are of logged steps only.

Sums travel as one tensor per step (``MetricSums``), so that a step needs one host synchronization.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PAIR_COLUMNS", "MetricSums", "pair_rows", "sum_metrics", "token_sums"]

PAIR_COLUMNS = ("loss", "chosen_sum", "rejected_sum", "chosen_logprob", "rejected_logprob")
"""Columns of the per-pair tensor: the loss, A⁺, A⁻, log π(y⁺|x), log π(y⁻|x); all in nats."""

_TOKEN_SUMS = ("entropy", "chosen_logit", "rejected_logit", "chosen_top")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSums:
    """Sums of one or more steps' metrics on the host; add them up, then ask for the means."""

    num_pairs: int
    pair_sums: dict[str, float]
    """Sums over pairs: loss, A⁺, A⁻, response log-probabilities, count of accurate pairs."""
    absolute_log_ratio: float
    """Σ over pairs of |A⁺| / n⁺ + |A⁻| / n⁻: 0 where policy and reference agree."""
    token_counts: tuple[int, int]
    """Chosen and rejected response tokens that the token sums run over; zeros if none were
    collected."""
    token_sums: dict[str, float]

    def __add__(self, other: "MetricSums") -> "MetricSums":
        """Sums over the pairs of both."""
        return MetricSums(
            num_pairs=self.num_pairs + other.num_pairs,
            pair_sums=_add(self.pair_sums, other.pair_sums),
            absolute_log_ratio=self.absolute_log_ratio + other.absolute_log_ratio,
            token_counts=(
                self.token_counts[0] + other.token_counts[0],
                self.token_counts[1] + other.token_counts[1],
            ),
            token_sums=_add(self.token_sums, other.token_sums),
        )

    @property
    def loss(self) -> float:
        """Mean loss per pair."""
        return self.pair_sums["loss"] / self.num_pairs

    def means(self, *, beta: float) -> dict[str, float]:
        """The metrics under TRL's names, averaged over pairs or tokens as the module says."""
        mean = {name: value / self.num_pairs for name, value in self.pair_sums.items()}
        metrics = {
            "rewards/chosen": beta * mean["chosen_sum"],
            "rewards/rejected": beta * mean["rejected_sum"],
            "rewards/accuracies": mean["accurate"],
            "rewards/margins": beta * (mean["chosen_sum"] - mean["rejected_sum"]),
            "logps/chosen": mean["chosen_logprob"],
            "logps/rejected": mean["rejected_logprob"],
        }
        chosen, rejected = self.token_counts
        if chosen and rejected:
            metrics["logits/chosen"] = self.token_sums["chosen_logit"] / chosen
            metrics["logits/rejected"] = self.token_sums["rejected_logit"] / rejected
            metrics["entropy"] = self.token_sums["entropy"] / (chosen + rejected)
            metrics["mean_token_accuracy"] = self.token_sums["chosen_top"] / chosen
        return metrics


def pair_rows(*, losses_P: Tensor, log_ratio_sums_P2: Tensor, logprob_sums_P2: Tensor) -> Tensor:
    """Float [P, 5] without gradient: the columns of ``PAIR_COLUMNS`` for the pairs of one pack."""
    return torch.cat([losses_P[:, None], log_ratio_sums_P2, logprob_sums_P2], dim=1).detach()


def token_sums(statistics_R3: Tensor, is_chosen_R: Tensor) -> Tensor:
    """Sums over tokens, float [4]: entropy, chosen logit, rejected logit, chosen top-1 agreement.

    Args:
        statistics_R3: float [R, 3], entropy, mean logit and top-1 agreement of each response token.
        is_chosen_R: bool [R].
    """
    chosen_R = is_chosen_R.to(statistics_R3.dtype)
    entropy_R, logit_R, top_R = statistics_R3.unbind(dim=1)
    sums = [entropy_R, logit_R * chosen_R, logit_R * (1 - chosen_R), top_R * chosen_R]
    return torch.stack([column.sum() for column in sums])


def sum_metrics(
    pair_rows_P5: Tensor,
    lengths_P2: Tensor,
    token_sums_4: Sequence[Tensor],
) -> tuple[MetricSums, bool]:
    """Brings a step's metrics to the host with one synchronization.

    Args:
        pair_rows_P5: float [P, 5], all pairs of the step, see :func:`pair_rows`.
        lengths_P2: int [P, 2] on the CPU, response tokens of each pair.
        token_sums_4: from :func:`token_sums`, one per pack; empty if statistics were not collected.

    Returns:
        (the sums, whether every number of every pair is finite).
    """
    lengths = lengths_P2.to(pair_rows_P5.device, non_blocking=True)
    accurate = (pair_rows_P5[:, 1] > pair_rows_P5[:, 2]).sum()
    per_token = (pair_rows_P5[:, 1:3].abs() / lengths).sum()
    parts = [
        pair_rows_P5.double().sum(dim=0),
        torch.stack([accurate.double(), per_token.double()]),
        torch.isfinite(pair_rows_P5).all().double()[None],
        *(sums.double() for sums in token_sums_4),
    ]
    values: list[float] = torch.cat(parts).tolist()
    columns, rest = values[:5], values[5:]
    tokens = [sum(rest[3 + k :: 4]) for k in range(4)]
    chosen, rejected = lengths_P2.sum(dim=0).tolist() if token_sums_4 else (0, 0)
    sums = MetricSums(
        num_pairs=len(pair_rows_P5),
        pair_sums={**dict(zip(PAIR_COLUMNS, columns, strict=True)), "accurate": rest[0]},
        absolute_log_ratio=rest[1],
        token_counts=(chosen, rejected),
        token_sums=dict(zip(_TOKEN_SUMS, tokens, strict=True)),
    )
    return sums, bool(rest[2])


def _add(left: dict[str, float], right: dict[str, float]) -> dict[str, float]:
    return {name: left[name] + right[name] for name in left}
