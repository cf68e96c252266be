"""The step's loss and gradient do not depend on how its pairs are packed."""

import numpy as np
import pytest
import torch

from sdpo_scale.data.reference import NonFiniteError
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.objectives import OBJECTIVES
from sdpo_scale.step import StepOptions, run_step
from tests.helpers.gradients import gradients, relative_error
from tests.helpers.oracle import dpo_loss, log_ratio_sum, response_logprobs
from tests.helpers.pairs import random_pairs
from tests.helpers.tiny_models import build
from tests.helpers.tolerances import FLOAT32_STEP_INVARIANCE, FLOAT64_ENUMERATION

BETA = 0.3


def options(loss_type="sigmoid", max_tokens=10_000, smoothing=0.0):
    return StepOptions(
        objective=OBJECTIVES[loss_type],
        beta=BETA,
        label_smoothing=smoothing,
        max_tokens=max_tokens,
        with_statistics=True,
    )


def reference_logprobs(model, pairs):
    def score(prompt, response):
        with torch.no_grad():
            return response_logprobs(model, prompt.tolist(), response.tolist()).numpy()

    return [(score(p.prompt_ids, p.chosen_ids), score(p.prompt_ids, p.rejected_ids)) for p in pairs]


def step(model, pairs, reference, **kwargs):
    result = run_step(
        pairs,
        reference,
        options=options(**kwargs),
        forward=lambda layout, is_last, **kwargs: model(pack=layout, **kwargs),
        backward=lambda loss, _is_last: loss.backward(),
    )
    return result, gradients(model)


@pytest.fixture
def pairs():
    return random_pairs(7)


@pytest.fixture
def reference(pairs):
    return reference_logprobs(build("llama", seed=1, dtype=torch.float64), pairs)


@pytest.mark.parametrize("loss_type", [name for name in OBJECTIVES if name != "sft"])
def test_the_steps_gradient_is_that_of_the_mean_loss_in_float64(loss_type, pairs):
    smoothing = 0.1 if OBJECTIVES[loss_type].takes_label_smoothing else 0.0
    model = build("llama", dtype=torch.float64)
    other = build("llama", seed=1, dtype=torch.float64)
    losses = [
        dpo_loss(
            loss_type,
            log_ratio_sum(model, other, p.prompt_ids.tolist(), p.chosen_ids.tolist()),
            log_ratio_sum(model, other, p.prompt_ids.tolist(), p.rejected_ids.tolist()),
            beta=BETA,
            label_smoothing=smoothing,
            lengths=(len(p.chosen_ids), len(p.rejected_ids)),
        )
        for p in pairs
    ]
    expected_loss = torch.stack(losses).mean()
    expected_loss.backward()
    expected = gradients(model)
    reference = reference_logprobs(other, pairs)
    bind_logprob_forward(model, backend="sdpa")
    result, found = step(
        model, pairs, reference, loss_type=loss_type, max_tokens=100, smoothing=smoothing
    )
    assert result.num_micro_batches > 1
    assert result.metrics.loss == pytest.approx(expected_loss.item(), rel=FLOAT64_ENUMERATION)
    # log-ratios are differences of log-probabilities near −10, so they carry a digit less
    assert relative_error(found, expected) < 10 * FLOAT64_ENUMERATION


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_same_gradient_for_one_pair_three_pairs_and_all_pairs_a_pack(dtype, pairs, reference):
    model = build("llama", dtype=dtype)
    bind_logprob_forward(model, backend="sdpa")
    sizes = sorted(sum(map(len, pair.tokens)) for pair in pairs)
    budgets = {"one": sizes[-1], "three": sum(sizes[-3:]), "all": sum(sizes)}
    results = {n: step(model, pairs, reference, max_tokens=b) for n, b in budgets.items()}
    counts = {name: result.num_micro_batches for name, (result, _) in results.items()}
    assert counts["one"] > counts["three"] > counts["all"] == 1
    tolerance = FLOAT32_STEP_INVARIANCE if dtype == torch.float32 else FLOAT64_ENUMERATION
    expected_result, expected = results["all"]
    for result, found in results.values():
        assert relative_error(found, expected) < tolerance
        assert result.metrics.loss == pytest.approx(expected_result.metrics.loss, rel=tolerance)


