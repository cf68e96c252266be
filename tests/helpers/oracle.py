"""What packing must reproduce, in plain lines that share nothing with the package.

No padding and no batch: each sequence runs alone, through transformers' eager attention, or in
float64 through its sdpa, whose softmax is not rounded to float32.
"""

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import logsigmoid, relu
from transformers import PreTrainedModel


def response_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]
) -> torch.Tensor:
    """log π(y_t | x, y_<t) of every response token: [len(response)], float32 or wider."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if model.dtype == torch.float64 else "eager")
    try:
        device = next(model.parameters()).device
        ids = torch.tensor([[*prompt, *response]], device=device)
        logits = model(ids, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(implementation)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]


def log_ratio_sum(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    prompt: Sequence[int],
    response: Sequence[int],
) -> torch.Tensor:
    """A = Σ_t log π(y_t | ·) − log π_ref(y_t | ·); without a reference its terms are 0."""
    total = response_logprobs(model, prompt, response).sum()
    if reference is not None:
        with torch.no_grad():
            reference_total = response_logprobs(reference, prompt, response).sum()
        total = total - reference_total
    return total


def dpo_loss(
    name: str,
    chosen_sum: torch.Tensor,
    rejected_sum: torch.Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    lengths: tuple[int, int] = (1, 1),
) -> torch.Tensor:
    """The loss of one pair from its log-ratio sums.

    `lengths` are (chosen, rejected), in tokens; ipo alone reads them.

    References:
        sigmoid: Rafailov et al. 2023, eq. 7; with label smoothing cDPO, Mitchell 2023.
        robust: Chowdhury et al. 2024. hinge: Zhao et al. 2023. ipo: Azar et al. 2023, eq. 17,
        on mean log-ratios.
    """
    margin = beta * (chosen_sum - rejected_sum)
    wins, loses = -logsigmoid(margin), -logsigmoid(-margin)
    match name:
        case "sigmoid":
            return (1 - label_smoothing) * wins + label_smoothing * loses
        case "robust":
            return ((1 - label_smoothing) * wins - label_smoothing * loses) / (
                1 - 2 * label_smoothing
            )
        case "hinge":
            return relu(1 - margin)
        case "ipo":
            return (chosen_sum / lengths[0] - rejected_sum / lengths[1] - 1 / (2 * beta)) ** 2
        case "sigmoid_norm":
            return -logsigmoid(beta * (chosen_sum / lengths[0] - rejected_sum / lengths[1]))
        case "exo_pair":
            win, lose = margin.sigmoid(), (-margin).sigmoid()
            return win * (-wins - math.log(1 - label_smoothing)) + lose * (
                -loses - math.log(label_smoothing)
            )
        case "discopop":
            mixed = (margin / 0.05).sigmoid()
            return wins * (1 - mixed) + (-margin).exp() * mixed
        case "simpo":
            target = beta * (chosen_sum / lengths[0] - rejected_sum / lengths[1]) - 0.5
            return -(1 - label_smoothing) * logsigmoid(target) - label_smoothing * logsigmoid(
                -target
            )
        case _:
            return _anchored_loss(name, chosen_sum, rejected_sum, beta)


def _anchored_loss(
    name: str, chosen_sum: torch.Tensor, rejected_sum: torch.Tensor, beta: float
) -> torch.Tensor:
    """Losses that do not depend on the difference alone; formulas as TRL 1.16 writes them."""
    chosen, rejected = beta * chosen_sum, beta * rejected_sum
    match name:
        case "nca_pair":
            return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)
        case "bco_pair":
            return -logsigmoid(chosen) - logsigmoid(-rejected)
        case "sppo_hard":
            return (chosen_sum - 0.5 / beta) ** 2 + (rejected_sum + 0.5 / beta) ** 2
        case "apo_zero":
            return 1 - chosen.sigmoid() + rejected.sigmoid()
        case "apo_down":
            return chosen.sigmoid() + 1 - (chosen - rejected).sigmoid()
    raise ValueError(f"no oracle for the loss {name!r}")


def loss_at_zero_margin(name: str, beta: float = 0.1) -> float:
    """What each loss is worth before the first update, where policy and reference are the same."""
    return {
        "sigmoid": math.log(2),
        "robust": math.log(2),
        "hinge": 1.0,
        "ipo": 1 / (4 * beta**2),
    }[name]
