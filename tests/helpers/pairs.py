"""Random pairs of token ids."""

import numpy as np

from sdpo_scale.data.pairs import Pair


def random_pairs(count: int, *, seed: int = 0, vocab: int = 128, longest: int = 24) -> list[Pair]:
    """Pairs whose three parts have 1 to `longest` tokens; the first has one-token responses."""
    rng = np.random.default_rng(seed)
    pairs = []
    for pair_id in range(count):
        lengths = rng.integers(1, longest + 1, size=3)
        if pair_id == 0:
            lengths[1:] = 1
        parts = [rng.integers(3, vocab, size=n).astype(np.int32) for n in lengths]
        pairs.append(
            Pair(
                pair_id=pair_id,
                prompt_ids=parts[0],
                chosen_ids=parts[1],
                rejected_ids=parts[2],
                content_hash=bytes([pair_id]) * 16,
            )
        )
    return pairs


def pair_of_lengths(pair_id: int, lengths: tuple[int, int, int], *, vocab: int = 128) -> Pair:
    """A random pair whose prompt, chosen and rejected response have these lengths."""
    rng = np.random.default_rng((7, pair_id))
    parts = [rng.integers(3, vocab, size=n).astype(np.int32) for n in lengths]
    return Pair(
        pair_id=pair_id,
        prompt_ids=parts[0],
        chosen_ids=parts[1],
        rejected_ids=parts[2],
        content_hash=bytes([pair_id]) * 16,
    )
