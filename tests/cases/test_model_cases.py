"""Small inputs distilled from public bug reports on models and packing; see test_data_cases.py."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpo_scale.data.preference import Preparation, prepare_pairs
from sdpo_scale.modeling.activation_checkpointing import PrunedRecompute
from sdpo_scale.modeling.attention import segments_of
from sdpo_scale.modeling.logprobs import bind_logprob_forward
from sdpo_scale.packing.layout import TokenTriple, build_idle_layout, build_layout, select_rows
from tests.helpers.gradients import gradients, relative_error
from tests.helpers.oracle import response_logprobs
from tests.helpers.tiny_models import build
from tests.helpers.tolerances import FLOAT64_ENUMERATION
from tests.helpers.toy_models import build_model
from tests.helpers.toy_tokenizers import build as build_tokenizer

CASES = Path(__file__).parent
IMPLEMENTATIONS = json.loads((CASES / "PCK-01/expected.json").read_text("utf-8"))["attention"][:2]


def case(name: str) -> Any:
    return json.loads((CASES / name).read_text("utf-8"))


@pytest.fixture
def tokens(tmp_path: Path):
    """Rows in memory, or the path of a file → token ids."""

    def of(source: Any) -> list[TokenTriple]:
        tokenizer = build_tokenizer("plain")
        dataset, _ = prepare_pairs(
            source, tokenizer, options=Preparation(), cache_dir=tmp_path / "cache"
        )
        return [dataset[index].tokens for index in range(len(dataset))]

    return of


def separate(model: Any, pairs: list[TokenTriple]) -> torch.Tensor:
    """Log-probabilities of all response tokens, each response in a forward of its own."""
    return torch.cat(
        [
            response_logprobs(model, prompt.tolist(), response.tolist())
            for prompt, *responses in pairs
            for response in responses
        ]
    )


def test_MOD_02_the_bias_of_the_head_is_in_logprobs_and_gradients(tokens):
    run = case("MOD-02/run.json")
    pairs = tokens([run["row"]])
    model = build_model(run["model"])
    expected = separate(model, pairs)
    expected.sum().backward()
    expected_gradients = gradients(model)
    bind_logprob_forward(model, backend="sdpa")
    layout = build_layout(pairs)
    found = model(pack=layout).logprobs_R
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    is_chosen, detached = layout.is_chosen_R, found.detach()
    sums = [float(detached[is_chosen].sum()), float(detached[~is_chosen].sum())]
    assert sums == pytest.approx([-18.039170, -34.523808], abs=1e-5)  # drawn by torch's generator
    found_gradients = gradients(model)
    assert "lm_head.bias" in found_gradients
    # rotary tables are float32
    assert relative_error(found_gradients, expected_gradients) < 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_PCK_01_rows_of_a_pack_do_not_see_each_other(implementation, tokens):
    pairs = tokens(CASES / "PCK-01/train.jsonl")
    changed = [tuple((part + 1) % 100 + 3 for part in pairs[0]), *pairs[1:]]
    model = build_model("phi_lm_head_bias", attn_implementation=implementation)
    bind_logprob_forward(model, backend="sdpa")
    scored = [len(pair[1]) + len(pair[2]) for pair in pairs]
    with torch.no_grad():
        before = model(pack=build_layout(pairs)).logprobs_R.split(scored)
        after = model(pack=build_layout(changed)).logprobs_R.split(scored)
        assert not torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])
        assert torch.equal(before[2], after[2])
        for order in itertools.permutations(range(3)):
            found = model(pack=build_layout([pairs[k] for k in order])).logprobs_R
            expected = torch.cat([before[k] for k in order])
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_PCK_04_segments_have_queries_in_each(tokens):
    """One-token responses, prunings that leave nothing of a response, and a rank without work."""
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in ("xyz", "abc", "qrs")]
    pairs = [(p, c[:1], r[:1]) for p, c, r in tokens(rows)]
    model = build("llama", dtype=torch.float64)
    alone = separate(model, pairs)
    bind_logprob_forward(model, backend="sdpa")
    layout = build_layout(pairs)
    with torch.no_grad():
        found = model(pack=layout).logprobs_R
    assert (found - alone).abs().max() < 1e-6  # norms and rotary tables of the plain model: float32
    kept = itertools.product(itertools.product((0, 1), repeat=2), repeat=len(pairs))
    layouts = [layout, build_idle_layout(pairs[0]), *(select_rows(layout, k) for k in kept)]
    for each in layouts:
        num_rows = len(each.rows_T) if hasattr(each, "rows_T") else each.num_tokens
        for cumulative in (each.cu_seqlens_q, each.cu_seqlens_k):
            assert cumulative.dtype == torch.int32
            assert cumulative[0] == 0
            assert (cumulative.diff() > 0).all()
        assert each.cu_seqlens_q[-1] == num_rows
        assert each.cu_seqlens_k[-1] == len(each.kv_index_K)
        segments = segments_of(each, backend="sdpa", device=torch.device("cpu"))
        assert len(segments.lengths_q) <= num_rows


def test_NUM_06_no_token_predicts_the_first_of_the_next_segment(tokens):
    pairs = tokens(case("NUM-06/expected.json")["rows"])
    model = build("llama", dtype=torch.float64)
    layout = build_layout(pairs)
    counts = [layout.chosen_length_P.tolist(), layout.rejected_length_P.tolist()]
    assert counts == [[3, 2], [3, 2]]
    expected = separate(model, pairs)
    bind_logprob_forward(model, backend="sdpa")
    with torch.no_grad():
        found = model(pack=layout).logprobs_R
    assert len(found) == 3 + 3 + 2 + 2
    torch.testing.assert_close(found, expected, rtol=FLOAT64_ENUMERATION, atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("execution", ["stored", "recomputed", "pruned"])
def test_NUM_03_no_query_is_without_a_key(execution, window, tokens):
    """Packs have no padding, and each query sees itself, so no softmax is over nothing."""
    pairs = tokens(CASES / "PCK-01/train.jsonl")
    model = build("gemma2", sliding_window=window).train()
    expected = separate(model, pairs)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    expected_gradients = gradients(model)
    bind_logprob_forward(model, backend="sdpa")
    layout = build_layout(pairs)
    if execution == "recomputed":
        model.activation_checkpointing_enable()
    if execution == "pruned":
        recompute = PrunedRecompute.bind(model)
        recompute.begin()
    found = model(pack=layout).logprobs_R
    if execution == "pruned":
        recompute.keep(select_rows(layout, [(len(c), len(r)) for _, c, r in pairs]))
    (found * weights).sum().backward()
    assert found.isfinite().all()
    found_gradients = gradients(model)
    assert all(gradient.isfinite().all() for gradient in found_gradients.values())
    assert relative_error(found_gradients, expected_gradients) < 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("family", "implementation"), [("gemma2", "eager"), ("mistral_sliding", "sdpa")]
)
def test_NUM_03_a_padded_batch_outside_of_packs_stays_finite(family, implementation, side, tokens):
    """The ordinary forward of a bound model, which generation and callbacks use."""
    chosen = [
        torch.cat([torch.tensor(p), torch.tensor(c)])
        for p, c, _ in tokens(CASES / "PCK-01/train.jsonl")
    ]
    model = build(family)
    model.set_attn_implementation(implementation)
    bind_logprob_forward(model, backend="sdpa")
    longest = max(map(len, chosen))
    ids = torch.zeros(len(chosen), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    places = []
    for row, sequence in enumerate(chosen):
        start = longest - len(sequence) if side == "left" else 0
        places.append(slice(start, start + len(sequence)))
        ids[row, places[-1]], mask[row, places[-1]] = sequence.long(), 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    assert logits.isfinite().all()
    weights = mask.float()[:, :, None]
    (logits.logsumexp(-1, keepdim=True) * weights).sum().backward()
    padded = gradients(model)
    for sequence in chosen:
        model(input_ids=sequence[None].long()).logits.logsumexp(-1).sum().backward()
    assert all(gradient.isfinite().all() for gradient in padded.values())
    assert relative_error(padded, gradients(model)) < 1e-4
