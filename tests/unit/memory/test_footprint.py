"""Bytes by category, against sums done by hand."""

import pytest

from sdpo_scale.memory.footprint import (
    OPTIMIZER_BYTES,
    SHARDINGS,
    Footprint,
    Line,
    States,
    footprint,
    grown,
)

N, RANKS, LAYERS = 1_000_000, 4, 10
WORKING = (Line(100.0, 10.0), Line(190.0, 2.0))  # at 10 layers 200 and 210


def predict(sharding: str, **changes: object) -> Footprint:
    settings = {"num_parameters": N, "num_layers": LAYERS, "working": WORKING, "on_device": False}
    return footprint(**{**settings, "sharding": sharding, "world_size": RANKS, **changes})


@pytest.mark.parametrize(
    ("sharding", "parameters", "gradients", "optimizer"),
    [
        ("none", 1, 1, 1),
        ("DDP", 1, 1, 1),
        ("ZeRO-1", 1, 1, RANKS),
        ("ZeRO-2", 1, RANKS, RANKS),
        ("ZeRO-3", RANKS, RANKS, RANKS),
        ("FSDP2", RANKS, RANKS, RANKS),
    ],
)
def test_each_kind_of_sharding_divides_what_it_shards(
    sharding: str, parameters: int, gradients: int, optimizer: int
):
    parts = predict(sharding)
    assert parts.parameters == 4 * N / parameters
    assert parts.gradients == 4 * N / gradients
    assert parts.optimizer == 8 * N / optimizer
    assert parts.total == sum(parts.to_dict().values())


def test_every_kind_of_sharding_is_named():
    assert {predict(kind).parameters for kind in SHARDINGS} == {4.0 * N, 4.0 * N / RANKS}
    with pytest.raises(ValueError, match="'FSDP1' is unknown; choose one of none, DDP"):
        predict("FSDP1")


def test_the_highest_phase_counts_at_each_depth():
    for layers, working, stored in ((10, 190.0, 20.0), (20, 100.0, 200.0)):
        parts = predict("none", num_layers=layers)
        assert (parts.working, parts.stored_activations) == (working, stored)


@pytest.mark.parametrize("optimizer", OPTIMIZER_BYTES)
def test_optimizer_state_is_of_trained_parameters(optimizer: str):
    parts = predict("FSDP2", num_trained=1000, states=States(optimizer=optimizer))
    assert parts.optimizer == OPTIMIZER_BYTES[optimizer] * 1000 / RANKS
    assert parts.gradients == 4 * 1000 / RANKS
    assert parts.parameters == 4 * N / RANKS


def test_16_bit_parameters_have_float32_copies_under_deepspeed_only():
    states = States(parameter_bytes=2, gradient_bytes=2)
    assert predict("ZeRO-2", states=states).master_weights == 4 * N / RANKS
    assert predict("FSDP2", states=states).master_weights == 0
    assert predict("ZeRO-2", states=states).parameters == 2 * N


def test_what_is_offloaded_is_not_on_the_device():
    states = States(parameter_bytes=2, offload_optimizer=True, offload_parameters=True)
    parts = predict("ZeRO-3", states=states)
    assert (parts.parameters, parts.optimizer, parts.master_weights) == (0, 0, 0)
    assert parts.gradients > 0


def test_buckets_of_ddp_hold_every_gradient():
    assert predict("DDP").buckets == 4 * N
    assert predict("FSDP2").buckets == 0
    assert predict("ZeRO-3").buckets == 2 * N * 4  # a model smaller than a bucket


def test_context_and_reserve_are_stated_on_a_device_only():
    here, there = predict("none"), predict("none", on_device=True)
    assert (here.context, here.reserve) == (0, 0)
    assert there.reserve == pytest.approx(0.05 * here.total)
    assert there.total == pytest.approx(1.05 * here.total + there.context)


def test_lines_pass_through_two_depths_and_two_sizes():
    line = Line.through((3, 4), (130.0, 140.0))
    assert (line.working, line.stored, line.at(80)) == (100.0, 10.0, 900.0)
    (found,) = grown((Line(10.0, 1.0),), (Line(30.0, 2.0),), tokens=(100, 200), to=400)
    assert (found.working, found.stored) == (70.0, 4.0)


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="'lion' is unknown; choose one of adamw"):
        States(optimizer="lion")
