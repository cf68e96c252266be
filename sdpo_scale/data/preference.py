"""Preference data from any source to tokenized pairs in one Arrow file, with a report.

1. `sources.parts_of` names the sources; each yields rows, or the reason why one cannot be read.
2. `formats.format_row` decides each row's format; with a holdout, rows of the other part end here.
3. `tokenization.tokenize_rows` makes ids, a chunk of rows with one tokenizer call.
4. `tokenization.truncate_row` cuts to `max_length`.
5. `pairs.PairWriter` writes record batches; the finished file is named after its contents.
"""

import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sdpo_scale.data.formats import KNOWN_COLUMNS, FormattedRow, format_row
from sdpo_scale.data.pairs import Pair, PairDataset, PairWriter
from sdpo_scale.data.rows import DataError, SourceRow
from sdpo_scale.data.sources import Part, Source, parts_of
from sdpo_scale.data.tokenization import (
    TokenizedRow,
    TokenizerTraits,
    tokenize_rows,
    truncate_row,
)

__all__ = ["Pair", "PairDataset", "Preparation", "PreparationReport", "prepare_pairs"]

logger = logging.getLogger(__name__)

_ROWS_PER_CALL = 512
_BAD_ROWS_NAMED = 10
_TRUNCATION_MODES = ("keep_start", "keep_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Options of the preparation."""

    max_length: int | None = 1024
    """Most tokens of prompt and response; each side is cut by its own length; None: no limit."""
    truncation_mode: str = "keep_start"
    """`keep_start` cuts the ends of responses; `keep_end` the beginning of the prompt first."""
    on_bad_row: str = "error"
    """`error` stops at bad rows, `skip` leaves them out and lists them in the report."""
    max_samples: int | None = None
    """Stop after this many rows were kept."""
    holdout: int | None = None
    """Every pair whose prompt's digest is divisible by this number is held out from training."""
    holdout_part: str | None = None
    """Which part to prepare if `holdout` is set: `train` or `eval`."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Further variables for the chat template; a row's own win."""

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; at least 2, or None for no limit")
        if self.truncation_mode not in _TRUNCATION_MODES:
            raise ValueError(f"truncation_mode is {self.truncation_mode!r}; keep_start or keep_end")
        if self.on_bad_row not in ("error", "skip"):
            raise ValueError(f"on_bad_row is {self.on_bad_row!r}; error or skip")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples is {self.max_samples}; at least 1, or None for all rows")
        if self.holdout is not None and self.holdout < 2:
            raise ValueError(f"holdout is {self.holdout}; at least 2, or None for no holdout")
        if self.holdout_part not in ((None,) if self.holdout is None else ("train", "eval")):
            raise ValueError(
                f"holdout_part is {self.holdout_part!r} with holdout {self.holdout}; "
                "train or eval if holdout is set, else None"
            )


@dataclass
class PreparationReport:
    """What became of the rows; lengths are in tokens, after truncation unless said otherwise."""

    rows: int = 0
    """Rows read."""
    kept: int = 0
    """Pairs written."""
    held_out: int = 0
    """Rows that belong to the other part of the holdout."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """`source`, `weight`, `rows` and `kept` of each source."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Bad rows by column and reason."""
    skipped_rows: list[DataError] = field(default_factory=list)
    """All bad rows."""
    truncated_prompts: int = 0
    """Pairs whose prompt was cut."""
    truncated_chosen: int = 0
    """Pairs whose chosen response was cut."""
    truncated_rejected: int = 0
    """Pairs whose rejected response was cut."""
    tokens_cut: int = 0
    """Tokens lost to truncation, a prompt's counted once."""
    longest_before_truncation: int = 0
    """Longest sequence, prompt and response, before truncation."""
    longest_sequence: int = 0
    """Longest prompt and response."""
    longest_pair: int = 0
    """Most tokens of prompt, chosen and rejected together."""
    longest_pair_row: str = ""
    """Where that pair comes from."""
    length_percentiles: dict[str, int] = field(default_factory=dict)
    """p50, p90 and p99 of sequence lengths, two sequences per pair."""
    total_tokens: int = 0
    """Tokens of all prompts, chosen and rejected responses, a prompt's counted once."""
    max_token_id: int = -1
    """Largest token id."""
    max_token_id_row: str = ""
    """Where it occurs first."""
    boundary_repairs: int = 0
    """Pairs whose prompt alone has other tokens than the prompt before a response."""
    ignored_columns: list[str] = field(default_factory=list)
    """Columns that were not used."""
    warnings: list[str] = field(default_factory=list)
    """What the user should look at."""

    def count_columns(self, row: SourceRow) -> None:
        """Notes the row's unused columns."""
        for name in row.values.keys() - {*KNOWN_COLUMNS, *self.ignored_columns}:
            self.ignored_columns.append(name)

    def count_bad(self, error: DataError) -> None:
        """Adds a bad row."""
        self.skipped[error.kind] = self.skipped.get(error.kind, 0) + 1
        self.skipped_rows.append(error)

    def count_kept(self, row: SourceRow, pair: TokenizedRow) -> None:
        """Adds a pair."""
        sizes = np.array([len(pair.prompt), len(pair.chosen), len(pair.rejected)])
        cut = np.array(pair.cut)
        self.kept += 1
        self.truncated_prompts += int(cut[0] > 0)
        self.truncated_chosen += int(cut[1] > 0)
        self.truncated_rejected += int(cut[2] > 0)
        self.tokens_cut += int(cut.sum())
        given = sizes + cut
        before = int(given[0] + given[1:].max())
        self.longest_before_truncation = max(self.longest_before_truncation, before)
        self.boundary_repairs += pair.repaired
        if sizes.sum() > self.longest_pair:
            self.longest_pair, self.longest_pair_row = int(sizes.sum()), row.label
        largest = max(max(pair.prompt), max(pair.chosen), max(pair.rejected))
        if largest > self.max_token_id:
            self.max_token_id, self.max_token_id_row = largest, row.label

    def count_lengths(self, lengths: np.ndarray) -> None:
        """Fills in what follows from all lengths together.

        Args:
            lengths: int64 [N, 3], tokens of prompt, chosen and rejected.
        """
        sequences = lengths[:, :1] + lengths[:, 1:]
        self.total_tokens = int(lengths.sum())
        self.longest_sequence = int(sequences.max())
        levels = np.percentile(sequences, (50, 90, 99), method="higher")
        self.length_percentiles = dict(zip(("p50", "p90", "p99"), map(int, levels), strict=True))

    def describe(self) -> list[str]:
        """Lines for the log."""
        held_out = f", {self.held_out} in the other part of the holdout" if self.held_out else ""
        bad = len(self.skipped_rows)
        percentiles = ", ".join(
            f"{name} {value}" for name, value in self.length_percentiles.items()
        )
        lines = [
            f"rows: {self.rows} read, {self.kept} kept, {bad} skipped{held_out}",
            *(_describe_source(source) for source in self.sources if len(self.sources) > 1),
            *(f"skipped {count} for {reason}" for reason, count in self.skipped.items()),
            *(f"skipped {error}" for error in self.skipped_rows[:_BAD_ROWS_NAMED]),
        ]
        if bad > _BAD_ROWS_NAMED:
            lines.append(f"skipped {bad - _BAD_ROWS_NAMED} more rows")
        lines += [
            f"tokens per sequence: {percentiles}, longest {self.longest_sequence}; "
            f"{self.total_tokens} tokens in all",
            f"longest pair: {self.longest_pair} tokens, {self.longest_pair_row}",
            f"truncated: {self.truncated_prompts} prompts, {self.truncated_chosen} chosen, "
            f"{self.truncated_rejected} rejected; {self.tokens_cut} tokens cut; longest sequence "
            f"before: {self.longest_before_truncation}",
        ]
        if self.boundary_repairs:
            lines.append(
                f"prompt alone differs from prompt before a response: {self.boundary_repairs} pairs"
            )
        if self.ignored_columns:
            lines.append(f"ignored columns: {', '.join(self.ignored_columns)}")
        return lines + [f"warning: {text}" for text in self.warnings]

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON can hold them."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "skipped_rows": [str(error) for error in self.skipped_rows]}


def prepare_pairs(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    options: Preparation,
    cache_dir: Path,
    split: str = "train",
) -> tuple[PairDataset, PreparationReport]:
    """Tokenizes every row of a source into a file under `cache_dir`.

    The file's name is a digest of its contents, so it is never stale; it is complete or not there.

    Raises:
        DataError: bad rows, and `on_bad_row` is `error`; names up to ten of them.
        FileNotFoundError: a file of the source is missing.
        ValueError: no row is left, the source is of no accepted kind, or the tokenizer lacks a
            chat template or an end token that the rows need.
    """
    parts = parts_of(source, split=split)
    report = PreparationReport(
        sources=[{"source": p.label, "weight": p.weight, "rows": 0, "kept": 0} for p in parts]
    )
    strict = options.on_bad_row == "error"
    conversations = ends_written = 0
    traits = TokenizerTraits.of(tokenizer)
    with PairWriter(Path(cache_dir), weights=[part.weight for part in parts]) as writer:
        outcomes = _outcomes(parts, tokenizer, traits, options)
        for pair_id, (number, row, outcome) in enumerate(outcomes):
            report.rows += 1
            report.sources[number]["rows"] += 1
            if row is not None:
                report.count_columns(row)
            if isinstance(outcome, DataError):
                report.count_bad(outcome)
                if strict and len(report.skipped_rows) == _BAD_ROWS_NAMED:
                    break
            elif row is None or outcome is None:
                report.held_out += 1
            else:
                conversations += outcome.conversational
                ends_written += outcome.conversational and outcome.writes_end
                report.count_kept(row, outcome)
                report.sources[number]["kept"] += 1
                writer.add(pair_id, outcome, source=number)
                if report.kept == options.max_samples:
                    break
        _raise_if_unusable(report, strict)
        dataset = PairDataset(writer.commit())
    report.count_lengths(dataset.lengths)
    if conversations and not ends_written:
        _warn_no_end_token(report, tokenizer, traits)
    unread = [source["source"] for source in report.sources if not source["rows"]]
    if unread:
        report.warnings.append(f"max_samples was reached before {', '.join(unread)} was read")
        logger.warning(report.warnings[-1])
    return dataset, report


def _describe_source(source: Mapping[str, Any]) -> str:
    weight = f", weight {source['weight']:g}" if source["weight"] != 1 else ""
    return f"  {source['source']}: {source['rows']} read, {source['kept']} kept{weight}"


def _outcomes(
    parts: Sequence[Part],
    tokenizer: PreTrainedTokenizerBase,
    traits: TokenizerTraits,
    options: Preparation,
) -> Iterator[tuple[int, SourceRow | None, TokenizedRow | DataError | None]]:
    """Every row in order with its part's number and its ids or its error; None if held out."""
    for number, part in enumerate(parts):
        rows = part.rows()
        while chunk := list(itertools.islice(rows, _ROWS_PER_CALL)):
            formatted = [_format(row, options) for row in chunk]
            ready = [item for item in formatted if isinstance(item, tuple)]
            tokenized = iter(tokenize_rows(ready, tokenizer, traits=traits))
            for given, item in zip(chunk, formatted, strict=True):
                row = None if isinstance(given, DataError) else given
                outcome = next(tokenized) if isinstance(item, tuple) else item
                if row is not None and isinstance(outcome, TokenizedRow):
                    outcome = _truncate(row, outcome, options)
                yield number, row, outcome


def _format(
    row: SourceRow | DataError, options: Preparation
) -> tuple[SourceRow, FormattedRow] | DataError | None:
    if isinstance(row, DataError):
        return row
    try:
        formatted = format_row(row)
    except DataError as error:
        return error
    if options.template_options:
        variables = {**options.template_options, **formatted.template_options}
        formatted = replace(formatted, template_options=variables)
    return (row, formatted) if _belongs(formatted.prompt_key, options) else None


def _belongs(prompt_key: str, options: Preparation) -> bool:
    """Whether a row belongs to the part asked for; rows with the same prompt stay together."""
    if options.holdout is None:
        return True
    digest = hashlib.sha256(prompt_key.encode("utf-8", errors="surrogatepass")).hexdigest()
    part = "eval" if int(digest, 16) % options.holdout == 0 else "train"
    return part == options.holdout_part


def _truncate(row: SourceRow, pair: TokenizedRow, options: Preparation) -> TokenizedRow | DataError:
    try:
        return truncate_row(row, pair, max_length=options.max_length, mode=options.truncation_mode)
    except DataError as error:
        return error


def _raise_if_unusable(report: PreparationReport, strict: bool) -> None:
    if strict and report.skipped_rows:
        first, *others = report.skipped_rows
        more = [str(error) for error in others]
        if len(report.skipped_rows) == _BAD_ROWS_NAMED:
            more.append(f"(the first {_BAD_ROWS_NAMED} bad rows; there may be more)")
        raise first.with_lines([*more, "set on_bad_row: skip to leave such rows out"])
    if not report.kept:
        reasons = [f"{count} with {reason}" for reason, count in report.skipped.items()]
        if report.held_out:
            reasons.append(f"{report.held_out} in the other part of the holdout")
        raise ValueError(
            f"no pair left of {report.rows} rows: {'; '.join(reasons) or 'nothing given'}"
            + "".join(f"\n{error}" for error in report.skipped_rows[:_BAD_ROWS_NAMED])
        )


def _warn_no_end_token(
    report: PreparationReport, tokenizer: PreTrainedTokenizerBase, traits: TokenizerTraits
) -> None:
    report.warnings.append(
        f"the chat template of the tokenizer at {traits.name} never writes the tokenizer's end "
        f"token {tokenizer.eos_token!r} after an assistant turn: the trained model may not stop by "
        "itself; nothing was added (set chat_template, or eos_token to what ends its turns)"
    )
    logger.warning(report.warnings[-1])
