"""The pairs of a run: sources → tokenized training and evaluation pairs, once for all ranks."""

import json
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sdpo_scale import demo
from sdpo_scale.config import SDPOConfig, nearest
from sdpo_scale.data.pairs import PairDataset
from sdpo_scale.data.preference import Preparation, PreparationReport, prepare_pairs
from sdpo_scale.data.sources import Part, parts_of
from sdpo_scale.data.tokenization import tokenizer_fingerprint
from sdpo_scale.waiting import once_per_folder

__all__ = ["RunData", "prepare_run_data"]

logger = logging.getLogger(__name__)

_DECIDES_PAIRS = (
    *("on_bad_row", "train_split", "eval_split", "eval_holdout"),
    *("max_train_samples", "max_eval_samples", "chat_template_kwargs"),
)
"""Options that decide which rows become pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Tokenized pairs and what became of the rows."""

    train: PairDataset
    eval: PairDataset | None
    reports: dict[str, PreparationReport]
    """``train`` and, if there is one, ``eval`` → what preparation kept, cut and left out."""
    key: dict[str, str]
    """What token ids depend on besides rows."""


def prepare_run_data(
    args: SDPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_dataset: Any,
    eval_dataset: Any,
) -> RunData:
    """Checks all sources, then tokenizes their rows, or finds that done in the cache folder.

    Args:
        args: the options.
        tokenizer: the run's.
        train_dataset: training pairs in any accepted form.
        eval_dataset: evaluation pairs, or None for the held-out prompts, if any.

    Raises:
        ValueError: an option or a source that cannot be used.
        DataError: an unusable row, naming file, row and column.
    """
    if args.chat_template_kwargs:
        _check_template_options(args.chat_template_kwargs, tokenizer)
    train_parts, eval_parts = _parts(args, train_dataset, eval_dataset)
    key = {
        **tokenizer_fingerprint(tokenizer),
        "max_length": str(args.max_length),
        "truncation_mode": args.truncation_mode,
    }
    datasets, reports = once_per_folder(
        "tokenization",
        args.cache_path,
        lambda: _prepare_datasets(args, tokenizer, train_parts, eval_parts),
        request=_request(args, key, train_parts, eval_parts),
    )
    return RunData(train=datasets["train"], eval=datasets.get("eval"), reports=reports, key=key)


def _parts(
    args: SDPOConfig, train_dataset: Any, eval_dataset: Any
) -> tuple[list[Part], list[Part]]:
    """The sources of training and evaluation pairs, all of them checked before one is read."""
    if type(eval_dataset) is dict and "path" not in eval_dataset:  # not a datasets.DatasetDict
        raise ValueError(
            f"eval_dataset maps names ({', '.join(map(str, eval_dataset))}) to data sets, which is "
            "refused: there is one set of evaluation metrics; give a list of the data sets, whose "
            "pairs are evaluated together, or one mapping with path, split, subset and revision"
        )
    given = {
        "train_dataset": (train_dataset, args.train_split),
        "eval_dataset": (eval_dataset, args.eval_split),
    }
    train, evaluation = (
        []
        if source is None
        else parts_of(
            str(demo.pairs_path()) if isinstance(source, str) and source == "demo" else source,
            split=split,
            option=name,
        )
        for name, (source, split) in given.items()
    )
    weighted = [part for part in evaluation if part.weight != 1]
    if weighted:
        raise ValueError(
            f"eval_dataset: weight {weighted[0].weight:g} of {weighted[0].label} has no effect, an "
            "evaluation takes each pair once; drop it"
        )
    return train, evaluation


def _check_template_options(options: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a variable that stands nowhere in the chat template, which would ignore it."""
    template = str(tokenizer.chat_template or "")
    words = sorted(set(re.findall(r"[A-Za-z_]\w*", template)))
    for name in options:
        if name not in words:
            raise ValueError(
                f"chat_template_kwargs: the chat template of the tokenizer at "
                f"{tokenizer.name_or_path} has no variable {name!r}{nearest(name, words)}"
            )


def _request(args: SDPOConfig, data_key: dict[str, str], *sources: Any) -> str:
    """What prepared pairs depend on, as far as ranks may have been started with different ones."""
    options = {name: getattr(args, name) for name in _DECIDES_PAIRS}
    given = [[(part.label, part.weight) for part in parts] for parts in sources]
    return repr([data_key, given, options])


def _prepare_datasets(
    args: SDPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    train_parts: list[Part],
    eval_parts: list[Part],
) -> tuple[dict[str, PairDataset], dict[str, PreparationReport]]:
    sources = {"train": (train_parts, args.max_train_samples)}
    if eval_parts:
        sources["eval"] = (eval_parts, args.max_eval_samples)
    elif args.eval_holdout is not None:
        once = [replace(part, weight=1.0) for part in train_parts]
        sources["eval"] = (once, args.max_eval_samples)
    datasets, reports = {}, {}
    for part, (source, max_samples) in sources.items():
        options = Preparation(
            max_length=args.max_length,
            truncation_mode=args.truncation_mode,
            on_bad_row=args.on_bad_row,
            max_samples=max_samples,
            holdout=args.eval_holdout,
            holdout_part=part if args.eval_holdout is not None else None,
            template_options=args.chat_template_kwargs or {},
        )
        datasets[part], reports[part] = prepare_pairs(
            source,
            tokenizer,
            options=options,
            cache_dir=args.cache_path / "tokens",
        )
        for line in reports[part].describe():
            logger.info("%s data: %s", part, line)
    if args.process_index == 0:
        _list_skipped_rows(args.output_path, reports)
    # rows that were left out have been listed; ranks are handed the first ones only
    return datasets, {
        part: replace(report, skipped_rows=report.skipped_rows[:10])
        for part, report in reports.items()
    }


def _list_skipped_rows(folder: Path, reports: dict[str, PreparationReport]) -> None:
    """Writes the rows left out and why to ``skipped_rows.jsonl`` in the output folder."""
    lines = [
        {
            "data": part,
            "row": e.row,
            "line": e.line,
            "column": e.column,
            "reason": str(e),
            "file": e.file,
        }
        for part, report in reports.items()
        for e in report.skipped_rows
    ]
    if lines:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "skipped_rows.jsonl"
        path.write_text(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8"
        )
        logger.warning("%d rows were left out; they are listed in %s", len(lines), path)
