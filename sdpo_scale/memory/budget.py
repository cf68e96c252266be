"""The largest micro-batch within a budget: the inverse of a peak as a function of tokens."""

from collections.abc import Callable

__all__ = ["largest_tokens"]


def largest_tokens(
    peak_at: Callable[[int], float], budget: float, *, start: int = 4096, multiple: int = 64
) -> int:
    """The most tokens whose peak is within a budget.

    Peaks are nearly straight lines in the number of tokens, so a few secants come within a multiple
    of the answer. What is returned was tried: its peak is within the budget.

    Args:
        peak_at: tokens → bytes, not decreasing.
        budget: bytes.
        start: first guess.
        multiple: the answer is one of it.

    Returns:
        The tokens; 0 if not even one ``multiple`` fits.
    """
    fits, exceeds = 0, 0  # the largest that fits, the smallest that does not, 0 while unknown
    tokens = max(multiple, start // multiple * multiple)
    known: dict[int, float] = {}
    while True:
        known[tokens] = peak_at(tokens)
        if known[tokens] <= budget:
            fits = max(fits, tokens)
        else:
            exceeds = tokens if exceeds == 0 else min(exceeds, tokens)
        if exceeds and exceeds - fits <= multiple:
            return fits
        tokens = _next(known, budget, fits=fits, exceeds=exceeds, multiple=multiple)


def _next(known: dict[int, float], budget: float, *, fits: int, exceeds: int, multiple: int) -> int:
    """Twice or half of what was tried until the budget lies between, then along the secant."""
    if not exceeds:
        return 2 * fits
    if not fits:
        return max(multiple, exceeds // 2 // multiple * multiple)
    slope = (known[exceeds] - known[fits]) / (exceeds - fits)
    guess = int(fits + (budget - known[fits]) / slope) // multiple * multiple
    return min(max(guess, fits + multiple), exceeds - multiple)
