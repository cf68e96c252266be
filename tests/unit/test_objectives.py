"""Losses: closed forms, TRL's values, extreme margins."""

import math

import pytest
import torch

from sdpo_scale.objectives import DIVERGENCES, OBJECTIVES, margin_zero_loss
from tests.helpers.oracle import dpo_loss


def loss(name, chosen, rejected, *, beta=0.1, smoothing=0.0, lengths=(1, 1), dtype=torch.float64):
    return OBJECTIVES[name].function(
        torch.as_tensor(chosen, dtype=dtype),
        torch.as_tensor(rejected, dtype=dtype),
        chosen_length_P=torch.tensor([lengths[0]]),
        rejected_length_P=torch.tensor([lengths[1]]),
        beta=beta,
        label_smoothing=smoothing,
    )


FUNCTIONS = [name for name in OBJECTIVES if name != "sft"]  # which reads no log-ratios


@pytest.mark.parametrize("name", FUNCTIONS)
def test_loss_equals_its_closed_form(name):
    generator = torch.Generator().manual_seed(0)
    smoothing = 0.2 if OBJECTIVES[name].takes_label_smoothing else 0.0
    for _ in range(200):
        chosen, rejected = (30 * torch.randn(2, generator=generator, dtype=torch.float64)).tolist()
        lengths = tuple(torch.randint(1, 90, (2,), generator=generator).tolist())
        options = {"beta": 0.3, "lengths": lengths}
        sums = torch.tensor([chosen, rejected], dtype=torch.float64)
        expected = dpo_loss(name, *sums, label_smoothing=smoothing, **options).item()
        options["smoothing"] = smoothing
        torch.testing.assert_close(
            loss(name, [chosen], [rejected], **options).item(), expected, rtol=1e-12, atol=1e-12
        )


def test_NUM_05_ipo_takes_averages_over_tokens_not_sums():
    log_ratios, lengths = ([1.0], [-2.0]), (2, 4)
    assert loss("ipo", *log_ratios, beta=0.1, lengths=lengths).item() == pytest.approx(16.0)
    assert loss("ipo", *log_ratios, beta=0.1, lengths=(1, 1)).item() == pytest.approx(4.0)  # sums


def test_case_num_02_extreme_margins_stay_finite():
    case = {
        "cases": [
            {"h": -200.0, "loss": 200.0, "dloss_dh": -1.0},
            {"h": 200.0, "loss": 0.0, "dloss_dh": 0.0},
            {"h": 0.0, "loss": 0.6931471805599453, "dloss_dh": -0.5},
        ]
    }
    for entry in case["cases"]:
        chosen = torch.tensor([entry["h"]], dtype=torch.float32, requires_grad=True)
        value = loss("sigmoid", chosen, [0.0], beta=1.0, dtype=torch.float32)
        value.sum().backward()
        assert value.item() == pytest.approx(entry["loss"], rel=1e-6, abs=1e-30)
        assert chosen.grad.item() == pytest.approx(entry["dloss_dh"], rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("h", [-200.0, 0.0, 200.0])
def test_NUM_02_every_loss_and_slope_is_finite_in_float32(name, h):
    smoothing = 0.1 if OBJECTIVES[name].takes_label_smoothing else 0.0
    for sums in ([h, 0.0], [0.0, -h], [h / 2, -h / 2]):
        leaves = torch.tensor(sums, dtype=torch.float32, requires_grad=True)
        value = loss(name, *leaves[:, None], beta=1.0, smoothing=smoothing, dtype=torch.float32)
        value.sum().backward()
        assert value.isfinite().all()
        assert leaves.grad.isfinite().all()


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("h", [-200.0, 200.0])
def test_NUM_02_every_divergence_is_finite_in_float32(kind, h):
    leaf = torch.tensor([h], dtype=torch.float32, requires_grad=True)
    score = DIVERGENCES[kind](leaf, 0.5)
    value = loss("sigmoid", score, torch.zeros(1), beta=1.0, dtype=torch.float32)
    value.sum().backward()
    assert value.isfinite().all()
    assert leaf.grad.isfinite().all()


def test_alpha_divergence_has_reverse_kl_as_its_limit():
    sums = torch.linspace(-3, 3, 13, dtype=torch.float64)
    assert torch.equal(DIVERGENCES["alpha_divergence"](sums, 1.0), sums)
    expected = (sums.exp() ** -0.5 - 1) / -0.5
    torch.testing.assert_close(DIVERGENCES["alpha_divergence"](sums, 0.5), expected)


def test_what_depends_on_the_probabilities_has_no_loss_at_margin_zero():
    assert margin_zero_loss(OBJECTIVES["sft"], beta=0.1, label_smoothing=0.0) is None


def test_case_num_05_ipo_uses_averages():
    # sums 1 and −2, lengths 2 and 4, β 0.1: averages 0.5 and −0.5, target 5
    value = loss("ipo", [1.0], [-2.0], lengths=(2, 4))
    assert value.item() == pytest.approx(16.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_margin_zero_loss_is_the_loss_where_policy_equals_reference(name):
    smoothing = 0.1 if OBJECTIVES[name].takes_label_smoothing else 0.0
    expected = loss(name, [0.0], [0.0], beta=0.2, smoothing=smoothing, lengths=(3, 9)).item()
    found = margin_zero_loss(OBJECTIVES[name], beta=0.2, label_smoothing=smoothing)
    assert found == pytest.approx(expected, rel=1e-15)
    if name == "sigmoid":
        assert found == pytest.approx(math.log(2))


def test_case_opt_01_and_log_01_a_mean_over_pairs_not_of_means():
    losses = torch.tensor([1.0, 2.0, 3.0, 10.0])
    num_pairs = len(losses)
    for packs in ([[0, 1, 2], [3]], [[0], [1], [2], [3]], [[0, 1, 2, 3]]):
        assert sum(losses[pack].sum() / num_pairs for pack in packs) == 4.0
