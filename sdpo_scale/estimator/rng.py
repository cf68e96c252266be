"""Uniform random numbers as a pure function of (seed, step, pair, stage).

There is no generator whose state advances. A number is looked up at an address, as in a table that
is computed on demand: the counter-based generator Philox maps a key (the seed) and a counter (the
address) to random words. Therefore a draw cannot depend on what was drawn before it, that is on
rank, world size, micro-batching, number of data workers, or a restart in the middle of a run; and
two processes that need the same draw compute it, rather than send it.
"""

import enum
import operator

import numpy as np
from numpy.typing import NDArray

__all__ = ["Stage", "uniforms"]

_WORD = 2**64
_NO_PAIR = _WORD - 1  # in the counter's pair word: the draw belongs to the whole step


class Stage(enum.IntEnum):
    """The random decisions of a step; each has a stream of its own, independent of the others.

    The values are part of the address of every number: changing one changes all runs.
    """

    PRESAMPLE = 0
    """Which pairs are looked at at all."""
    PREFIX = 1
    """At which level a pair's responses are cut."""
    BRANCH = 2
    """Which branches enter the backward."""
    TRAIN_PREFIX = 3
    """At which level the train pass of a kept branch is cut."""
    POSITION = 4
    """Which response positions enter the backward of the language-model head."""


def uniforms(
    count: int, *, seed: int, step: int, pair_id: int | None, stage: Stage
) -> NDArray[np.float64]:
    """The first numbers of one stream, uniform on [0, 1) in steps of 2^-53.

    Key and counter of Philox-4x64 with 10 rounds, 64-bit words, least significant first:

        key      seed mod 2^128                                        (2 words)
        counter  index of the block of four numbers, counted from 1 | stage | step | pair

    Distinct addresses under one seed never share a block, and ``uniforms(5, …)[:3]`` equals
    ``uniforms(3, …)``: how many numbers a caller asks for does not change those it gets.

    NumPy guarantees the words of its bit generators for ever, but not the numbers that its
    ``Generator`` derives from them; so the last step, 53 bits to a double, is done here.

    Args:
        count: how many numbers, ≥ 0.
        seed: any integer. Seeds that differ by a multiple of 2^128 are the same seed; hence all
            seeds from −2^127 to 2^127 − 1 are distinct, negative ones included.
        step: optimizer step, 0 ≤ step < 2^64.
        pair_id: identity of the pair in the data, 0 ≤ pair_id < 2^64 − 1; None for a draw that
            belongs to the whole step (an address that no pair can have).
        stage: the decision that the numbers are for.

    Returns:
        float64 [count].

    References:
        Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (counters as
        generators; Philox).
    """
    assert count >= 0, count
    assert 0 <= step < _WORD, step
    assert pair_id is None or 0 <= pair_id < _NO_PAIR, pair_id
    pair_word = _NO_PAIR if pair_id is None else pair_id
    key = operator.index(seed) % _WORD**2
    # NumPy increments the counter before it computes a block, hence the first index is 1.
    counter = np.array([0, stage, step, pair_word], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(count)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
