"""The statistics of `verify`: projections are linear, thresholds are Student's."""

import math

import pytest
import torch

from sdpo_scale.reporting.verify import project, t_threshold, z_scores


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 9), "b": (130,), "c": (1,)}
    return {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def test_projections_are_linear_and_repeatable():
    first, second = gradients(0), gradients(1)
    total = {n: first[n] + 2 * second[n] for n in first}
    found = project(total)
    torch.testing.assert_close(found, project(first) + 2 * project(second), rtol=1e-5, atol=1e-5)
    assert torch.equal(project(first), project(first))


def test_projections_keep_the_norm_on_average():
    squares = [float(project(gradients(seed)).square().sum()) for seed in range(40)]
    norms = [sum(float(g.square().sum()) for g in gradients(seed).values()) for seed in range(40)]
    assert sum(squares) / sum(norms) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(19, 3.883), (99, 3.392), (999, 3.300)],  # two-sided 0.001, from tables of Student's t
)
def test_the_threshold_of_one_test_is_students_quantile(freedom, expected):
    assert t_threshold(1, freedom + 1, 1e-3) == pytest.approx(expected, abs=0.01)


def test_more_tests_need_a_higher_threshold():
    assert t_threshold(64, 100, 1e-3) > t_threshold(1, 100, 1e-3)


def test_an_unbiased_sample_passes_and_a_shifted_one_does_not():
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(64, generator=generator, dtype=torch.float64)
    noise = torch.randn(100, 64, generator=generator, dtype=torch.float64)
    threshold = t_threshold(64, 100, 1e-3)
    assert z_scores(expected + noise, expected).abs().max() < threshold
    assert z_scores(expected + noise + 1, expected).abs().max() > threshold


def test_without_variance_only_rounding_is_allowed():
    expected = torch.ones(64, dtype=torch.float64)
    same = expected.repeat(30, 1)
    assert z_scores(same * (1 + 1e-6), expected).abs().max() < 1
    assert z_scores(same * 1.001, expected).abs().max() > 50
    assert math.isfinite(float(z_scores(same, expected).abs().max()))
