"""Host memory while a model is loaded and sharded, by rank.

    MALLOC_MMAP_THRESHOLD_=1000000 torchrun --nproc-per-node 4 \\
        tests/benchmarks/loading.py FOLDER BACKEND [LAYERS]

Rank 0 writes a random Llama of 482M parameters (17 layers, or LAYERS) in bfloat16 into FOLDER,
unless it is there; then all ranks load it as a run does, in float32, up to scored reference
log-probabilities, and rank 0 prints one JSON object: bytes of the whole model, and of each rank
those of its shards, the digest of its buffers, and the most anonymous memory above what the
imported libraries take, until the model was read and until the reference was scored (sampled every
5 ms; file pages that are mapped from the weights are not counted). To score it is sharded; ZeRO-3
allocates gradients and optimizer state then as well. BACKEND: fsdp2, zero3, or ddp, which keeps a
copy per rank. The variable makes the C library give freed tensors back at once; without it what is
measured is its fragmentation as well.
"""

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import yaml
from accelerate.utils import gather_object

from tests.helpers import toy_tokenizers
from tests.helpers.runs import options, text_rows, write_rows
from tests.helpers.train_on_ranks import read_arguments

ROOT = Path(__file__).resolve().parents[2]


def prepare(folder: Path, backend: str, num_layers: int) -> None:
    """Model, rows and config; the config last, since the other ranks wait for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=256,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "model")
    toy_tokenizers.build("plain").save_pretrained(folder / "model")
    write_rows(folder / "rows.jsonl", text_rows(8))
    changes = {"model": folder / "model", "train_dataset": folder / "rows.jsonl"}
    if backend == "zero3":
        changes["deepspeed"] = ROOT / "ds_configs" / "zero3.json"
    text = yaml.safe_dump(options(folder, **changes, max_tokens=512, max_steps=1))
    (folder / "aside").write_text(text)
    (folder / "aside").rename(folder / f"{backend}.yaml")


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


class Peak(threading.Thread):
    """The most anonymous memory since it was started, above that at the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = anonymous_bytes()
        self.bytes = 0
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            self.bytes = max(self.bytes, anonymous_bytes() - self.start_bytes)
            time.sleep(0.005)


def main() -> None:
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    num_layers = int(sys.argv[3]) if len(sys.argv) > 3 else 17
    config = folder / f"{backend}.yaml"
    if os.environ["RANK"] == "0" and not config.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, backend, num_layers)
    while not config.is_file():
        time.sleep(0.1)
    args = read_arguments(backend, str(config))
    from sdpo_scale.trainer import SDPOTrainer

    peak = Peak()
    peak.start()
    trainer = SDPOTrainer(args=args)
    read = gather_object([peak.bytes])
    trainer.score()
    peak.is_over = True
    peak.join()
    scored = gather_object([peak.bytes])
    held = gather_object([sum(_local_bytes(p) for p in trainer.model.parameters())])
    buffers = gather_object([buffer_digest(trainer.model)])
    whole = sum(getattr(p, "ds_numel", p.numel()) * 4 for p in trainer.model.parameters())
    if trainer.accelerator.is_main_process:
        result = {"model": whole, "held": held, "read": read, "scored": scored}
        sys.stdout.write(json.dumps({**result, "buffers": buffers}) + "\n")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def buffer_digest(model: torch.nn.Module) -> str:
    """Of what no file has, such as rotary frequencies."""
    digest = hashlib.sha256()
    for name, buffer in model.named_buffers():
        digest.update(name.encode() + buffer.cpu().numpy().tobytes())
    return digest.hexdigest()


def _local_bytes(parameter: torch.Tensor) -> int:
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.numel() * parameter.ds_tensor.element_size()
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.numel() * local.element_size()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # PyTorch's threads may abort a process, now and then, as Python finalizes
