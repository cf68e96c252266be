"""Draws are functions of seed, step, pair and history; the history survives a restart."""

import io

import numpy as np
import pytest

from sdpo_scale.draws import Observations, PruningHistory, StepDraw
from sdpo_scale.estimator.branches import variance_inflation
from sdpo_scale.estimator.rng import Stage
from sdpo_scale.pruning import Pruning

BRANCHES = {"branches": "importance", "keep_fraction": 0.5}


def draw(history=None, *, seed=0, step=0, **options):
    return StepDraw(
        options=Pruning(**options), history=history or PruningHistory(), seed=seed, step=step
    )


def observed(*steps, first_id=0):
    history = PruningHistory()
    for importance in steps:
        values = np.array(importance, dtype=float)
        ids = tuple(range(first_id, first_id + len(values)))
        cost = np.full(len(values), 100.0)
        history.observe(Observations(pair_ids=ids, importance_P=values, branches=(values, cost)))
    return history


def test_levels_and_coins_of_a_pair_do_not_depend_on_the_others():
    history = observed([1.0, 2.0, 3.0])
    pruning = {"prefix": "geometric", **BRANCHES}
    whole, part = draw(history, **pruning), draw(history, **pruning)
    ids, importance, cost = [4, 9, 1, 7], np.array([1.0, 4.0, 2.0, 0.5]), np.full(4, 80.0)
    levels = whole.levels(ids, Stage.PREFIX)
    _, kept = whole.branches(ids, importance, cost, is_whole_step=False)
    for k, pair_id in enumerate(ids):
        assert part.levels([pair_id], Stage.PREFIX)[0] == levels[k]
        one = slice(k, k + 1)
        found = part.branches([pair_id], importance[one], cost[one], is_whole_step=False)
        assert found[1][0] == kept[k]


def test_coins_of_a_pairs_responses_do_not_depend_on_the_other_pairs():
    history = observed([1.0, 2.0, 3.0])
    one = draw(history, branch_unit="response", **BRANCHES)
    ids = list(range(40))
    importance, cost = np.random.default_rng(0).lognormal(0, 2, 80), np.full(80, 80.0)
    _, kept = one.branches(ids, importance, cost, is_whole_step=False)
    assert (kept[::2] != kept[1::2]).any()  # chosen and rejected have coins of their own
    for pair_id in ids:
        two = slice(2 * pair_id, 2 * pair_id + 2)
        found = one.branches([pair_id], importance[two], cost[two], is_whole_step=False)
        assert found[1].tolist() == kept[two].tolist()


def test_presampled_pairs_do_not_depend_on_the_order_of_the_step():
    history = observed(np.random.default_rng(0).lognormal(size=20))
    one = draw(history, presample=True, keep_fraction=0.5)
    order, cost = np.random.default_rng(1).permutation(20), np.arange(20) + 10.0
    weights = one.presample(list(range(20)), cost)
    # probabilities come from sums over the step, in its order
    again = one.presample(order.tolist(), cost[order])
    assert again == pytest.approx(weights[order], rel=1e-9)
    assert 0 < (weights > 0).sum() < 20


def test_without_a_branch_stage_all_are_kept():
    probabilities, kept = draw().branches([1, 2], np.ones(2), np.ones(2), is_whole_step=True)
    assert (probabilities.tolist(), kept.tolist()) == ([1.0, 1.0], [True, True])


@pytest.mark.parametrize("sampling", ["systematic", "pivotal"])
def test_a_draw_over_the_step_does_not_depend_on_the_order_of_its_pairs(sampling):
    one = draw(branch_sampling=sampling, **BRANCHES)
    ids, importance = np.arange(20), np.random.default_rng(0).lognormal(size=20)
    order = np.random.default_rng(1).permutation(20)
    _, kept = one.branches(list(ids), importance, np.full(20, 9.0), is_whole_step=True)
    _, again = one.branches(
        list(ids[order]), importance[order], np.full(20, 9.0), is_whole_step=True
    )
    assert again.tolist() == kept[order].tolist()
    assert kept.sum() in (10, 11)


def test_seed_and_step_change_draws():
    ids = list(range(200))
    levels = draw(prefix="geometric").levels(ids, Stage.PREFIX)
    for other in (draw(prefix="geometric", seed=1), draw(prefix="geometric", step=1)):
        assert (other.levels(ids, Stage.PREFIX) != levels).mean() > 0.2
    assert (draw(prefix="geometric").levels(ids, Stage.PREFIX) == levels).all()


def test_pairs_that_were_never_seen_are_executed():
    history = observed([0.1, 3.0, 1.0])
    weights = draw(history, presample=True, keep_fraction=0.3).presample(
        [0, 50, 1, 51, 2], np.full(5, 100.0)
    )
    assert weights[[1, 3]].tolist() == [1.0, 1.0]
    assert draw(presample=True, keep_fraction=0.3).presample([0, 1], np.ones(2)).tolist() == [1, 1]


