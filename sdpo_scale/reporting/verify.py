"""Is the pruned gradient unbiased, and how noisy is it, on the user's own model and pairs?

The dense gradient g of one step is compared with the mean of many draws ĝ of the same step: same
parameters, same pairs, same history, other random numbers. Two questions:

Unbiased: every entry of the gradient gets a random sign and lands in one of M buckets; the M sums
are random projections of the gradient (Charikar et al. 2002, "Finding frequent items in data
streams"). Of each the mean over draws is compared with the dense value by a t-test, and the largest
|z| with a threshold that M true hypotheses exceed with a stated probability.

Noise: with E‖ĝ − g‖² = Σ_i ‖g_i‖² (1/π_i − 1) for independent draws of pairs with orthogonal
gradients g_i,

    variance inflation, measured = 1 + E‖ĝ − g‖² / Σ_i ‖g_i‖²

is the Σ ‖g_i‖²/π_i / Σ ‖g_i‖² that training predicts from coefficients and norms at the head. The
prediction takes gradients of tokens as orthogonal and equally large below the head; fixed-size
designs have less variance than independent draws.
"""

import logging
import math
import tempfile
import zlib
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from sdpo_scale.config import SDPOConfig
from sdpo_scale.data.loader import StepPairs
from sdpo_scale.draws import StepDraw
from sdpo_scale.metrics import StepCounts
from sdpo_scale.trainer import SDPOTrainer

__all__ = ["project", "t_threshold", "verify", "z_scores"]

logger = logging.getLogger(__name__)

NUM_PROJECTIONS = 64
FALSE_ALARM_RATE = 1e-3
"""Probability that an unbiased estimator is called biased."""
_ROUNDING = 1e-5
"""Relative to the projections' size: what float32 in another order of sums explains."""


def verify(args: SDPOConfig, *, num_draws: int = 100, warmup_steps: int = 4) -> dict[str, Any]:
    """Compares the dense gradient of a step with pruned draws of it.

    At the start policy and reference agree and all coefficients are equal, so the run's first steps
    are taken before; nothing is written to its output folder. Beside the model and its gradient,
    the dense gradient is held.

    Args:
        args: the run's options; pruning must be on.
        num_draws: draws, at least 20.
        warmup_steps: optimizer steps before, from which the draws' history comes.

    Returns:
        ``unbiased``, ``max_abs_z``, ``z_threshold``, ``variance_inflation_predicted``,
        ``variance_inflation_measured`` and its standard error, ``flops_ratio``,
        ``noise_adjusted_speedup`` (with the measured inflation), fractions and the largest weight.

    Raises:
        ValueError: pruning is off, there are several ranks, or too few draws.
    """
    if not args.pruning_options.is_active:
        raise ValueError("pruning is off: there is nothing to verify; set pruning to a preset")
    if args.world_size > 1:
        raise ValueError("verify runs in one process; draws do not depend on the number of ranks")
    if num_draws < 20:
        raise ValueError(f"num_draws must be at least 20, got {num_draws}")
    with tempfile.TemporaryDirectory() as folder:
        args.output_dir, args.save_strategy, args.eval_strategy = folder, "no", "no"
        args.eval_dataset, args.eval_holdout, args.report_to = None, None, []
        args.max_steps = max(1, warmup_steps)
        trainer = SDPOTrainer(args=args)
        if warmup_steps:
            trainer.train()
        pairs = next(iter(trainer.get_train_dataloader()))
        return _compare(trainer, pairs, num_draws=num_draws)


