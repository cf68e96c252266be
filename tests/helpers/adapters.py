"""LoRA adapters of the tiny models, none of whose weights are 0."""

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM


def adapted(model: Any, **changes: Any) -> peft.PeftModel:
    """A model with an adapter that has been trained before: both factors are random."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **changes}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.05 if "lora_B" in name else 0.2, generator=generator)
    return model


def save_adapter(folder: Path, base: Path, **changes: Any) -> Path:
    """Such an adapter of a model folder, in a folder of its own."""
    model = adapted(AutoModelForCausalLM.from_pretrained(base), **changes)
    model.save_pretrained(folder)
    return folder
