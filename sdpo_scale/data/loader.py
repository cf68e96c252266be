"""The data loader of a run: one batch is the pairs of one optimizer step."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from sdpo_scale.data.pairs import Pair, PairDataset
from sdpo_scale.data.reference import ReferenceLogprobs, ResponseLogprobs

__all__ = ["ScoredPairs", "StepBatches", "StepLoader", "StepPairs", "collate"]

StepPairs = tuple[list[Pair], list[ResponseLogprobs] | None]
"""The pairs of one optimizer step and their reference log-probabilities, if there is a
reference."""


class ScoredPairs(Dataset[tuple[Pair, ResponseLogprobs | None]]):
    """Pairs with their reference log-probabilities."""

    def __init__(self, dataset: PairDataset, reference: ReferenceLogprobs | None) -> None:
        """Joins a data set and its reference log-probabilities, which are in the same order."""
        self._dataset = dataset
        self._reference = reference

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Pair, ResponseLogprobs | None]:
        """The pair at an index and its reference log-probabilities."""
        reference = None if self._reference is None else self._reference[index]
        return self._dataset[index], reference

    def step(self, indices: Sequence[int]) -> StepPairs:
        """The step made of the pairs at these indices."""
        return collate([self[index] for index in indices])


def collate(items: Sequence[tuple[Pair, ResponseLogprobs | None]]) -> StepPairs:
    """Lists instead of tensors: packs are laid out by the step, which knows ``max_tokens``."""
    reference = [logprobs for _, logprobs in items if logprobs is not None]
    return [pair for pair, _ in items], reference or None


class StepBatches(Sampler[list[int]]):
    """Indices of each step's pairs: a permutation drawn from (seed, epoch), or the data's order.

    A pure function of seed and epoch: no global random state is read, so neither the reference's
    scoring nor a restart can change the order. The last step of an epoch may have fewer pairs.

    Of a source of n pairs and weight w an epoch holds exactly round(w·n) pairs: ⌊w⌋ copies of each,
    and one more of as many as are missing, drawn from (seed, epoch) without replacement. So each
    pair comes w times in an epoch on average, and with w = 0.5 another half comes in each epoch.
    """

    def __init__(
        self,
        num_pairs: int,
        *,
        batch_size: int,
        seed: int,
        shuffles: bool = True,
        sources: NDArray[np.int32] | None = None,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        """Takes the number of pairs, those per step, the order's seed or that it is the data's.

        Raises:
            ValueError: a weight that is too small for any pair of its source to be used.
        """
        self._num_pairs = num_pairs
        self._batch_size = batch_size
        self._seed = seed
        self._shuffles = shuffles
        self._sources = np.zeros(num_pairs, np.int32) if sources is None else sources
        self._weights = weights
        counts = np.bincount(self._sources, minlength=len(weights)).tolist()
        self._totals = [round(w * count) for w, count in zip(weights, counts, strict=True)]
        for number, (total, count) in enumerate(zip(self._totals, counts, strict=True)):
            if count and not total:
                raise ValueError(
                    f"weight {weights[number]} of data source {number} uses none of its {count} "
                    "pairs; leave it out or raise the weight"
                )
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration yields."""
        self._epoch = epoch

    @property
    def pairs_per_epoch(self) -> int:
        """Pairs of an epoch, copies counted."""
        return sum(self._totals)

    def first(self, num_steps: int) -> NDArray[np.int64]:
        """Indices of the pairs that so many steps use, each once, in the order of their use."""
        seen = np.zeros(self._num_pairs, bool)
        used: list[NDArray[np.int64]] = []
        for epoch in range(math.ceil(num_steps / max(len(self), 1))):
            order = self._order(epoch)[: (num_steps - epoch * len(self)) * self._batch_size]
            _, firsts = np.unique(order, return_index=True)
            order = order[np.sort(firsts)]
            used.append(order[~seen[order]])
            seen[order] = True
            if seen.all():
                break
        return np.concatenate(used)

    def __len__(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self.pairs_per_epoch / self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The epoch's steps."""
        order = self._order(self._epoch)
        for start in range(0, len(order), self._batch_size):
            yield order[start : start + self._batch_size].tolist()

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """An epoch's pairs in their order, copies counted."""
        random = np.random.default_rng((self._seed, epoch))
        order = np.arange(self._num_pairs)
        if any(weight != 1 for weight in self._weights):
            order = np.repeat(order, self._copies(epoch))
        return random.permutation(order) if self._shuffles else order

    def _copies(self, epoch: int) -> NDArray[np.int64]:
        """How often each pair comes in an epoch, int [N]."""
        copies = np.zeros(self._num_pairs, np.int64)
        for number, total in enumerate(self._totals):
            (own,) = np.nonzero(self._sources == number)
            if len(own):
                each, missing = divmod(total, len(own))
                random = np.random.default_rng((self._seed, epoch, number))
                copies[own] = each
                copies[random.choice(own, missing, replace=False)] += 1
        return copies


class StepLoader(DataLoader[Any]):
    """A data loader that hands the epoch on to its batch sampler, as the training loop expects."""

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch."""
        sampler = self.batch_sampler
        assert isinstance(sampler, StepBatches)
        sampler.set_epoch(epoch)
