"""On a GPU: no run exceeds the budget that ``max_tokens: auto`` was measured for.

pytest -m gpu tests/gpu
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from sdpo_scale import SDPOTrainer
from tests.helpers.runs import config, save_model, text_rows, write_rows

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}


def make(folder: Path, **changes: Any) -> SDPOTrainer:
    data = {"model": folder / "model", "train_dataset": folder / "train.jsonl"}
    run = {"max_tokens": "auto", "train_batch_size": 2000, "max_steps": 2, "use_cpu": False}
    return SDPOTrainer(args=config(folder, **data, **{**run, **changes}))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_stays_within_the_measured_budget(checkpointing: bool, tmp_path: Path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    save_model(tmp_path / "model", **SIZES)
    write_rows(tmp_path / "train.jsonl", text_rows(2000))
    free, total = torch.cuda.mem_get_info()
    budget = total - free + 3 * 2**30
    options = {"memory_budget": f"{budget / 1e9:.6f}GB", "activation_checkpointing": checkpointing}
    trainer = make(tmp_path, **options)
    assert torch.cuda.memory_allocated() < 2**29
    trainer.train()
    others = total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    assert others + torch.cuda.max_memory_reserved() <= budget
