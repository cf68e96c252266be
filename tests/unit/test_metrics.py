"""Sums of metrics: batches of any size weigh by their pairs; one host synchronization a step."""

import pytest
import torch

from sdpo_scale.metrics import PAIR_COLUMNS, StepCounts, sum_metrics, token_sums
from sdpo_scale.objectives import OBJECTIVES
from sdpo_scale.weighting import draw_executed, telescoped_loss
from tests.helpers.pairs import pair_of_lengths

NOTHING = torch.zeros(0, dtype=torch.float64)


def sums_of(losses, correct):
    rows = torch.zeros(len(losses), len(PAIR_COLUMNS))
    rows[:, 0] = torch.tensor(losses)
    rows[:, PAIR_COLUMNS.index("accurate")] = torch.tensor(correct).float()
    return sum_metrics(rows, None, NOTHING, num_pairs=len(losses))[0]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_case_log_01_evaluation_weighs_pairs_not_batches(batch):
    losses, correct = [0.2, 0.3, 2.5], [1, 1, 0]
    total = None
    for start in range(0, 3, batch):
        part = sums_of(losses[start : start + batch], correct[start : start + batch])
        total = part if total is None else total + part
    assert total.loss == pytest.approx(1.0)
    assert total.means(beta=0.1)["rewards/accuracies"] == pytest.approx(2 / 3)