def _compare(trainer: SDPOTrainer, inputs: StepPairs, *, num_draws: int) -> dict[str, Any]:
    model = trainer.model.train()
    model.zero_grad()
    pairs, reference = inputs
    squared_norms = 0.0
    for number in range(len(pairs)):
        one = [reference[number]] if reference is not None else None
        trainer.run_pairs(model, ([pairs[number]], one), weight=1 / len(pairs))
        squared_norms += sum(float(g.double().square().sum()) for _, g in _taken(model))
    trainer.run_pairs(model, inputs, weight=1.0)
    dense = dict(_taken(model))
    expected = project(dense)

    counts = StepCounts()
    projections, distances = [], []
    start = trainer.step_draw()
    assert start is not None, "pruning is on"
    for number in range(num_draws):
        draw: StepDraw = replace(start, step=start.step + 1 + number)
        counts = counts + trainer.run_pairs(model, inputs, weight=1.0, draw=draw).counts
        found = dict(_taken(model))
        projections.append(project(found))
        distances.append(sum(float((found[n] - dense[n]).double().square().sum()) for n in dense))
    scores = z_scores(torch.stack(projections), expected)
    threshold = t_threshold(len(scores), num_draws, FALSE_ALARM_RATE)
    distance = torch.tensor(distances, dtype=torch.float64)
    measured = 1 + float(distance.mean()) / squared_norms
    means = counts.means(**trainer.step_log.sizes)
    ratio = counts.flops_ratio(**trainer.step_log.sizes)
    largest = float(scores.abs().max())
    return {
        "unbiased": largest <= threshold,
        "max_abs_z": largest,
        "z_threshold": threshold,
        "num_projections": len(scores),
        "variance_inflation_predicted": means["pruning/variance_inflation"],
        "variance_inflation_measured": measured,
        "variance_inflation_error": float(distance.std()) / squared_norms / math.sqrt(num_draws),
        "flops_ratio": ratio,
        "noise_adjusted_speedup": 1 / ratio / measured,
        "executed_fraction": means["pruning/executed_fraction"],
        "backward_fraction": means["pruning/backward_fraction"],
        "scored_fraction": means["pruning/scored_fraction"],
        "max_weight": means["pruning/max_weight"],
        "num_pairs": len(pairs),
        "num_draws": num_draws,
    }


def project(gradients: dict[str, Tensor], *, num_projections: int = NUM_PROJECTIONS) -> Tensor:
    """Random projections of a gradient, float64 [M]: the same for the same names and shapes.

    Args:
        gradients: parameter name → gradient.
        num_projections: M.
    """
    total = torch.zeros(num_projections, dtype=torch.float64)
    for name, gradient in sorted(gradients.items()):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        flat = gradient.detach().reshape(-1)
        signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.int8)
        signed = flat * (2 * signs - 1).to(flat.device)
        padding = -len(flat) % num_projections
        shift = int(torch.randint(num_projections, (1,), generator=generator))
        buckets = nn.functional.pad(signed, (0, padding)).view(-1, num_projections)
        total += buckets.double().sum(dim=0).cpu().roll(shift)
    return total


def z_scores(projections_DM: Tensor, expected_M: Tensor) -> Tensor:
    """(mean over draws − dense) / standard error, float64 [M].

    Rounding counts as an error of its own, so that projections without variance, where nothing was
    pruned, are compared as well.
    """
    error_M = projections_DM.std(dim=0) / math.sqrt(len(projections_DM))
    rounding = _ROUNDING * expected_M.square().mean().sqrt()
    spread_M = (error_M.square() + rounding.square()).sqrt().clamp_min(1e-300)
    return (projections_DM.mean(dim=0) - expected_M) / spread_M


def t_threshold(num_tests: int, num_draws: int, false_alarm_rate: float) -> float:
    """What the largest of several |t| exceeds with the given probability, at most (Bonferroni).

    Student's quantile by its expansion around the normal one.

    References:
        Abramowitz & Stegun 1964, "Handbook of mathematical functions", 26.7.5.
    """
    z = NormalDist().inv_cdf(1 - false_alarm_rate / num_tests / 2)
    freedom = num_draws - 1
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _taken(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Names and gradients of all parameters, which are taken from them."""
    found = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found
