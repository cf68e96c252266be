"""Draws on pairs, and what is remembered between steps for them.

Every draw is a pure function of (seed, step, pair id, stage) and of what past steps have shown
(:class:`PruningHistory`). It depends on no rank, world size, micro-batch or worker, and a restart
that restores the history makes it again. Shape legend: P pairs, N branches.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdpo_scale.estimator.branches import importance_probabilities
from sdpo_scale.estimator.designs import pivotal, poisson, systematic
from sdpo_scale.estimator.prefixes import draw_levels
from sdpo_scale.estimator.rng import Stage, uniforms
from sdpo_scale.pruning import Pruning

__all__ = ["Observations", "PruningHistory", "StepDraw"]

Floats = NDArray[np.float64]

_WINDOW_STEPS = 16
"""Steps that set the threshold of independent coins: long enough for a stable figure with a few
pairs a step, short beside the hundreds of steps in which coefficients change."""
_FORECAST_WEIGHTS = np.array([0.5, 0.5])
"""Weights of the forecast before and of the latest step: halves the noise of single steps and
follows a trend within a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """What a step saw of its pairs, for the draws of later steps."""

    pair_ids: tuple[int, ...]
    importance_P: Floats
    """float [P], the pair's √Σ (weight_t · norm_t)², without the presample stage's weight."""
    branches: tuple[Floats, Floats]
    """Importance and cost of every scored branch, float [N]."""


