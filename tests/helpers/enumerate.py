"""Every outcome of a program that makes random choices, each with its probability."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import sdpo_scale.draws
import sdpo_scale.weighting
from sdpo_scale.draws import StepDraw
from sdpo_scale.estimator.designs import pivotal, poisson, systematic
from sdpo_scale.estimator.positions import position_probabilities
from sdpo_scale.estimator.prefixes import draw_levels

Choose = Callable[[Sequence[float]], int]


def outcomes(run: Callable[[Choose], Any]) -> Iterator[tuple[float, Any]]:
    """Runs a program once per outcome.

    The program asks `choose(probabilities)` for the index of an outcome; it is run again and again
    with answers replayed up to the last choice that has an outcome left. Outcomes of probability 0
    are left out.
    """
    script: list[int] = []
    while True:
        path: list[tuple[int, Sequence[float]]] = []
        result = run(partial(_choose, script, path))
        yield float(np.prod([p[taken] for taken, p in path])), result
        while path and _next(path[-1][1], path[-1][0] + 1) < 0:
            path.pop()
        if not path:
            return
        taken, probabilities = path[-1]
        script = [*(index for index, _ in path[:-1]), _next(probabilities, taken + 1)]


def _choose(
    script: Sequence[int], path: list[tuple[int, Sequence[float]]], probabilities: Sequence[float]
) -> int:
    """The scripted index, or the first possible one beyond the script; remembers the choice."""
    depth = len(path)
    taken = script[depth] if depth < len(script) else _next(probabilities, 0)
    path.append((taken, probabilities))
    return taken


def _next(probabilities: Sequence[float], start: int) -> int:
    """The first index from `start` on with a positive probability; −1 if there is none."""
    return next((k for k in range(start, len(probabilities)) if probabilities[k] > 0), -1)


def expectation(run: Callable[[Choose], dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """Σ probability · result over all outcomes, and how many there were."""
    total: dict[str, Any] = {}
    mass, count = 0.0, 0
    for probability, result in outcomes(run):
        for name, value in result.items():
            total[name] = total.get(name, 0.0) + probability * value
        mass, count = mass + probability, count + 1
    assert mass == pytest.approx(1.0, abs=1e-12)
    return total, count


def script_draws(monkeypatch: pytest.MonkeyPatch, choose: Choose) -> None:
    """Every random number of a step now comes from `choose`.

    The package's own decisions still run, on numbers in the middle of the interval that leads to
    the chosen outcome; the probability of an outcome is the length of that interval, and what the
    package believes it to be is not asked.
    """

    def levels(uniforms_P: Any, design: Any) -> Any:
        # u < S_k: level k is drawn where u lies in [S_{k+1}, S_k)
        edges = [*design.survival, 0.0]
        lengths = [edges[k] - edges[k + 1] for k in range(len(edges) - 1)]
        middles = [(edges[k] + edges[k + 1]) / 2 for k in range(len(edges) - 1)]
        return draw_levels(np.array([middles[choose(lengths)] for _ in uniforms_P]), design)

    def coins(probabilities_N: Any, *, uniforms_N: Any) -> Any:
        return poisson(probabilities_N, uniforms_N=_coins(probabilities_N, choose))

    def line(probabilities_N: Any, *, start: float, order_N: Any) -> Any:
        # the sample changes only where start meets the end of an interval on the line
        order = np.argsort(order_N, kind="stable")
        ends = np.cumsum(np.where(probabilities_N < 1, probabilities_N, 0.0)[order]) % 1.0
        edges = np.unique(np.concatenate([[0.0], ends, [1.0]]))
        # ends that are equal but for rounding leave no piece between them
        edges = edges[np.append(np.diff(edges) > 1e-13, True)]
        piece = choose(np.diff(edges).tolist())
        middle = float(edges[piece] + edges[piece + 1]) / 2
        return systematic(probabilities_N, start=middle, order_N=order_N)

    def duels(probabilities_N: Any, *, decide: Any, order_N: Any) -> Any:
        return pivotal(probabilities_N, decide=lambda p: choose([p, 1 - p]) == 0, order_N=order_N)

    probabilities: list[Any] = []

    def of_positions(*args: Any, **kwargs: Any) -> Any:
        probabilities.append(position_probabilities(*args, **kwargs))
        return probabilities[-1]

    original = StepDraw.uniforms

    def uniforms(self: StepDraw, count: int, pair_id: Any, stage: Any) -> Any:
        if stage is not sdpo_scale.draws.Stage.POSITION:
            return original(self, count, pair_id, stage)
        # asked for pair by pair after the probabilities of the pack are known
        known = probabilities[-1].numpy()
        probabilities[-1] = probabilities[-1][count:]
        return _coins(known[:count], choose)

    monkeypatch.setattr(sdpo_scale.draws, "draw_levels", levels)
    monkeypatch.setattr(sdpo_scale.draws, "poisson", coins)
    monkeypatch.setattr(sdpo_scale.draws, "systematic", line)
    monkeypatch.setattr(sdpo_scale.draws, "pivotal", duels)
    monkeypatch.setattr(sdpo_scale.weighting, "position_probabilities", of_positions)
    monkeypatch.setattr(StepDraw, "uniforms", uniforms)


def _coins(probabilities: Any, choose: Choose) -> Any:
    """A number under each probability, or above it, as chosen."""
    numbers = []
    for p in map(float, probabilities):
        keeps = choose([p, 1 - p]) == 0
        numbers.append(p / 2 if keeps else (1 + p) / 2)
    return np.array(numbers)
