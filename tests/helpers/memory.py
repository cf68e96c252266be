"""Peaks of micro-batches: predicted from shallow models, and followed by torch on real tensors."""

from typing import Any

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import PreTrainedConfig

from sdpo_scale.memory.footprint import Line, Working, footprint
from sdpo_scale.memory.simulation import (
    Execution,
    PackShape,
    prepared_micro_batch,
    simulate_peaks,
    with_depth,
)
from sdpo_scale.modeling.loading import empty_model

DEPTHS = (3, 4)


def lines_of(config: PreTrainedConfig, pack: PackShape, execution: Execution) -> Working:
    """Lines in depth, by phase."""
    low, high = (simulate_peaks(with_depth(config, depth), pack, execution) for depth in DEPTHS)
    return tuple(Line.through(DEPTHS, pair) for pair in zip(low, high, strict=True))


def predicted_bytes(config: PreTrainedConfig, working: Working, execution: Execution) -> float:
    """The model's peak of a rank that trains with AdamW, without what only devices have."""
    parameters = {id(p): p.numel() for p in empty_model(config).parameters()}
    return footprint(
        num_parameters=sum(parameters.values()),
        num_layers=config.num_hidden_layers,
        working=working,
        sharding="FSDP2" if execution.num_shards > 1 else "none",
        world_size=execution.num_shards,
        on_device=False,
    ).total


def tracked_bytes(config: PreTrainedConfig, pack: PackShape, execution: Execution) -> int:
    """Peak of a second micro-batch, as torch's tracker for this sharding counts it."""
    is_sharded = execution.num_shards > 1
    with prepared_micro_batch(config, pack, execution, is_fake=False) as (model, micro_batch):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def step() -> None:
            micro_batch()
            optimizer.step()
            optimizer.zero_grad()

        if is_sharded:
            tracker: Any = FSDPMemTracker(model, optimizer)
        else:
            step()
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
        with tracker:
            if is_sharded:  # it learns the shards in the first step; the peak is the second one's
                step()
                tracker.reset_mod_stats()
                now = tracker._peak_mem_snap = tracker.get_tracker_snapshot()
                tracker._peak_mem = {device: parts["Total"] for device, parts in now.items()}
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            micro_batch()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
