"""Families whose heads or layers differ from a Llama's, on two ranks, against one process."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from sdpo_scale import SDPOTrainer
from tests.distributed.test_training_on_ranks import (
    BY_GRADIENTS,
    MODES,
    RUN,
    deepspeed_config,
    run_on_ranks,
)
from tests.helpers.runs import config, options, save_model, text_rows, write_rows
from tests.helpers.tolerances import FLOAT32_STEP_INVARIANCE

pytestmark = pytest.mark.distributed
LAYERS = {
    "phi": "PhiDecoderLayer",  # a bias in the head
    "gpt2": "GPT2Block",  # a position table, a tied head
    "gpt_oss": "GptOssDecoderLayer",  # sinks, experts with biases
    "mixtral": "MixtralDecoderLayer",  # experts that are saved one by one
}


@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
@pytest.mark.parametrize("family", LAYERS)
def test_SHD_06_two_ranks_train_a_family_as_one_process_does(
    family: str, backend: str, tmp_path: Path
):
    """Of the experts, those that no token of a rank passes through are gathered like the others.

    In the last step a rank has no pair: its only token passes through 2 of 4. A layer's experts are
    stacked parameters of one module, so there is no module whose hooks a rank could leave out.
    """
    changes: dict[str, Any] = {
        "model": str(save_model(tmp_path / "model", family=family)),
        "train_dataset": str(write_rows(tmp_path / "train.jsonl", text_rows(11))),
        **RUN,
        **BY_GRADIENTS,
        **MODES["branch_checkpoint"],
    }
    before = AutoModelForCausalLM.from_pretrained(changes["model"]).state_dict()
    alone = SDPOTrainer(args=config(tmp_path / "alone", **changes))
    alone.train()
    if backend == "zero3":
        changes["deepspeed"] = deepspeed_config(3)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(options(tmp_path / backend, **changes)))
    run_on_ranks(backend, path, FSDP_TRANSFORMER_CLS_TO_WRAP=LAYERS[family])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / backend / "output").state_dict()
    expected = alone.model.state_dict()
    assert saved.keys() == expected.keys()
    for name in expected:
        update = expected[name].double() - before[name].double()
        difference = saved[name].double() - expected[name].double()
        assert difference.norm() <= FLOAT32_STEP_INVARIANCE * update.norm(), name
