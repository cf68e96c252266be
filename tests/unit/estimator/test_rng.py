"""Counter-based uniforms: a pure function of the address, and uniform."""

import inspect
import math

import numpy as np
import pytest

from sdpo_scale.estimator.rng import Stage, uniforms

WORD = 2**64
ADDRESS = {"seed": 7, "step": 3, "pair_id": 11, "stage": Stage.BRANCH}
FALSE_ALARM = 1e-6
"""Of each uniformity check, had its numbers been drawn afresh; they are fixed, so it passes or
fails for ever."""


def philox_4x64(counter: int, key: int) -> list[int]:
    """Salmon et al. 2011, ten rounds, in integers of any size; independent of NumPy."""
    c = [counter >> 64 * k & WORD - 1 for k in range(4)]
    k = [key & WORD - 1, key >> 64]
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2E7470EE14C6C93, WORD)
        high1, low1 = divmod(c[2] * 0xCA5A826395121157, WORD)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B97F4A7C15) % WORD, (k[1] + 0xBB67AE8584CAA73B) % WORD]
    return c


def kolmogorov_smirnov(numbers: np.ndarray) -> float:
    """sup |F̂(u) − u|, the distance of the empirical distribution from the uniform one."""
    ranks = np.arange(len(numbers) + 1) / len(numbers)
    ordered = np.sort(numbers)
    return max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max())


def is_uniform(numbers: np.ndarray) -> bool:
    """Massart 1990: P(sup |F̂ − F| > ε) ≤ 2 exp(−2nε²), for every n."""
    return kolmogorov_smirnov(numbers) <= math.sqrt(math.log(2 / FALSE_ALARM) / (2 * len(numbers)))


def first_numbers(count: int, **varied) -> np.ndarray:
    """The first number at each of ``count`` addresses that differ in one part."""
    ((name, part),) = varied.items()
    return np.array([uniforms(1, **(ADDRESS | {name: part(i)}))[0] for i in range(count)])


def test_the_reference_philox_agrees_with_the_published_vectors():
    """Random123's known answers, of the paper's authors."""
    assert philox_4x64(0, 0) == [
        0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B,
    ]  # fmt: skip
    assert philox_4x64(WORD**4 - 1, WORD**2 - 1) == [
        0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0,
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 7, -1, 2**64 + 5, -(2**127), 2**200 + 9])
@pytest.mark.parametrize("pair_id", [0, 11, WORD - 2, None])
def test_numbers_are_philox_of_seed_and_address(seed: int, pair_id: int | None):
    """Pins every number: a run can be repeated with any later version."""
    pair_word = WORD - 1 if pair_id is None else pair_id
    words: list[int] = []
    for block in (1, 2):
        counter = block + Stage.POSITION * WORD + 2**40 * WORD**2 + pair_word * WORD**3
        words += philox_4x64(counter, seed % WORD**2)
    expected = [(word >> 11) / 2**53 for word in words]
    numbers = uniforms(8, seed=seed, step=2**40, pair_id=pair_id, stage=Stage.POSITION)
    assert numbers.dtype == np.float64
    assert numbers.tolist() == expected


def test_no_argument_has_a_default():
    """A forgotten part of the address would silently reuse another draw's numbers."""
    parameters = inspect.signature(uniforms).parameters.values()
    assert all(parameter.default is inspect.Parameter.empty for parameter in parameters)


def test_asking_for_fewer_numbers_gives_the_first_ones():
    numbers = uniforms(9, **ADDRESS)
    for count in range(10):
        assert uniforms(count, **ADDRESS).tolist() == numbers[:count].tolist()


def test_calls_in_between_change_nothing():
    before = uniforms(4, **ADDRESS)
    uniforms(100, **(ADDRESS | {"step": 4}))
    np.random.default_rng().random(3)
    np.random.seed(5)
    assert uniforms(4, **ADDRESS).tolist() == before.tolist()


def test_every_part_of_the_address_changes_the_numbers():
    numbers = {
        uniforms(1, seed=seed, step=step, pair_id=pair_id, stage=stage)[0]
        for seed in (-2, -1, 0, 1, 2**63, 2**64, 2**100)
        for step in (0, 1, 2, 3, 2**40)
        for pair_id in (None, 0, 1, 2, 3, WORD - 2)
        for stage in Stage
    }
    assert len(numbers) == 7 * 5 * 6 * len(Stage)


def test_stage_values_are_frozen():
    assert [stage.value for stage in Stage] == list(range(5))


def test_numbers_are_at_least_0_and_below_1():
    numbers = uniforms(100_000, **ADDRESS)
    assert ((numbers >= 0) & (numbers < 1)).all()


@pytest.mark.parametrize("pair_id", [0, 11, None])
def test_one_long_stream_is_uniform(pair_id: int | None):
    assert is_uniform(uniforms(100_000, **(ADDRESS | {"pair_id": pair_id})))


@pytest.mark.parametrize("part", ["seed", "step", "pair_id"])
def test_first_numbers_of_many_streams_are_uniform_and_neighbours_unrelated(part: str):
    """The use in a step: one number from each of many streams with consecutive addresses."""
    numbers = first_numbers(4000, **{part: lambda i: i})
    assert is_uniform(numbers)
    # The sum modulo 1 of two independent uniforms is uniform; equal or opposite ones fail.
    assert is_uniform((numbers[::2] + numbers[1::2]) % 1)


def test_stages_of_one_pair_are_unrelated():
    streams = [uniforms(20_000, **(ADDRESS | {"stage": stage})) for stage in Stage]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert is_uniform((one + other) % 1)


def test_the_check_sees_numbers_that_are_not_uniform():
    numbers = uniforms(4000, **ADDRESS)
    assert not is_uniform(numbers**1.2)
    assert not is_uniform((numbers + numbers) % 1 * 0.9)
    assert not is_uniform((numbers + (1 - numbers)) % 1)


@pytest.mark.parametrize(
    "wrong",
    [{"step": -1}, {"step": WORD}, {"pair_id": -1}, {"pair_id": WORD - 1}],
    ids=lambda wrong: str(*wrong),
)
def test_addresses_out_of_range_are_refused(wrong: dict):
    with pytest.raises(AssertionError):
        uniforms(1, **(ADDRESS | wrong))


def test_a_negative_count_is_refused():
    with pytest.raises(AssertionError):
        uniforms(-1, **ADDRESS)
