"""The largest micro-batch within a budget: the inverse of a peak as a function of tokens.

Predicted peaks are tried until the answer is exact; of measured ones, a curve says where to look.
"""

import math
import re
from collections.abc import Callable, Mapping

__all__ = ["check_budget", "fit_peaks", "largest_tokens", "measured_tokens", "parse_bytes"]

_UNITS = {"GIB": 2**30, "GB": 10**9, "MIB": 2**20, "MB": 10**6}
_MARGIN = 0.97
"""Of the tokens that a curve promises: what is tried."""
_WORTH = 1.03
"""How much more than what fits is worth another pack."""
_MOST_PACKS, _MULTIPLE = 12, 16


def parse_bytes(text: str, *, option: str = "memory_budget") -> int:
    """``80GiB``, ``80GB`` or ``512MiB`` as bytes.

    Raises:
        ValueError: no number with one of these units; names the option.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([GM]I?B)", text.upper().strip())
    if match is None:
        raise ValueError(f"{option} {text!r} is no size: write 80GiB, 80GB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def check_budget(value: float | str, *, needs_size: bool = False) -> None:
    """Checks ``memory_budget``: a size or, where there is a device, a share of its memory.

    Raises:
        ValueError: names the option and what to write.
    """
    if isinstance(value, str):
        parse_bytes(value)
    elif not 0 < value <= 1:
        raise ValueError(f"memory_budget {value} is neither in (0, 1] nor a size such as 60GiB")
    elif needs_size:
        raise ValueError(f"memory_budget {value} is a share of a GPU's memory: write 2GiB on a CPU")


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
    peaks: dict[int, float] = {}
    tokens = max(multiple, start // multiple * multiple)
    while tokens:
        peaks[tokens] = peak_at(tokens)
        tokens = _following(peaks, budget, multiple, 1.0, math.inf)
    return max((tokens for tokens, peak in peaks.items() if peak <= budget), default=0)


def fit_peaks(peaks: Mapping[int, float]) -> tuple[float, float, float]:
    """(a, b, c ≥ 0) of a + b·tokens + c·tokens² through the three largest of several peaks.

    Where they bend downwards, as when a pack fills its first chunk of logits, a line through two.
    """
    (x, f), (y, g) = sorted(peaks.items())[-2:]
    slope, c = (g - f) / (y - x), 0.0
    for w, e in sorted(peaks.items())[-3:-2]:
        c = max(0.0, (slope - (f - e) / (x - w)) / (y - w))
    c = c if slope > c * (x + y) else 0.0
    b = slope - c * (x + y)
    return g - b * y - c * y * y, b, c


def measured_tokens(
    measure: Callable[[int], float], budget: float, *, least: int, most: int
) -> dict[int, float]:
    """Measures packs of growing size, up to a few per cent below the largest that fits.

    Args:
        measure: tokens → bytes, infinite where memory ran out; the same on every rank.
        budget: bytes.
        least: tokens of the first pack; if that does not fit, it is the only one.
        most: tokens of the largest pack that is of any use.

    Returns:
        Tokens → bytes of each, the answer among them.
    """
    peaks: dict[int, float] = {}
    tokens = least
    while tokens and (not peaks or peaks[least] <= budget) and len(peaks) < _MOST_PACKS:
        peaks[tokens] = measure(tokens)
        tokens = _following(peaks, budget, _MULTIPLE, _MARGIN, most)
    return peaks


def _following(
    peaks: Mapping[int, float], budget: float, multiple: int, margin: float, most: float
) -> int:
    """What to try next; 0 where there is nothing left to gain, or with a margin not enough."""
    fits = max((tokens for tokens, peak in peaks.items() if peak <= budget), default=0)
    exceeds = min((tokens for tokens, peak in peaks.items() if peak > budget), default=math.inf)
    known = {tokens: p for tokens, p in peaks.items() if p < math.inf and tokens <= exceeds}
    guess = 2.0 * fits if fits else exceeds / 2
    if fits and len(known) > 1:
        a, b, c = fit_peaks(known)
        root = b + math.sqrt(max(0.0, b * b + 4 * c * (budget - a)))
        guess = min(4.0 * fits, margin * 2 * (budget - a) / root if root > 0 else math.inf)
    if exceeds < math.inf:  # where memory ran out, nobody knows by how much it was too large
        guess = min(guess, margin * exceeds if exceeds in known else (fits + exceeds) / 2)
    if guess >= most > fits:
        return int(most)
    tokens = int(guess) // multiple * multiple
    if margin < 1:
        return tokens if _WORTH * fits <= tokens <= most else 0
    tokens = int(min(max(tokens, fits + multiple), exceeds - multiple))
    return tokens if tokens > fits else 0
