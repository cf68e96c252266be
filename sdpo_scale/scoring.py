"""The pairs of a run and their reference: each scored once, before training, by all ranks together.

Every rank computes a share of each window of pairs, in as many packs as any other rank, since
sharded modules need the same collectives from each; then all ranks hold the window's
log-probabilities and one of each node writes them. So it does not matter whether nodes share a
cache folder: equal contents have equal names.
"""

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from sdpo_scale.callbacks import new_progress, show_progress
from sdpo_scale.checks import longest_pack
from sdpo_scale.config import SDPOConfig
from sdpo_scale.data.loader import ScoredPairs, StepBatches, StepLoader, StepPairs, collate
from sdpo_scale.data.pairs import Pair, PairDataset
from sdpo_scale.data.reference import (
    NonFiniteError,
    ReferenceCache,
    ReferenceLogprobs,
    ResponseLogprobs,
)
from sdpo_scale.inputs import RunInputs
from sdpo_scale.metrics import MetricSums
from sdpo_scale.packing.layout import PackLayout, build_idle_layout, build_layout
from sdpo_scale.packing.plan import pair_costs, plan_ranks
from sdpo_scale.record import Ranks, StepResult
from sdpo_scale.waiting import begin_phase

__all__ = ["RunPairs", "ScoredError", "score_pairs", "sum_over_batches"]

logger = logging.getLogger(__name__)

_PAIRS_PER_WINDOW = 256
"""For each rank, at least. A window becomes one file of the cache, and a killed run loses the one
being scored. Later ones hold up to an eighth of what was scored before: many pairs, few files."""
_MOST_PAIRS_PER_WINDOW, _MOST_TOKENS_PER_WINDOW = 8192, 1 << 22
"""Over all ranks, each of which holds a window's log-probabilities; no less than the least."""


class ScoredError(Exception):
    """Ends a training loop that was started for the sake of its sharded model only."""

    def __init__(self, num_pairs: int) -> None:
        """Takes the number of pairs that were scored."""
        self.num_pairs = num_pairs
        super().__init__(num_pairs)


