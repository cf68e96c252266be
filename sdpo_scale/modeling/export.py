"""What is written for other programs to load: an adapter, or the whole model with it merged in.

Weights arrive whole and on the host, gathered one after the other by the sharding in use, so the
files are the same under every backend. What was written is read back: a file of placeholders, with
tensors of no elements, would be noticed only by whoever loads it.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from sdpo_scale.modeling.adapted import base_model_of, is_adapter_name, skeleton_of

__all__ = ["check_whole_model", "merged_model", "save_adapted"]

logger = logging.getLogger(__name__)


def save_adapted(
    model: Any,
    folder: Path,
    *,
    gather: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    merges: bool,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Saves the adapter in peft's layout, or the whole model in Hugging Face's.

    Args:
        model: a ``PeftModel``, however it is sharded.
        folder: where to.
        gather: name → tensor of the model, to name → whole tensor on the host; on every rank.
        merges: save the base model with the adapter merged into its weights.
        tokenizer: saved as well; None where this rank only takes part in gathering.

    Raises:
        RuntimeError: what was written is not whole.
    """
    state = model.state_dict(keep_vars=True)
    if not merges:
        state = {name: tensor for name, tensor in state.items() if is_adapter_name(name)}
    whole = gather(state)
    if tokenizer is None:
        return
    tokenizer.save_pretrained(folder)
    if merges:
        merged = merged_model(model, whole)
        merged.save_pretrained(folder)
        check_whole_model(folder, merged.config)
        logger.info("saved: the base model with the adapter merged in, %s", folder)
    else:
        # embeddings are in it if they are trained; "auto" would look the base model up on the Hub
        model.save_pretrained(folder, state_dict=whole, save_embedding_layers=False)
        shapes = _shapes(folder, "adapter_model*.safetensors")
        empty = [name for name, shape in shapes.items() if 0 in shape]
        if empty or len(shapes) != len(whole):
            raise RuntimeError(
                f"{folder} does not hold the whole adapter: {len(shapes)} of {len(whole)} tensors "
                f"were written, {len(empty)} of them without elements: {', '.join(empty[:5])}"
            )


def merged_model(model: Any, state: dict[str, Tensor]) -> PreTrainedModel:
    """The base model with the adapter merged into its weights, made beside the live one.

    peft merges in place; a run that goes on would train on rounded weights. So the merge happens in
    a copy of the architecture that takes over the gathered weights.

    Args:
        model: a ``PeftModel``; its weights are not used.
        state: its whole state, which the result consists of.
    """
    import peft

    base = base_model_of(model)
    config = copy.deepcopy(model.peft_config[model.active_adapter])
    with warnings.catch_warnings(action="ignore"):  # they came with the live model
        empty = peft.get_peft_model(
            skeleton_of(base.config),
            config,
            adapter_name=model.active_adapter,
            low_cpu_mem_usage=True,
        )
    empty.load_state_dict(state, assign=True)
    base_model_of(empty).tie_weights()
    merged: PreTrainedModel = empty.merge_and_unload(safe_merge=True)
    merged.generation_config = base.generation_config
    return merged


def check_whole_model(folder: Path, config: PreTrainedConfig) -> None:
    """Compares names and shapes in a saved model's files with those that its config asks for.

    An adapter that an earlier run left in the folder is deleted: ``from_pretrained`` would put it
    on top.

    Raises:
        RuntimeError: a tensor is missing, empty or of another shape.
    """
    shapes = _shapes(folder, "model*.safetensors")
    if not shapes:  # another format was asked for
        return
    for path in folder.glob("adapter_*"):
        path.unlink()
    empty = skeleton_of(config)
    # files have the names of the family's first release: a tensor per expert, GPT-NeoX's embed_out
    files = revert_weight_conversion(empty, empty.state_dict())
    expected = {name: tuple(tensor.shape) for name, tensor in files.items()}
    tied = set(empty.all_tied_weights_keys)
    missing = expected.keys() - shapes.keys() - tied
    wrong = [n for n in shapes.keys() & expected.keys() if shapes[n] != expected[n]]
    if missing or wrong:
        name = sorted([*missing, *wrong])[0]
        raise RuntimeError(
            f"{folder} does not hold the whole model: {len(missing)} tensors are missing, "
            f"{len(wrong)} have another shape; {name} is {shapes.get(name)}, not {expected[name]}"
        )


def _shapes(folder: Path, pattern: str) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in some safetensors files of a folder, from their headers."""
    shapes = {}
    for path in sorted(folder.glob(pattern)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no dict
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes
