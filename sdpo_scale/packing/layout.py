"""The tensors of one pack: tokens, positions, attention segments and what is scored.

Shape legend: T packed tokens, K gathered keys, S segments, R response positions, P pairs.

A pack is one row without padding. Each pair lies in it as [prompt, chosen, rejected], the prompt
once. One pair of 3 + 2 + 2 tokens (p0 p1 p2, c0 c1, r0 r1):

    row              0    1    2    3    4    5    6
    input_ids_T      p0   p1   p2   c0   c1   r0   r1
    position_ids_T   0    1    2    3    4    3    4      rejected restarts at the prompt's length
    segments         |---- queries 0 --------|  q. 1 |   cu_seqlens_q = [0, 5, 7]
    kv_index_K       0 1 2 3 4   0 1 2 5 6               cu_seqlens_k = [0, 5, 10]
    hidden_index_R   2    3    2    5                    the row whose hidden state predicts ...
    target_ids_R     c0   c1   r0   r1                   ... this token

Segment 0 (prompt + chosen) attends to itself; segment 1 (rejected) attends to prompt + rejected.
Both are causal with the last query aligned to the last key ("bottom-right"):

    keys      p0 p1 p2 r0 r1
    query r0   x  x  x  x  .
    query r1   x  x  x  x  x

The prompt's last row (2) predicts the first token of both responses, so its hidden state is scored
twice.

A response may be empty, where only the other one is wanted. An empty rejected response has no
segment, since varlen kernels need queries in each; without its chosen response a pair still has
the segment of its prompt, and the rejected response its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "PackLayout",
    "RowSelection",
    "TokenTriple",
    "build_idle_layout",
    "build_layout",
    "select_rows",
]

TokenTriple = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""Token ids of a pair's prompt, chosen and rejected response; the prompt has at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLayout:
    """Index tensors of one pack; see the drawing at the head of the module."""

    input_ids_T: Tensor
    """int64 [T], the packed tokens."""
    position_ids_T: Tensor
    """int64 [T], position of each token in its own sequence."""
    cu_seqlens_q: Tensor
    """int32 [S+1], cumulative query lengths, strictly increasing from 0 to T."""
    cu_seqlens_k: Tensor
    """int32 [S+1], cumulative key lengths, strictly increasing from 0 to K."""
    lengths_q: tuple[int, ...]
    """[S] query lengths on the host, so that nobody need wait for a device."""
    lengths_k: tuple[int, ...]
    """[S] key lengths on the host."""
    kv_index_K: Tensor
    """int64 [K], the packed row of each gathered key."""
    hidden_index_R: Tensor
    """int64 [R], the packed row that predicts each response token."""
    target_ids_R: Tensor
    """int64 [R], the response tokens: chosen, then rejected, pair by pair."""
    is_chosen_R: Tensor
    """bool [R], whether it belongs to the chosen response."""
    prompt_length_P: Tensor
    """int64 [P], tokens of the prompt."""
    chosen_length_P: Tensor
    """int64 [P], n⁺."""
    rejected_length_P: Tensor
    """int64 [P], n⁻."""

    @property
    def num_tokens(self) -> int:
        """T, the tokens of the pack."""
        return int(self.input_ids_T.numel())

    @property
    def num_pairs(self) -> int:
        """P, the pairs of the pack."""
        return int(self.chosen_length_P.numel())


def build_layout(pairs: Sequence[TokenTriple]) -> PackLayout:
    """Lays pairs out as one pack, on the CPU.

    Args:
        pairs: token ids (prompt, chosen, rejected) of each pair, each an int32 [n] array; n ≥ 1
            for the prompt and for one of the responses.

    Returns:
        The layout of the pack, in the order of ``pairs``.
    """
    assert pairs, "a pack needs at least one pair"
    assert all(len(pair[0]) > 0 for pair in pairs), "a prompt has at least one token"
    assert all(len(pair[1]) + len(pair[2]) > 0 for pair in pairs), "a pair has a response"
    input_ids, positions, hidden_index, is_chosen = ([] for _ in range(4))
    start = 0
    for prompt, chosen, rejected in pairs:
        n_prompt, n_chosen, n_rejected = len(prompt), len(chosen), len(rejected)
        chosen_start, rejected_start = start + n_prompt, start + n_prompt + n_chosen
        end = rejected_start + n_rejected
        input_ids += [prompt, chosen, rejected]
        positions += [
            np.arange(n_prompt + n_chosen),
            np.arange(n_prompt, n_prompt + n_rejected),
        ]
        # the token before: for a response's first token that is the prompt's last
        hidden_index.append(np.arange(chosen_start - 1, rejected_start - 1))
        if n_rejected:
            hidden_index += [np.array([chosen_start - 1]), np.arange(rejected_start, end - 1)]
        is_chosen += [np.ones(n_chosen, dtype=bool), np.zeros(n_rejected, dtype=bool)]
        start = end
    lengths = [(len(pair[0]), len(pair[1]), len(pair[2])) for pair in pairs]
    lengths_q, lengths_k, kv_index = _segments(lengths)
    return PackLayout(
        input_ids_T=_int64(input_ids),
        position_ids_T=_int64(positions),
        cu_seqlens_q=_cumulative(lengths_q),
        cu_seqlens_k=_cumulative(lengths_k),
        lengths_q=tuple(lengths_q),
        lengths_k=tuple(lengths_k),
        kv_index_K=_int64(kv_index),
        hidden_index_R=_int64(hidden_index),
        target_ids_R=_int64([part for pair in pairs for part in pair[1:]]),
        is_chosen_R=torch.from_numpy(np.concatenate(is_chosen)),
        prompt_length_P=torch.tensor([len(pair[0]) for pair in pairs]),
        chosen_length_P=torch.tensor([len(pair[1]) for pair in pairs]),
        rejected_length_P=torch.tensor([len(pair[2]) for pair in pairs]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """Rows of a pack that are kept, and the segments that they form as a pack of their own.

    Of the pair drawn at the head of the module, with one token of each response kept:

        rows_T           0    1    2    3    5               p0 p1 p2 c0 r0
        cu_seqlens_q     [0, 4, 5]
        cu_seqlens_k     [0, 4, 8]
        kv_index_K       0 1 2 3   0 1 2 4                   where keys lie among the kept rows
    """

    rows_T: Tensor
    """int64 [T'], rows of the pack in ascending order, at least one."""
    cu_seqlens_q: Tensor
    """int32 [S'+1], cumulative query lengths, strictly increasing from 0 to T'."""
    cu_seqlens_k: Tensor
    """int32 [S'+1], cumulative key lengths, strictly increasing from 0 to K'."""
    lengths_q: tuple[int, ...]
    """[S'] query lengths on the host."""
    lengths_k: tuple[int, ...]
    """[S'] key lengths on the host."""
    kv_index_K: Tensor
    """int64 [K'], indices into the kept rows, not into the pack."""


def build_idle_layout(pair: TokenTriple) -> PackLayout:
    """The smallest pack: what a rank executes while others have work and it has none.

    Sharded modules need the same collectives from every rank, and both backends fail on 0 tokens.
    """
    prompt, chosen, rejected = pair
    return build_layout([(prompt[:1], chosen[:1], rejected[: int(len(chosen) == 0)])])


def select_rows(layout: PackLayout, kept: Sequence[tuple[int, int]]) -> RowSelection:
    """The rows of a pack that remain when each response is cut to a prefix.

    A union of prompts and of prefixes of responses is closed under causal attention: a kept row
    attends to kept rows only, at every layer, so it has the same hidden state and the same gradient
    whether the other rows are there or not.

    Args:
        layout: the pack.
        kept: (leading chosen tokens, leading rejected tokens) of each pair [P]; (0, 0) drops the
            pair with its prompt.

    Returns:
        The selection. If every pair is dropped it is the pack's first row alone, a segment of its
        own: FSDP's and ZeRO's collectives must match between ranks, and every parameter is to have
        a gradient, be it 0, so a backward always has a row to run on.
    """
    assert len(kept) == layout.num_pairs, "one entry for each pair of the pack"
    rows, lengths = [], []
    start = 0
    sizes = zip(
        layout.prompt_length_P.tolist(),
        layout.chosen_length_P.tolist(),
        layout.rejected_length_P.tolist(),
        kept,
        strict=True,
    )
    for n_prompt, n_chosen, n_rejected, (chosen, rejected) in sizes:
        assert 0 <= chosen <= n_chosen, "a prefix is no longer than its response"
        assert 0 <= rejected <= n_rejected, "a prefix is no longer than its response"
        rejected_start = start + n_prompt + n_chosen
        if chosen or rejected:
            rows += [
                np.arange(start, start + n_prompt + chosen),
                np.arange(rejected_start, rejected_start + rejected),
            ]
            lengths.append((n_prompt, chosen, rejected))
        start = rejected_start + n_rejected
    if not rows:
        rows, lengths = [np.zeros(1, dtype=np.int64)], [(1, 0, 0)]
    lengths_q, lengths_k, kv_index = _segments(lengths)
    return RowSelection(
        rows_T=_int64(rows),
        cu_seqlens_q=_cumulative(lengths_q),
        cu_seqlens_k=_cumulative(lengths_k),
        lengths_q=tuple(lengths_q),
        lengths_k=tuple(lengths_k),
        kv_index_K=_int64(kv_index),
    )


def _segments(
    lengths: Sequence[tuple[int, int, int]],
) -> tuple[list[int], list[int], list[NDArray[np.int64]]]:
    """Query lengths, key lengths and key rows of pairs of (prompt, chosen, rejected) tokens."""
    lengths_q: list[int] = []
    lengths_k: list[int] = []
    kv_index: list[NDArray[np.int64]] = []
    start = 0
    for n_prompt, n_chosen, n_rejected in lengths:
        rejected_start = start + n_prompt + n_chosen
        lengths_q.append(n_prompt + n_chosen)
        lengths_k.append(n_prompt + n_chosen)
        kv_index.append(np.arange(start, rejected_start))
        if n_rejected:  # a segment without queries must not arise
            lengths_q.append(n_rejected)
            lengths_k.append(n_prompt + n_rejected)
            kv_index += [
                np.arange(start, start + n_prompt),
                np.arange(rejected_start, rejected_start + n_rejected),
            ]
        start = rejected_start + n_rejected
    return lengths_q, lengths_k, kv_index


def _int64(parts: Sequence[NDArray[np.int32] | NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