def test_the_floor_bounds_the_weights_of_presampled_pairs():
    history = observed(np.r_[[100.0], np.full(99, 1e-6)])
    weights = np.concatenate(
        [
            draw(
                history, step=k, presample=True, keep_fraction=0.01, min_probability=0.05
            ).presample(list(range(100)), np.full(100, 10.0))
            for k in range(5)
        ]
    )
    assert weights.max() == pytest.approx(20)
    assert (weights == 0).mean() == pytest.approx(0.95, abs=0.01)


def test_no_pair_is_left_out_where_presampling_is_off():
    assert draw(observed([1.0, 2.0])).presample([0, 1], np.ones(2)).tolist() == [1, 1]


def test_a_pair_is_worth_what_it_was_when_last_seen():
    history = observed([1.0, 2.0], [3.0])
    assert history.importance == {0: 3.0, 1: 2.0}


def test_the_threshold_depends_on_the_latest_16_steps_alone():
    rng = np.random.default_rng(0)
    steps = rng.lognormal(0, 1, (16, 8))
    options = Pruning(**BRANCHES)
    expected = observed(*steps).branch_scale(options)
    assert observed(*(100 * rng.random((5, 8))), *steps).branch_scale(options) == expected
    assert observed(*steps[1:]).branch_scale(options) != expected
    assert len(observed(*steps, *steps).window) == 16


def test_before_the_first_step_everything_is_kept():
    probabilities, kept = draw(**BRANCHES).branches(
        [1, 2], np.array([0.1, 5.0]), np.ones(2), is_whole_step=False
    )
    assert probabilities.tolist() == [1.0, 1.0]
    assert kept.all()


def test_the_threshold_follows_importance_that_shrinks():
    rng = np.random.default_rng(0)
    shapes = rng.lognormal(0, 0.8, (30, 16))
    history = PruningHistory()
    options = Pruning(branches="importance", variance_inflation=1.3)
    inflations = []
    for k, shape in enumerate(shapes):
        importance = shape * 0.8**k  # each step's gradients are smaller than the one's before
        if k > 4:
            scale = history.branch_scale(options)
            probabilities = options.probabilities(importance, np.full(16, 100.0), scale=scale)
            inflations.append(variance_inflation(importance, probabilities))
        ids = tuple(range(16))
        history.observe(
            Observations(
                pair_ids=ids, importance_P=importance, branches=(importance, np.full(16, 100.0))
            )
        )
    assert np.mean(inflations) == pytest.approx(1.3, abs=0.1)


def test_the_history_survives_being_saved():
    history = observed([1.0, 2.0], [0.5, 4.0, 3.0])
    file = io.BytesIO()
    np.savez(file, **history.state_dict())
    file.seek(0)
    restored = PruningHistory()
    restored.load_state_dict(np.load(file))
    assert restored.importance == history.importance
    options = Pruning(**BRANCHES)
    assert restored.branch_scale(options) == history.branch_scale(options)
    assert restored.window.maxlen == history.window.maxlen
    for found, expected in zip(restored.window, history.window, strict=True):
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]


def test_a_state_replaces_what_was_remembered():
    restored = observed([7.0, 8.0, 9.0], [7.0], first_id=50)
    restored.load_state_dict(observed([1.0]).state_dict())
    assert restored.importance == {0: 1.0}
    assert len(restored.window) == 1


def test_an_empty_history_survives_as_well():
    restored = PruningHistory()
    restored.load_state_dict(PruningHistory().state_dict())
    assert (len(restored.importance), len(restored.window)) == (0, 0)


def test_steps_without_any_importance_are_no_division_by_zero():
    history = observed([0.0, 0.0], [1.0, 2.0], [0.0, 0.0])
    options = Pruning(**BRANCHES)
    assert history.branch_scale(options) > 0
    assert 0 < history.expected_kept(options) <= 1


def test_what_a_backward_will_keep_is_expected_from_the_window():
    history = observed(np.ones(8))
    assert history.expected_kept(Pruning(**BRANCHES)) == pytest.approx(0.5)
    assert PruningHistory().expected_kept(Pruning(**BRANCHES)) == 1
    cut = Pruning(train_prefix=(1.0, 0.5))
    assert history.expected_kept(cut) == pytest.approx(0.75)
    both = Pruning(**BRANCHES, train_prefix=(1.0, 0.5))
    assert history.expected_kept(both) == pytest.approx(0.5 * 0.75)
    uniform = Pruning(branches="uniform", keep_fraction=0.3)
    assert history.expected_kept(uniform) == pytest.approx(0.3)