class RunPairs:
    """The pairs that a run uses, with their reference log-probabilities, and loaders over them."""

    def __init__(self, inputs: RunInputs, args: SDPOConfig) -> None:
        """Takes the pairs; ``open`` names the reference and ``score`` makes it complete."""
        self._inputs, self._args = inputs, args
        self._cache: ReferenceCache | None = None
        self.is_scored = args.reference_free

    @property
    def num_pairs(self) -> int:
        """Pairs that the run uses."""
        return sum(len(indices) for _, indices in self._used().values())

    def open(self, key: Callable[[], Mapping[str, str]]) -> None:
        """Opens the cache of a reference, unless it has been; ``key`` is what it depends on."""
        if self._cache is None and not self._args.reference_free:
            parts = {**key(), **self._inputs.data_key}
            self._cache = ReferenceCache(self._args.cache_path / "reference", parts)

    def num_missing(self, ranks: Ranks) -> int:
        """Pairs whose reference log-probabilities some rank lacks; the same on each."""
        if self.is_scored:
            return 0
        assert self._cache is not None, "the cache is opened while the reference is at hand"
        used = self._used().values()
        return sum(len(_missing(data, self._cache, wanted, ranks)) for data, wanted in used)

    def score(
        self, forward: Callable[[PackLayout], Tensor], *, ranks: Ranks, hidden_size: int
    ) -> int:
        """Completes the cache.

        Args:
            forward: layout → float [R] log-probabilities of the reference.
            ranks: who shares the work.
            hidden_size: width of the model, for the balance between ranks.

        Returns:
            Number of pairs that were missing.

        Raises:
            NonFiniteError: a log-probability is NaN or infinite.
        """
        if self.is_scored:
            return 0
        assert self._cache is not None, "the cache is opened while the reference is at hand"
        known = len(self._cache)
        for name, (dataset, indices) in self._used().items():
            with new_progress(f"scoring {name} pairs") as progress:
                score_pairs(
                    dataset,
                    self._cache,
                    forward=forward,
                    indices=indices,
                    max_tokens=self._args.max_tokens,
                    hidden_size=hidden_size,
                    ranks=ranks,
                    on_progress=partial(show_progress, progress, progress.add_task("", total=None)),
                )
        self.is_scored = True
        return len(self._cache) - known

    def train_loader(self) -> StepLoader:
        """Batches of ``train_batch_size`` pairs; their order is a function of seed and epoch."""
        return self._loader(self._inputs.train, self.train_batches())

    def train_batches(self) -> StepBatches:
        """Indices of the training pairs of each step."""
        args = self._args
        dataset = self._inputs.train
        return StepBatches(
            len(dataset),
            batch_size=args.train_batch_size,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            shuffles=args.train_sampling_strategy == "random",
            sources=dataset.sources,
            weights=dataset.weights,
        )

    def eval_loader(self, dataset: Any) -> StepLoader:
        """The evaluation pairs in batches, in their order.

        Raises:
            ValueError: pairs that are not the run's evaluation pairs.
        """
        if dataset is not self._inputs.eval or dataset is None:
            raise ValueError(
                "evaluation needs pairs that were given to SDPOTrainer as eval_dataset: their "
                "reference log-probabilities come from the model before training"
            )
        batch_size = self._args.train_batch_size
        batches = StepBatches(len(dataset), batch_size=batch_size, seed=0, shuffles=False)
        return self._loader(dataset, batches)

    def shortest_two(self) -> tuple[Pair, Pair]:
        """The training pairs with the fewest tokens, where there are two."""
        dataset = self._inputs.train
        first, second = np.argsort(dataset.lengths.sum(axis=1), kind="stable")[:2].tolist()
        return dataset[first], dataset[second]

    def fullest_pack(self, max_tokens: int) -> StepPairs:
        """The training pairs of the fullest micro-batch that the run can come to."""
        dataset, used = self._used()["training"]
        lengths = dataset.lengths[used].sum(axis=1)
        most = self._args.train_batch_size
        pack = longest_pack(lengths, max_tokens=max_tokens, max_pairs=most)
        return self._scored(dataset).step(used[list(pack)].tolist())

    def _used(self) -> dict[str, tuple[PairDataset, NDArray[np.int64]]]:
        """Training pairs: all, unless the run ends before each of them has had its turn."""
        batches, args = self.train_batches(), self._args
        steps = args.max_steps if args.max_steps > 0 else len(batches) * args.num_train_epochs
        used = {"training": (self._inputs.train, batches.first(math.ceil(steps)))}
        if self._inputs.eval is not None:
            used["evaluation"] = (self._inputs.eval, np.arange(len(self._inputs.eval)))
        return used

    def _scored(self, dataset: PairDataset) -> ScoredPairs:
        if self._args.reference_free:
            return ScoredPairs(dataset, None)
        assert self._cache is not None
        return ScoredPairs(dataset, ReferenceLogprobs(self._cache, dataset.content_hashes))

    def _loader(self, dataset: PairDataset, batches: StepBatches) -> StepLoader:
        return StepLoader(
            self._scored(dataset),
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=self._args.dataloader_num_workers,
            persistent_workers=self._args.dataloader_persistent_workers,
            prefetch_factor=self._args.dataloader_prefetch_factor,
        )


