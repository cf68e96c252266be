"""The curve through measured peaks, the search along it, and the budget as users write it."""

import math
from collections.abc import Callable

import pytest

from sdpo_scale.memory.budget import (
    check_budget,
    fit_peaks,
    largest_tokens,
    measured_tokens,
    parse_bytes,
)

SHAPES: dict[str, Callable[[int], float]] = {
    "line": lambda n: 1e6 + 700.0 * n,
    "parabola": lambda n: 1e6 + 100.0 * n + 0.2 * n * n,
    "first chunk fills": lambda n: 1e6 + 5000.0 * min(n, 900) + 700.0 * n,
    "two lines": lambda n: max(3e6 + 100.0 * n, 1e6 + 900.0 * n),
    "steps": lambda n: 1e6 + 2**13 * math.ceil(700 * n / 2**13),
}


def best(peaks: dict[int, float], budget: float) -> int:
    return max((tokens for tokens, peak in peaks.items() if peak <= budget), default=0)


def test_the_curve_goes_through_three_peaks_and_the_line_through_two():
    parabola = SHAPES["parabola"]
    assert fit_peaks({n: parabola(n) for n in (100, 400, 700)}) == pytest.approx((1e6, 100, 0.2))
    assert fit_peaks({n: parabola(n) for n in (1, 100, 400, 700)}) == pytest.approx((1e6, 100, 0.2))
    assert fit_peaks({10: 20.0, 30: 60.0}) == pytest.approx((0, 2, 0))


def test_peaks_that_bend_downwards_are_continued_as_a_line():
    assert fit_peaks({100: 0.0, 200: 200.0, 300: 300.0}) == pytest.approx((0, 1, 0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("largest", [700, 3000, 50_000])
def test_a_few_packs_find_at_least_nine_tenths_of_what_fits(shape: str, largest: int):
    peak, tried = SHAPES[shape], []
    budget = peak(largest)

    def measure(tokens: int) -> float:
        tried.append(tokens)
        return peak(tokens)

    found = best(measured_tokens(measure, budget, least=60, most=10**6), budget)
    exact = largest_tokens(peak, budget, multiple=1)
    assert 0.9 * exact <= found <= exact
    assert len(tried) <= 12
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_that_runs_out_below_the_budget_ends_the_growth(shape: str):
    peak = SHAPES[shape]
    peaks = measured_tokens(
        lambda n: peak(n) if n <= 2000 else math.inf, peak(8000), least=60, most=10**6
    )
    assert 1800 <= best(peaks, peak(8000)) <= 2000


def test_nothing_is_tried_beyond_the_smallest_that_does_not_fit_nor_beyond_what_is_of_use():
    assert measured_tokens(lambda n: 10.0 * n, 500, least=60, most=1000) == {60: 600.0}
    assert max(measured_tokens(lambda n: 1.0 * n, 1e9, least=60, most=1001)) == 1001
    assert measured_tokens(lambda n: 1.0 * n, 1e9, least=60, most=60) == {60: 60.0}


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_of_predicted_peaks_is_exact(shape: str, multiple: int):
    peak = SHAPES[shape]
    for largest in (1, 63, 64, 1000, 77_777):
        found = largest_tokens(peak, peak(largest), multiple=multiple)
        assert found % multiple == 0
        assert found == 0 or peak(found) <= peak(largest)
        assert peak(found + multiple) > peak(largest)


def test_sizes_are_read_and_refused_by_the_name_of_their_option():
    assert parse_bytes("1.5gib") == 3 * 2**29
    assert parse_bytes("80 GB") == 80 * 10**9
    for text in ("80", "GiB", "1.2.3GiB", "-1GiB", "80TiB"):
        with pytest.raises(ValueError, match=f"--gpu-memory '{text}' is no size: write 80GiB"):
            parse_bytes(text, option="--gpu-memory")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.0, r"memory_budget 0.0 is neither in \(0, 1\] nor a size"),
        (1.5, r"memory_budget 1.5 is neither"),
        ("much", "memory_budget 'much' is no size"),
        (0.5, "memory_budget 0.5 is a share of a GPU's memory: write 2GiB on a CPU"),
    ],
)
def test_a_wrong_budget_is_refused_by_name(value: float | str, message: str):
    with pytest.raises(ValueError, match=message):
        check_budget(value, needs_size=True)
    check_budget(0.9)
    check_budget("2GiB", needs_size=True)
