"""Scoring the reference before training: all ranks share the work, and a bar shows it."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sdpo_scale.callbacks import new_progress, show_progress
from sdpo_scale.data.pairs import PairDataset
from sdpo_scale.data.reference import ReferenceCache, ReferenceLogprobs, score_pairs
from sdpo_scale.packing.layout import PackLayout
from sdpo_scale.sharding import Sharding

__all__ = ["score_parts"]


def score_parts(
    parts: Mapping[str, tuple[PairDataset, NDArray[np.int64]]],
    cache: ReferenceCache,
    *,
    forward: Callable[[PackLayout], Tensor],
    max_tokens: int,
    sharding: Sharding,
) -> dict[int, ReferenceLogprobs]:
    """Brings the cache to hold all pairs that a run uses.

    Args:
        parts: what to call it → (data set, indices of the pairs that are used).
        cache: of the model's key.
        forward: layout → float [R] log-probabilities.
        max_tokens: the most tokens of one pack.
        sharding: the ranks, which share a file system.

    Returns:
        Identity of each data set → its log-probabilities.

    Raises:
        NonFiniteError: a log-probability is NaN or infinite.
    """
    ranks = sharding.ranks
    references: dict[int, ReferenceLogprobs] = {}
    for name, (dataset, indices) in parts.items():
        sharding.wait()  # all ranks see the same pairs missing, and score a share each
        with new_progress(f"scoring {name} pairs") as progress:
            score_pairs(
                dataset,
                cache,
                forward=forward,
                max_tokens=max_tokens,
                indices=indices,
                share=slice(ranks.rank, None, ranks.world_size),
                on_progress=partial(show_progress, progress, progress.add_task("", total=None)),
            )
        sharding.wait()
        cache.refresh()
        references[id(dataset)] = ReferenceLogprobs(cache, cache.rows(dataset.content_hashes))
    return references
