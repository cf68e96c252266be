"""The data loader of a run: one batch is the pairs of one optimizer step."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
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
    """

    def __init__(self, num_pairs: int, *, batch_size: int, seed: int | None) -> None:
        """Takes the number of pairs, those per step, and the seed or None for the data's order."""
        self._num_pairs = num_pairs
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration yields."""
        self._epoch = epoch

    def first(self, num_steps: int) -> NDArray[np.int64]:
        """Indices of the pairs of so many steps of the first epoch; of all where 0 or less."""
        return np.concatenate(
            [np.array(batch) for batch in islice(self, num_steps if num_steps > 0 else None)]
        )

    def __len__(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self._num_pairs / self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The epoch's steps."""
        order = np.arange(self._num_pairs)
        if self._seed is not None:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(order)
        for start in range(0, self._num_pairs, self._batch_size):
            yield order[start : start + self._batch_size].tolist()


class StepLoader(DataLoader[Any]):
    """A data loader that hands the epoch on to its batch sampler, as the training loop expects."""

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch."""
        sampler = self.batch_sampler
        assert isinstance(sampler, StepBatches)
        sampler.set_epoch(epoch)
