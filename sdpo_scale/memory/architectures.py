"""Shapes of well-known models, so that memory can be planned without their files.

From each model's published ``config.json``. Names are accepted as ``model`` by ``sdpo-scale plan``.
"""

from typing import Any

__all__ = ["ARCHITECTURES"]


def _shape(family: str, sizes: tuple[int, int, int, int, int, int], **other: Any) -> dict[str, Any]:
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size"),
    )
    return {
        "model_type": family,
        **dict(zip(names, sizes, strict=True)),
        "tie_word_embeddings": False,
        **other,
    }


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _shape("llama", (4096, 11008, 32, 32, 32, 32000)),
    "llama-2-13b": _shape("llama", (5120, 13824, 40, 40, 40, 32000)),
    "llama-2-70b": _shape("llama", (8192, 28672, 80, 64, 8, 32000)),
    "llama-3-8b": _shape("llama", (4096, 14336, 32, 32, 8, 128256)),
    "llama-3-70b": _shape("llama", (8192, 28672, 80, 64, 8, 128256)),
    "mistral-7b": _shape("mistral", (4096, 14336, 32, 32, 8, 32768), sliding_window=None),
    "qwen2.5-0.5b": _shape("qwen2", (896, 4864, 24, 14, 2, 151936), tie_word_embeddings=True),
    "qwen2.5-1.5b": _shape("qwen2", (1536, 8960, 28, 12, 2, 151936), tie_word_embeddings=True),
    "qwen2.5-3b": _shape("qwen2", (2048, 11008, 36, 16, 2, 151936), tie_word_embeddings=True),
    "qwen2.5-7b": _shape("qwen2", (3584, 18944, 28, 28, 4, 152064)),
    "qwen2.5-14b": _shape("qwen2", (5120, 13824, 48, 40, 8, 152064)),
    "qwen2.5-32b": _shape("qwen2", (5120, 27648, 64, 40, 8, 152064)),
    "qwen2.5-72b": _shape("qwen2", (8192, 29568, 80, 64, 8, 152064)),
    "gemma-2-9b": _shape(
        "gemma2", (3584, 14336, 42, 16, 8, 256000), head_dim=256, tie_word_embeddings=True
    ),
}
"""Name → fields of its config."""
