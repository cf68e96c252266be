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

Logits, entropy and mean_token_accuracy cost a pass over the logits; they are of logged steps only,
and of executed tokens. Where pairs or prefixes are pruned, the other means are unbiased estimates
of what they would be without, and can leave their range. Of pruning itself:

    pruning/executed_fraction          tokens whose forward ran, of all tokens (each prompt once)
    pruning/backward_fraction          tokens whose backward ran, of all tokens
    pruning/scored_fraction            response tokens in the head's backward, of all of them
    pruning/variance_inflation         predicted second moment of the gradient over the dense one
    pruning/effective_sample_size      Kish's, of the weights of a step's kept branches
    pruning/max_weight                 largest product of inverse probabilities of a kept token
    pruning/noise_adjusted_speedup     (dense FLOPs / executed FLOPs) / variance inflation

Sums travel as one tensor per step (``MetricSums``), so that a step needs one host synchronization.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

__all__ = ["PAIR_COLUMNS", "MetricSums", "StepCounts", "sum_metrics", "token_sums"]

PAIR_COLUMNS = (
    *("loss", "chosen_sum", "rejected_sum", "chosen_logprob", "rejected_logprob"),
    *("accurate", "absolute_log_ratio"),
)
"""Columns of the per-pair tensor: the loss, A⁺, A⁻, log π(y⁺|x), log π(y⁻|x), all in nats, 1 if
A⁺ > A⁻, and |A⁺|/n⁺ + |A⁻|/n⁻ of what was executed: 0 where policy and reference agree."""

_TOKEN_SUMS = ("entropy", "chosen_logit", "rejected_logit", "chosen_top")