def test_every_pair_has_the_same_weight_whatever_pack_it_lands_in(pairs, reference):
    model = build("llama", dtype=torch.float64)
    bind_logprob_forward(model, backend="sdpa")
    alone = [step(model, [p], [r])[1] for p, r in zip(pairs, reference, strict=True)]
    expected = {n: sum(g[n] for g in alone) / len(pairs) for n in alone[0]}
    for max_tokens in (60, 100, 1000):
        _, found = step(model, pairs, reference, max_tokens=max_tokens)
        assert relative_error(found, expected) < FLOAT64_ENUMERATION


def test_the_order_of_pairs_does_not_matter(pairs, reference):
    model = build("llama", dtype=torch.float64)
    bind_logprob_forward(model, backend="sdpa")
    _, expected = step(model, pairs, reference, max_tokens=100)
    order = np.random.default_rng(0).permutation(len(pairs))
    _, found = step(model, [pairs[k] for k in order], [reference[k] for k in order], max_tokens=100)
    assert relative_error(found, expected) < FLOAT64_ENUMERATION


def test_metrics_are_means_over_pairs_and_tokens(pairs, reference):
    model = build("llama", dtype=torch.float64)
    plain = build("llama", dtype=torch.float64)
    bind_logprob_forward(model, backend="sdpa")
    metrics = step(model, pairs, reference, max_tokens=100)[0].metrics.means(beta=BETA)
    found = reference_logprobs(plain, pairs)
    sums = np.array([[part.sum() for part in pair] for pair in found])
    ratios = sums - np.array([[part.sum() for part in pair] for pair in reference])
    expected = {
        "rewards/chosen": BETA * ratios[:, 0].mean(),
        "rewards/rejected": BETA * ratios[:, 1].mean(),
        "rewards/margins": BETA * (ratios[:, 0] - ratios[:, 1]).mean(),
        "rewards/accuracies": (ratios[:, 0] > ratios[:, 1]).mean(),
        "logps/chosen": sums[:, 0].mean(),
        "logps/rejected": sums[:, 1].mean(),
    }
    assert {n: metrics[n] for n in expected} == pytest.approx(expected, rel=1e-9)
    assert set(metrics) - set(expected) == {
        "logits/chosen",
        "logits/rejected",
        "entropy",
        "mean_token_accuracy",
    }


def test_without_reference_the_log_ratios_are_log_probabilities(pairs):
    model = build("llama", dtype=torch.float64)
    bind_logprob_forward(model, backend="sdpa")
    metrics = step(model, pairs, None)[0].metrics.means(beta=BETA)
    assert metrics["rewards/chosen"] == pytest.approx(BETA * metrics["logps/chosen"])


def test_a_non_finite_pair_is_named(pairs, reference):
    model = build("llama", dtype=torch.float64)
    bind_logprob_forward(model, backend="sdpa")
    reference[3][0][0] = np.nan
    with pytest.raises(NonFiniteError, match="rows 3") as caught:
        step(model, pairs, reference, max_tokens=100)
    assert caught.value.pair_ids == (3,)


def test_case_dat_09_an_identical_pair_has_loss_ln_2_and_no_gradient(pairs):
    model = build("llama", dtype=torch.float64)
    bind_logprob_forward(model, backend="sdpa")
    pair = pairs[1]
    twin = type(pair)(
        pair_id=0,
        prompt_ids=pair.prompt_ids,
        chosen_ids=pair.chosen_ids,
        rejected_ids=pair.chosen_ids,
        content_hash=pair.content_hash,
    )
    result, found = step(model, [twin], reference_logprobs(build("llama"), [twin]))
    assert result.metrics.loss == pytest.approx(np.log(2), rel=1e-12)
    assert max(float(g.abs().max()) for g in found.values()) < 1e-12
