"""The memory model, made from shallow models without memory, against torch's trackers on deep ones.

The trackers (``torch.distributed._tools``) follow real tensors of a real micro-batch, AdamW's state
included. What the model is given is simulated at 3 and 4 layers and at two other sizes of packs.

Without shards they agree to 0.2%, but where a chunk of logits is filled between the sizes. With
FSDP2 the model says up to one gathered layer more: the tracker's hooks call the pre-backward of the
head's unit twice, so that the last layer is gathered after the head's backward and not, as without
a tracker, before it.
"""

import logging
import statistics
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from sdpo_scale.memory.footprint import grown
from sdpo_scale.memory.simulation import Execution, PackShape
from tests.helpers.memory import lines_of, predicted_bytes, tracked_bytes

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning"),
]

DEPTH, SIZES = 6, (6, 12)
PAIR = (40, 32, 24)
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": DEPTH,
    "vocab_size": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "olmo2": {"tie_word_embeddings": False},
    "gpt_neox": {"tie_word_embeddings": False},
}
EXECUTIONS = (("off", 1.0), ("full", 1.0), ("pruned", 1.0), ("pruned", 1 / 3))
GRID = [
    (family, shards, *execution)
    for family in FAMILIES
    for shards in (1, 4)
    for execution in EXECUTIONS
]


def config_of(family: str) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **SHAPE, **FAMILIES[family])


def pack_of(num_pairs: int, kept: float) -> PackShape:
    count = round(kept * num_pairs)
    rows = tuple(PAIR[1:] if k < count else (0, 0) for k in range(num_pairs))
    return PackShape(lengths=(PAIR,) * num_pairs, kept=None if count == num_pairs else rows)


def errors_of(family: str, shards: int, checkpointing: str, kept: float) -> list[float]:
    """Relative errors of the predicted peaks at 9 and 18 pairs in a pack."""
    config = config_of(family)
    execution = Execution(
        num_shards=shards, checkpointing=checkpointing, backend="sdpa", chunk_bytes=2**20
    )
    small, large = (lines_of(config, pack_of(size, kept), execution) for size in SIZES)
    errors = []
    for size in (9, 18):
        working = grown(small, large, tokens=SIZES, to=size)
        predicted = predicted_bytes(config, working, execution)
        errors.append(predicted / tracked_bytes(config, pack_of(size, kept), execution) - 1)
    return errors


def test_model_agrees_with_the_trackers_of_torch():
    errors = {setting: errors_of(*setting) for setting in GRID}
    flat = [abs(error) for pair in errors.values() for error in pair]
    text = "%d settings: median error %.2f%%, largest %.2f%%"
    logger.info(text, len(flat), 100 * statistics.median(flat), 100 * max(flat))
    assert len(flat) >= 60
    assert statistics.median(flat) < 0.03, errors
    assert max(flat) < 0.10, errors
    unsharded = [abs(e) for s, pair in errors.items() if s[1] == 1 for e in pair]
    assert statistics.median(unsharded) < 0.001, errors