@dataclass(kw_only=True)
class PruningHistory:
    """What past steps have shown; all that draws may depend on besides seed, step and pair id."""

    importance: dict[int, float] = field(default_factory=dict)
    """Pair id → w of the pair when its coefficient was last computed."""
    window: deque[tuple[Floats, Floats]] = field(
        default_factory=lambda: deque(maxlen=_WINDOW_STEPS)
    )
    """Importance and cost of the branches of the latest steps."""

    def observe(self, seen: Observations) -> None:
        """Remembers a step."""
        values = seen.importance_P.tolist()
        self.importance.update(zip(seen.pair_ids, values, strict=True))
        self.window.append(seen.branches)

    def branch_scale(self, options: Pruning) -> float:
        """The c of independent coins, from the latest steps alone; infinite before the first.

        Importance shrinks as training goes on, so a threshold in the units of old steps would prune
        more and more. Each step's importance is taken relative to a forecast from the steps before
        it, and c is the least that would have kept the budget over the window with those forecasts:
        their errors are thereby paid for as well.
        """
        if not self.window or options.branches != "importance":
            return np.inf
        relative_N, cost_N, step_N, forecast = self._relative_importance()
        return options.scale(relative_N, cost_N, step_N) / forecast

    def expected_kept(self, options: Pruning) -> float:
        """Share of the tokens that a backward will keep, by the latest steps; 1 if unknown."""
        survival = options.train_prefix_design.survival
        share = sum(survival) / len(survival)
        if options.branches is None:
            return share
        if not self.window:
            return 1.0
        relative_N, cost_N, _, forecast = self._relative_importance()
        scale = self.branch_scale(options) * forecast
        kept_N = options.probabilities(relative_N, cost_N, scale=scale)
        return share * float((kept_N * cost_N).sum() / cost_N.sum())

    def _relative_importance(self) -> tuple[Floats, Floats, NDArray[np.int64], float]:
        """Importance over its step's forecast, cost, step; and the forecast of the next step.

        The forecast is the root mean square, in an exponential average of logarithms over the steps
        before. The first step of the window has none and is left out, unless it is the only one.
        """
        parts = []
        forecast = 0.0
        for importance_N, cost_N in self.window:
            size = float(np.sqrt(np.mean(importance_N**2)))
            if forecast > 0 or len(self.window) == 1:
                parts.append((importance_N / (forecast or size or 1.0), cost_N))
            if size > 0:
                before = forecast or size
                forecast = float(np.exp(np.log([before, size]) @ _FORECAST_WEIGHTS))
        if not parts:  # all steps but the last were without any importance
            parts = [self.window[-1]]
        step_N = np.repeat(np.arange(len(parts)), [len(importance_N) for importance_N, _ in parts])
        relative_N, cost_N = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return relative_N, cost_N, step_N, forecast or 1.0

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Arrays that :meth:`from_state` reads."""
        return {
            "pair_ids": np.array(list(self.importance), dtype=np.int64),
            "pair_importance": np.array(list(self.importance.values()), dtype=np.float64),
            "window_sizes": np.array([len(w) for w, _ in self.window], dtype=np.int64),
            "window": np.concatenate(
                [np.stack(step) for step in self.window] or [np.zeros((2, 0))], axis=1
            ),
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Brings the history to the state that :meth:`state_dict` was taken from."""
        ids, values = state["pair_ids"].tolist(), state["pair_importance"].tolist()
        self.importance = dict(zip(ids, values, strict=True))
        ends = np.cumsum(state["window_sizes"])[:-1]
        steps = np.split(state["window"], ends, axis=1) if len(state["window_sizes"]) else []
        self.window.clear()
        self.window.extend((step[0], step[1]) for step in steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDraw:
    """The chance of one step: what it prunes, what past steps have shown, seed and step number."""

    options: Pruning
    history: PruningHistory
    seed: int
    step: int

    def uniforms(self, count: int, pair_id: int | None, stage: Stage) -> Floats:
        """Float [count]: the numbers of one pair (None: of the whole step) and stage."""
        return uniforms(count, seed=self.seed, step=self.step, pair_id=pair_id, stage=stage)

    def presample(self, pair_ids: Sequence[int], cost_P: Floats) -> Floats:
        """Which pairs are executed: 1/π of those that are, 0 for the others, float [P].

        A pair that was never seen has probability 1. Probabilities are known before the draw, so
        weighting by their inverse is unbiased however old the importance is.
        """
        known = [self.history.importance.get(pair_id) for pair_id in pair_ids]
        if not self.options.presample or all(value is None for value in known):
            return np.ones(len(pair_ids))
        is_known_P = np.array([value is not None for value in known])
        importance_P = np.array([value or 0.0 for value in known])
        probabilities_P = np.ones(len(pair_ids))
        scale = self.options.scale(importance_P[is_known_P], cost_P[is_known_P])
        probabilities_P[is_known_P] = importance_probabilities(
            importance_P[is_known_P],
            cost_P[is_known_P],
            scale=scale,
            floor=self.options.min_probability,
        )
        order_P = self._keys(pair_ids, Stage.PRESAMPLE, per_pair=1)
        start = float(self.uniforms(1, None, Stage.PRESAMPLE)[0])
        kept_P = systematic(probabilities_P, start=start, order_N=order_P)
        return np.where(kept_P, 1 / probabilities_P, 0.0)

    def levels(self, pair_ids: Sequence[int], stage: Stage) -> NDArray[np.int64]:
        """The drawn cut level of each pair, int [P]; ``stage`` is PREFIX or TRAIN_PREFIX."""
        is_prefix = stage is Stage.PREFIX
        design = self.options.prefix_design if is_prefix else self.options.train_prefix_design
        return draw_levels(self._keys(pair_ids, stage, per_pair=1), design)

    def branches(
        self,
        pair_ids: Sequence[int],
        importance_N: Floats,
        cost_N: Floats,
        *,
        is_whole_step: bool,
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Inclusion probabilities and which branches are kept.

        Args:
            pair_ids: pairs, in order; N is P, or 2·P with chosen before rejected.
            importance_N: float [N].
            cost_N: float [N].
            is_whole_step: the branches are all of the step, so that one fixed-size sample is drawn
                with a threshold of their own; else independent coins with the threshold of past
                steps, which do not depend on which pairs share a pack.

        Returns:
            (float [N] probabilities, bool [N] kept).
        """
        keys_N = self._keys(pair_ids, Stage.BRANCH, per_pair=len(importance_N) // len(pair_ids))
        if self.options.branches is None:
            return np.ones(len(importance_N)), np.ones(len(importance_N), dtype=bool)
        if not is_whole_step:
            scale = self.history.branch_scale(self.options)
            probabilities_N = self.options.probabilities(importance_N, cost_N, scale=scale)
            return probabilities_N, poisson(probabilities_N, uniforms_N=keys_N)
        scale = self.options.scale(importance_N, cost_N)
        probabilities_N = self.options.probabilities(importance_N, cost_N, scale=scale)
        if self.options.branch_sampling == "systematic":
            start = float(self.uniforms(1, None, Stage.BRANCH)[0])
            return probabilities_N, systematic(probabilities_N, start=start, order_N=keys_N)
        coins = iter(self.uniforms(len(importance_N), None, Stage.BRANCH).tolist())
        kept_N = pivotal(probabilities_N, decide=lambda p: next(coins) < p, order_N=keys_N)
        return probabilities_N, kept_N

    def _keys(self, pair_ids: Sequence[int], stage: Stage, *, per_pair: int) -> Floats:
        numbers = [self.uniforms(per_pair, pair_id, stage) for pair_id in pair_ids]
        return np.concatenate(numbers) if numbers else np.zeros(0)
