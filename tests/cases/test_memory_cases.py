"""Situations in which memory was seen to be predicted or used wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PreTrainedConfig

from sdpo_scale.memory.architectures import ARCHITECTURES
from sdpo_scale.memory.simulation import (
    Execution,
    PackShape,
    prepared_micro_batch,
    simulate_peaks,
    with_depth,
)
from tests.helpers.memory import lines_of, predicted_bytes, tracked_bytes

CASES = Path(__file__).parent


def values_of(case: str) -> dict[str, Any]:
    return json.loads((CASES / case / "values.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def wide_vocabulary() -> PreTrainedConfig:
    return AutoConfig.for_model(
        "qwen2",
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=5,
        vocab_size=values_of("MEM-04")["vocab"],
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize("mirrored", [False, True], ids=["long-prompt", "long-responses"])
def test_case_mem_04_memory_follows_what_is_scored(
    wide_vocabulary: PreTrainedConfig, mirrored: bool
):
    values = values_of("MEM-04")
    prompt, response = values["pair"]["prompt_tokens"], values["pair"]["completion_tokens_with_end"]
    pack = PackShape(lengths=((2, 1000, 1000) if mirrored else (prompt, response, response),))
    execution = Execution(checkpointing="pruned", backend="sdpa", compute_dtype=torch.float32)
    predicted = predicted_bytes(
        wide_vocabulary, lines_of(wide_vocabulary, pack, execution), execution
    )
    assert predicted == pytest.approx(tracked_bytes(wide_vocabulary, pack, execution), rel=0.05)
    # its logits alone would be more than all that was predicted, states included
    assert predicted < values["full_logits_float32_bytes"] / 4


def test_case_mem_04_logits_of_a_long_prompt_are_those_of_its_responses(
    wide_vocabulary: PreTrainedConfig,
):
    values = values_of("MEM-04")
    pair = values["pair"]
    execution = Execution(checkpointing="pruned", backend="sdpa", compute_dtype=torch.float32)
    head = []
    for response in (pair["completion_tokens_with_end"], 2 * pair["completion_tokens_with_end"]):
        pack = PackShape(lengths=((pair["prompt_tokens"] - 2 * response, response, response),))
        head.append(simulate_peaks(with_depth(wide_vocabulary, 3), pack, execution)[0])
    # four rows more: their logits, and as many bytes again for what the loss makes of them
    assert head[1] - head[0] <= 4 * values["scored_positions_only_bytes"]


class ReducedBytes(TorchDispatchMode):
    """Sizes of what is reduced and scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "reduce_scatter" in str(function):
            self.sizes.append(args[1].nbytes)
        return function(*args, **(kwargs or {}))


def test_case_mem_05_embedding_and_head_are_reduced_apart():
    values = values_of("MEM-05")
    shape = dict(ARCHITECTURES["llama-3-70b"])
    assert (shape["vocab_size"], shape["hidden_size"]) == (values["vocab"], values["hidden"])
    config = with_depth(AutoConfig.for_model(shape.pop("model_type"), **shape), 3)
    pack, execution = PackShape(lengths=((64, 32, 32),)), Execution(num_shards=64)
    table = values["one_table_float32_bytes"]
    with prepared_micro_batch(config, pack, execution) as (model, micro_batch):
        units = [m for m in model.modules() if isinstance(m, FSDPModule)]
        assert model.get_input_embeddings() in units
        assert model.get_output_embeddings() in units
        reduced = ReducedBytes()
        with reduced:
            micro_batch()
    assert table <= max(reduced.sizes) < 1.01 * table
    assert sum(size >= table for size in reduced.sizes) == 2
    # the planner's working set has room for it
    assert max(simulate_peaks(config, pack, execution)) > table