def score_pairs(
    dataset: PairDataset,
    cache: ReferenceCache,
    *,
    forward: Callable[[PackLayout], Tensor],
    indices: NDArray[np.int64],
    max_tokens: int,
    hidden_size: int,
    ranks: Ranks,
    on_progress: Callable[[int, int], None],
) -> None:
    """Fills the cache with the pairs of a data set that it lacks.

    Uses the packs of training, no random numbers and no gradient. Killed at any moment it continues
    from the last complete shard.

    Args:
        dataset: the pairs.
        cache: of the reference model's key.
        forward: layout → float [R] log-probabilities of its response tokens.
        indices: the pairs that are needed.
        max_tokens: the most tokens of one pack.
        hidden_size: width of the model, for the balance between ranks.
        ranks: who shares the work; every rank ends with all of it.
        on_progress: called with (pairs scored, pairs to score), which are this rank's share.

    Raises:
        NonFiniteError: a log-probability is NaN or infinite; nothing of its window is stored.
            Raised on every rank.
    """
    begin_phase("the reference's log-probabilities")
    hashes = dataset.content_hashes
    wanted = np.unique(indices)
    missing = _missing(dataset, cache, wanted, ranks)
    logger.info(
        "reference: %d of %d pairs in the cache, %d to score",
        len(wanted) - len(missing),
        len(wanted),
        len(missing),
    )
    ends = _window_ends(dataset.lengths[missing, 1:].sum(axis=1), world_size=ranks.world_size)
    for start, end in itertools.pairwise([0, *ends]):
        window = missing[start:end]
        lengths_P3 = dataset.lengths[window]
        plans = plan_ranks(
            lengths_P3.sum(axis=1),
            pair_costs(lengths_P3[:, 0], lengths_P3[:, 1:], hidden_size),
            max_tokens=max_tokens,
            world_size=ranks.world_size,
        )
        share: dict[int, ResponseLogprobs] = {}
        for micro_batch in plans.micro_batches[ranks.rank]:
            positions = micro_batch.positions if micro_batch is not None else ()
            share.update(_score_pack(dataset, window[list(positions)].tolist(), forward))
            on_progress(
                start // ranks.world_size + len(share), -(-len(missing) // ranks.world_size)
            )
        scored = {index: pair for part in ranks.gather(share) for index, pair in part.items()}
        bad = [dataset[i].pair_id for i, pair in scored.items() if not _all_finite(pair)]
        if bad:
            raise NonFiniteError("a reference log-probability", sorted(bad))
        if ranks.is_first_of_node:
            cache.append([hashes[i] for i in window], [scored[int(i)] for i in window])
        ranks.wait("the reference's log-probabilities to be written")
        cache.refresh()


def _window_ends(num_tokens: NDArray[np.int64], *, world_size: int) -> list[int]:
    """Where each window ends, given the response tokens of each pair to score."""
    ends = [0]
    while ends[-1] < len(num_tokens):
        least, start = _PAIRS_PER_WINDOW * world_size, ends[-1]
        most = min(max(least, start // 8), max(least, _MOST_PAIRS_PER_WINDOW))
        sums = num_tokens[start : start + most].cumsum()
        size = max(least, int(np.searchsorted(sums, _MOST_TOKENS_PER_WINDOW)))
        ends.append(start + min(size, len(sums)))
    return ends[1:]


def _missing(
    dataset: PairDataset, cache: ReferenceCache, indices: NDArray[np.int64], ranks: Ranks
) -> NDArray[np.int64]:
    """Those of the pairs that any rank's cache lacks: its folder may be a node's own."""
    own = indices[cache.rows(dataset.content_hashes.array[indices]) < 0]
    return np.unique(np.concatenate(ranks.gather(own)))


@torch.no_grad()
def sum_over_batches(
    batches: DataLoader[StepPairs], run: Callable[[StepPairs], StepResult]
) -> MetricSums:
    """Metrics of all pairs of an evaluation, each weighing the same, with a bar that moves."""
    sums: MetricSums | None = None
    with new_progress("evaluation") as progress:
        task = progress.add_task("", total=len(batches))
        for batch in batches:
            metrics = run(batch).metrics
            sums = metrics if sums is None else sums + metrics
            progress.advance(task)
    assert sums is not None, "preparation refuses an empty data set"
    return sums


@torch.no_grad()
def _score_pack(
    dataset: PairDataset, indices: list[int], forward: Callable[[PackLayout], Tensor]
) -> dict[int, ResponseLogprobs]:
    """Log-probabilities of some pairs; of none, the model runs on one token all the same."""
    if not indices:
        forward(build_idle_layout(dataset[0].tokens))
        return {}
    layout = build_layout([dataset[i].tokens for i in indices])
    logprobs_R = forward(layout).float().cpu().numpy()
    ends = np.cumsum(dataset.lengths[indices][:, 1:].reshape(-1))
    parts = np.split(logprobs_R, ends[:-1])
    return {i: (parts[2 * n], parts[2 * n + 1]) for n, i in enumerate(indices)}


def _all_finite(pair: ResponseLogprobs) -> bool:
    return all(bool(np.isfinite(part).all()) for part in pair)