def test_one_host_synchronization_per_step(monkeypatch):
    count = 0
    original = torch.Tensor.tolist

    def counted(self):
        nonlocal count
        count += 1
        return original(self)

    rows = torch.ones(2, len(PAIR_COLUMNS))
    tokens = token_sums(torch.ones(3, 3), torch.tensor([True, True, False]))
    for name in ("item", "__bool__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, n=name: pytest.fail(f"{n} synchronizes"))
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    sum_metrics(rows, tokens, NOTHING, num_pairs=2)
    assert count == 1


def test_a_tie_is_not_accurate():
    pairs = [pair_of_lengths(k, (1, 1, 1)) for k in range(3)]
    ratios = torch.tensor([0.5, 0.5, 0.6, 0.5, 0.4, 0.5])  # a tie, right, wrong
    _, rows = telescoped_loss(
        -ratios,
        ratios,
        draw_executed(pairs, None),
        objective=OBJECTIVES["sigmoid"],
        beta=0.1,
        label_smoothing=0.0,
    )
    assert rows[:, PAIR_COLUMNS.index("accurate")].tolist() == [0.0, 1.0, 0.0]


def test_pairs_that_were_not_executed_count_in_the_mean():
    rows = torch.full((2, len(PAIR_COLUMNS)), 3.0)
    assert sum_metrics(rows, None, NOTHING, num_pairs=6)[0].loss == pytest.approx(1.0)


def test_token_sums_split_by_response():
    statistics = torch.tensor([[1.0, 2.0, 1.0], [3.0, 4.0, 0.0], [5.0, 6.0, 1.0]])
    found = token_sums(statistics, torch.tensor([True, True, False]))
    assert found.tolist() == [9.0, 6.0, 6.0, 1.0, 2.0, 1.0]


def test_token_means_are_over_the_tokens_of_all_steps():
    statistics = torch.tensor([[1.0, 2.0, 1.0], [3.0, 4.0, 0.0], [5.0, 6.0, 1.0]])
    rows = torch.zeros(1, len(PAIR_COLUMNS))
    parts = [
        sum_metrics(rows, token_sums(statistics[:n], is_chosen[:n]), NOTHING, num_pairs=1)[0]
        for n, is_chosen in [
            (3, torch.tensor([True, True, False])),
            (2, torch.tensor([True, False])),
        ]
    ]
    means = (parts[0] + parts[1]).means(beta=0.1)
    assert means["entropy"] == pytest.approx((9 + 4) / 5)
    assert means["logits/chosen"] == pytest.approx((6 + 2) / 3)
    assert means["logits/rejected"] == pytest.approx((6 + 4) / 2)
    assert means["mean_token_accuracy"] == pytest.approx((1 + 1) / 3)
    alone = sum_metrics(rows, None, NOTHING, num_pairs=1)[0].means(beta=0.1)
    assert "entropy" not in alone  # not collected is not 0


def test_other_numbers_come_along_and_all_are_summed_over_ranks():
    extra = torch.tensor([1.0, 2.0], dtype=torch.float64)
    rows = torch.ones(1, len(PAIR_COLUMNS))
    sums, found = sum_metrics(rows, None, extra, num_pairs=2, sum_over_ranks=lambda t: 2 * t)
    assert found == [2.0, 4.0]
    assert sums.loss == 1.0


SIZES = {"body_parameters": 100, "head_parameters": 10}


def counts(**changes):
    values = {
        "num_steps": 1,
        "dense_tokens": 20,
        "dense_positions": 8,
        "executed_tokens": 20,
        "forward_tokens": 20,
        "backward_tokens": 20,
        "recomputed_tokens": 20,
        "forward_positions": 8,
        "backward_positions": 8.0,
    }
    return StepCounts(**{**values, **changes})


def test_flops_by_hand():
    one = {"forward_tokens": 0, "backward_tokens": 0, "recomputed_tokens": 0}
    one |= {"forward_positions": 0, "backward_positions": 0.0}
    for name, expected in [
        ("forward_tokens", 2 * 100),
        ("backward_tokens", 4 * 100),
        ("recomputed_tokens", 2 * 100),
        ("forward_positions", 2 * 10),
        ("backward_positions", 6 * 10),  # the logits again, and both inputs' gradients
    ]:
        assert counts(**{**one, name: 7}).flops(**SIZES) == 7 * expected
    frozen = {**SIZES, "trained_body_parameters": 3, "trained_head_parameters": 0}
    assert counts(**{**one, "backward_tokens": 7}).flops(**frozen) == 7 * (2 * 100 + 2 * 3)
    assert counts(**{**one, "backward_positions": 7.0}).flops(**frozen) == 7 * 4 * 10


def test_pruning_metrics_are_shares_of_the_dense_step():
    means = counts(executed_tokens=15, backward_tokens=10, backward_positions=2.0).means(
        **SIZES, recomputes=True
    )
    assert means["pruning/executed_fraction"] == 0.75
    assert means["pruning/backward_fraction"] == 0.5
    assert means["pruning/scored_fraction"] == 0.25


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_step_without_pruning_has_a_speed_up_of_1(recomputes):
    found = counts(recomputed_tokens=20 if recomputes else 0)
    means = found.means(**SIZES, recomputes=recomputes)
    assert means["pruning/noise_adjusted_speedup"] == 1.0
    assert means["pruning/variance_inflation"] == 1.0
    assert means["pruning/executed_fraction"] == means["pruning/backward_fraction"] == 1.0


def test_half_of_the_backward_with_recomputation_costs_5_eighths_of_the_body():
    found = counts(backward_tokens=10, recomputed_tokens=10)
    dense = found.dense_flops(**SIZES, recomputes=True)
    head = 10 * 8 * 8
    assert (found.flops(**SIZES) - head) / (dense - head) == pytest.approx(5 / 8)


def test_the_speed_up_is_divided_by_the_inflation():
    pruned = counts(backward_tokens=10, recomputed_tokens=10, second_moment=3.0, dense_moment=2.0)
    plain = counts(backward_tokens=10, recomputed_tokens=10)
    name = "pruning/noise_adjusted_speedup"
    found, expected = (c.means(**SIZES, recomputes=True)[name] for c in (pruned, plain))
    assert found == pytest.approx(expected / 1.5)


def test_counts_add_up_and_the_largest_weight_stays():
    total = counts(max_weight=3.0, effective_sample_size=4.0) + counts(
        max_weight=2.0, effective_sample_size=8.0
    )
    means = total.means(**SIZES, recomputes=True)
    assert total.dense_tokens == 40
    assert means["pruning/max_weight"] == 3.0
    assert means["pruning/effective_sample_size"] == 6.0