@dataclass(slots=True, kw_only=True)
class StepCounts:
    """What was executed and what the draws weigh, added up over one or more steps."""

    num_steps: int = 0
    dense_tokens: int = 0
    dense_positions: int = 0
    executed_tokens: int = 0
    """Tokens scored, each once."""
    forward_tokens: int = 0
    """Tokens run forward outside of recomputation; a second pass counts again."""
    backward_tokens: int = 0
    recomputed_tokens: int = 0
    forward_positions: int = 0
    backward_positions: float = 0.0
    effective_sample_size: float = 0.0
    second_moment: float = 0.0
    dense_moment: float = 0.0
    max_weight: float = 1.0
    balance: float = 0.0
    """Σ over steps of what the most loaded ranks do over what each does on average; 0 for one
    process."""

    def __add__(self, other: "StepCounts") -> "StepCounts":
        """Counts of both."""
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return StepCounts(**{**added, "max_weight": max(self.max_weight, other.max_weight)})

    def flops(
        self,
        *,
        body_parameters: int,
        head_parameters: int,
        trained_body_parameters: int | None = None,
        trained_head_parameters: int | None = None,
    ) -> int:
        """FLOPs executed.

        Per parameter and token 2 forward, 2 recomputed, 2 backward and 2 more where it is trained
        (by default all are). The head's backward computes logits again. Attention's quadratic part
        is not counted.
        """
        if trained_body_parameters is None:
            trained_body_parameters = body_parameters
        if trained_head_parameters is None:
            trained_head_parameters = head_parameters
        body = 2 * (self.forward_tokens + self.recomputed_tokens + self.backward_tokens)
        head = 2 * self.forward_positions + 4 * self.backward_positions
        return int(
            body_parameters * body
            + trained_body_parameters * 2 * self.backward_tokens
            + head_parameters * head
            + trained_head_parameters * 2 * self.backward_positions
        )

    def dense_flops(self, *, recomputes: bool, **parameters: int) -> int:
        """FLOPs of the same steps without pruning; ``parameters`` as for :meth:`flops`."""
        dense = StepCounts(
            forward_tokens=self.dense_tokens,
            backward_tokens=self.dense_tokens,
            recomputed_tokens=self.dense_tokens if recomputes else 0,
            forward_positions=self.dense_positions,
            backward_positions=self.dense_positions,
        )
        return dense.flops(**parameters)

    def flops_ratio(self, *, recomputes: bool, **parameters: int) -> float:
        """FLOPs executed over those of the same steps without pruning, > 0."""
        dense = self.dense_flops(recomputes=recomputes, **parameters)
        return max(1, self.flops(**parameters)) / dense

    def means(self, *, recomputes: bool, **parameters: int) -> dict[str, float]:
        """The pruning metrics under their names."""
        inflation = self.second_moment / self.dense_moment if self.dense_moment > 0 else 1.0
        speedup = 1 / self.flops_ratio(recomputes=recomputes, **parameters)
        return {
            "pruning/executed_fraction": self.executed_tokens / self.dense_tokens,
            "pruning/backward_fraction": self.backward_tokens / self.dense_tokens,
            "pruning/scored_fraction": self.backward_positions / self.dense_positions,
            "pruning/variance_inflation": inflation,
            "pruning/effective_sample_size": self.effective_sample_size / self.num_steps,
            "pruning/max_weight": self.max_weight,
            "pruning/noise_adjusted_speedup": speedup / inflation,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSums:
    """Sums of one or more steps' metrics on the host; add them up, then ask for the means."""

    num_pairs: int
    pair_sums: dict[str, float]
    """Sums over pairs of ``PAIR_COLUMNS``."""
    token_counts: tuple[int, int]
    """Chosen and rejected response tokens that the token sums run over; zeros if none were
    collected."""
    token_sums: dict[str, float]

    def __add__(self, other: "MetricSums") -> "MetricSums":
        """Sums over the pairs of both."""
        return MetricSums(
            num_pairs=self.num_pairs + other.num_pairs,
            pair_sums=_add(self.pair_sums, other.pair_sums),
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


def token_sums(statistics_R3: Tensor, is_chosen_R: Tensor) -> Tensor:
    """Sums over tokens, float [6].

    Entropy, chosen logit, rejected logit, chosen top-1 agreement; numbers of chosen and rejected
    tokens.

    Args:
        statistics_R3: float [R, 3], entropy, mean logit and top-1 agreement of each response token.
        is_chosen_R: bool [R].
    """
    chosen_R = is_chosen_R.to(statistics_R3.dtype)
    entropy_R, logit_R, top_R = statistics_R3.unbind(dim=1)
    sums = [entropy_R, logit_R * chosen_R, logit_R * (1 - chosen_R), top_R * chosen_R]
    sums += [chosen_R, 1 - chosen_R]
    return torch.stack([column.sum() for column in sums])


def sum_metrics(
    rows_P7: Tensor,
    token_sums_6: Tensor | None,
    extra: Tensor,
    *,
    num_pairs: int,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> tuple[MetricSums, list[float]]:
    """Brings a step's metrics to the host with one synchronization.

    Args:
        rows_P7: float [P, 7], columns of ``PAIR_COLUMNS`` for the pairs executed here.
        token_sums_6: float [6], from :func:`token_sums`; None if not collected.
        extra: float64 [n], any numbers to sum and bring along.
        num_pairs: pairs of the step, executed or not.
        sum_over_ranks: sums a tensor over all ranks.

    Returns:
        (the metrics' sums, the sums of ``extra``), the same on every rank.
    """
    zeros = torch.zeros(6, device=rows_P7.device, dtype=torch.float64)
    tokens_6 = zeros if token_sums_6 is None else token_sums_6.double()
    packed = torch.cat([rows_P7.double().sum(dim=0), tokens_6, extra])
    values: list[float] = sum_over_ranks(packed).tolist()
    columns, tokens = values[:7], values[7:13]
    sums = MetricSums(
        num_pairs=num_pairs,
        pair_sums=dict(zip(PAIR_COLUMNS, columns, strict=True)),
        token_counts=(round(tokens[4]), round(tokens[5])),
        token_sums=dict(zip(_TOKEN_SUMS, tokens[:4], strict=True)),
    )
    return sums, values[13:]


def _add(left: dict[str, float], right: dict[str, float]) -> dict[str, float]:
    return {name: left[name] + right[name] for name in left}
