"""Sums of metrics: batches of any size weigh by their pairs; one host synchronization a step."""

import pytest
import torch

from sdpo_scale.metrics import pair_rows, sum_metrics, token_sums


def sums_of(losses, correct):
    losses_P = torch.tensor(losses)
    ratios = torch.tensor([[1.0, 0.0] if right else [0.0, 1.0] for right in correct])
    rows = pair_rows(losses_P=losses_P, log_ratio_sums_P2=ratios, logprob_sums_P2=-ratios)
    lengths = torch.ones(len(losses), 2, dtype=torch.int64)
    return sum_metrics(rows, lengths, [])[0]


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
        count += self.is_floating_point()  # lengths are integers that never left the host
        return original(self)

    for name in ("item", "__bool__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, n=name: pytest.fail(f"{n} synchronizes"))
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    sums_of([0.2, 0.3], [1, 0])
    assert count == 1


def test_a_tie_is_not_accurate_and_not_finite_is_reported():
    rows = torch.tensor([[0.7, 1.0, 1.0, -1.0, -1.0], [torch.inf, 0.0, 0.0, 0.0, 0.0]])
    sums, all_finite = sum_metrics(rows, torch.ones(2, 2, dtype=torch.int64), [])
    assert sums.pair_sums["accurate"] == 0
    assert not all_finite


def test_token_sums_split_by_response():
    statistics = torch.tensor([[1.0, 2.0, 1.0], [3.0, 4.0, 0.0], [5.0, 6.0, 1.0]])
    found = token_sums(statistics, torch.tensor([True, True, False]))
    assert found.tolist() == [9.0, 6.0, 6.0, 1.0]
