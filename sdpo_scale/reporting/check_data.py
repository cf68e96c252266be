"""What a run would train on: rows, lengths, what packing saves, duplicates, some decoded pairs.

Rows are read and tokenized as the run would do it (and found again by it), except that unusable
rows never stop the check: all of them are counted. No weights are read.
"""

import hashlib
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from sdpo_scale.data.pairs import PairDataset
from sdpo_scale.inputs import prepare_inputs
from sdpo_scale.reporting.dry_run import config_without_devices

__all__ = ["PADDED_PAIRS", "check_data", "show"]

PADDED_PAIRS = 8
"""Pairs of the padded batches that packs are compared with: the default of TRL and transformers."""
_BINS = 12
_BAR = 40
_STYLES = {
    "prompt": ("dim",),
    "chosen": ("green", "green reverse"),
    "rejected": ("red", "red reverse"),
}
"""Styles that the tokens of a part take turns in; a prompt is one piece."""


def check_data(options: Mapping[str, Any], *, num_rows: int = 3) -> dict[str, Any]:
    """Prepares the pairs of a run and describes them.

    Args:
        options: fields of ``SDPOConfig`` that the run was given.
        num_rows: pairs of each part that are decoded.

    Returns:
        ``refused_rows``, and for ``train`` and, where there is one, ``eval``: the preparation's
        report, ``lengths`` (a histogram of the tokens of prompt and response), ``packing``,
        ``duplicates`` and decoded ``pairs``.

    Raises:
        ValueError: the run would be refused for another reason than a row.
    """
    args = config_without_devices({**options, "on_bad_row": "skip"})
    inputs = prepare_inputs(
        args,
        model=None,
        tokenizer=None,
        train_dataset=None,
        eval_dataset=None,
        loads_weights=False,
    )
    result: dict[str, Any] = {"refused_rows": 0}
    for part, dataset in (("train", inputs.train), ("eval", inputs.eval)):
        if dataset is None:
            continue
        report = inputs.reports[part]
        result["refused_rows"] += sum(report.skipped.values())
        result[part] = {
            "report": report.to_dict(),
            "lengths": _histogram(dataset.lengths),
            "packing": _packing(dataset.lengths),
            "duplicates": _duplicates(dataset),
            "pairs": [
                _decoded(dataset, index, inputs.tokenizer)
                for index in range(min(num_rows, len(dataset)))
            ],
        }
    return result


def _histogram(lengths_N3: NDArray[np.int64]) -> list[dict[str, int]]:
    """Sequences, two for each pair, by their tokens; ``from`` and ``to`` are included."""
    sequences = (lengths_N3[:, :1] + lengths_N3[:, 1:]).ravel()
    width = -(-int(sequences.max()) // _BINS)
    counts = np.bincount((sequences - 1) // width, minlength=_BINS).tolist()
    return [
        {"from": number * width + 1, "to": (number + 1) * width, "count": count}
        for number, count in enumerate(counts)
    ]


def _packing(lengths_N3: NDArray[np.int64]) -> dict[str, float]:
    """Tokens that are computed here, and by batches of ``PADDED_PAIRS`` in the rows' order."""
    sequences = lengths_N3[:, :1] + lengths_N3[:, 1:]
    longest = sequences.max(axis=1)
    starts = np.arange(0, len(longest), PADDED_PAIRS)
    sizes = np.diff([*starts, len(longest)])
    padded = int((2 * sizes * np.maximum.reduceat(longest, starts)).sum())
    packed, whole = int(lengths_N3.sum()), int(sequences.sum())
    return {
        "packed_tokens": packed,
        "padded_tokens": padded,
        "padding_fraction": 1 - whole / padded,
        "shared_prompt_fraction": 1 - packed / whole,
        "saved_fraction": 1 - packed / padded,
    }


def _duplicates(dataset: PairDataset) -> dict[str, int]:
    """Pairs that occur before with the same tokens, and prompts that occur in an earlier pair."""
    contents = dataset.content_hashes.array
    prompts = np.empty(len(dataset), dtype=np.uint64)
    for index in range(len(dataset)):
        ids = np.ascontiguousarray(dataset[index].prompt_ids)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        prompts[index] = int.from_bytes(digest, "little")
    return {
        "pairs": len(contents) - len(np.unique(contents)),
        "prompts": len(prompts) - len(np.unique(prompts)),
    }


def _decoded(
    dataset: PairDataset, index: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """A pair's row number, its prompt as text and its responses token by token."""
    pair = dataset[index]
    return {
        "row": pair.pair_id,
        "prompt": tokenizer.decode(pair.prompt_ids.tolist()),
        "chosen": [tokenizer.decode([token]) for token in pair.chosen_ids.tolist()],
        "rejected": [tokenizer.decode([token]) for token in pair.rejected_ids.tolist()],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what :func:`check_data` found."""
    for part in ("train", "eval"):
        if part in result:
            _show_part(part, result[part], console)
    refused = result["refused_rows"]
    console.print(f"refused rows: {refused}", style="red" if refused else "green")


def _show_part(name: str, part: dict[str, Any], console: Console) -> None:
    report, packing, duplicates = part["report"], part["packing"], part["duplicates"]
    lines = [
        f"{name} data: {report['rows']} rows, {report['kept']} pairs",
        *(f"  refused {count}: {reason}" for reason, count in report["skipped"].items()),
        f"  truncated: {report['truncated_prompts']} prompts, {report['truncated_chosen']} chosen, "
        f"{report['truncated_rejected']} rejected; {report['tokens_cut']} tokens cut",
        f"  boundary repairs: {report['boundary_repairs']} pairs",
        f"  duplicates: {duplicates['pairs']} pairs, {duplicates['prompts']} prompts",
        f"  tokens: {packing['packed_tokens']} packed, {packing['padded_tokens']} in padded "
        f"batches of {PADDED_PAIRS} pairs: {packing['saved_fraction']:.0%} saved "
        f"(padding {packing['padding_fraction']:.0%}, prompts computed once "
        f"{packing['shared_prompt_fraction']:.0%} of the rest)",
        "  tokens of prompt and response:",
    ]
    most = max(bar["count"] for bar in part["lengths"])
    for bar in part["lengths"]:
        blocks = "█" * -(-_BAR * bar["count"] // most)
        lines.append(f"  {bar['from']:>7}–{bar['to']:<7}{bar['count']:>8} {blocks}")
    lines += [f"  warning: {warning}" for warning in report["warnings"]]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    for pair in part["pairs"]:
        console.print(_coloured(pair), soft_wrap=True)


def _coloured(pair: dict[str, Any]) -> Text:
    text = Text(f"row {pair['row']}\n", style="bold")
    for name, styles in _STYLES.items():
        tokens = [pair[name]] if name == "prompt" else pair[name]
        text.append(f"{name}: ", style="bold not reverse")
        for token, style in zip(tokens, cycle(styles), strict=False):
            text.append(token, style=f"not bold {style}")
        text.append("\n")
    return text
