"""One row of preference data to token ids; a row that cannot be scored is refused with the reason.

Token policy ("full text"). The prompt, the prompt with `chosen` and the prompt with `rejected` are
tokenized as three whole texts. The border is the longest token prefix common to all three, so that
prompt ids are identical on both sides and every token that carries a character of a response is
scored, also where a token spans the border. With ␣ for a space and "␣$" one token:

    prompt "Price: "          P r i c e : ␣
    + chosen "$5"             P r i c e : ␣$ 5           prompt "Price:", chosen ␣$ 5 </s>
    + rejected "5 USD"        P r i c e : ␣ 5 ␣ U S D    prompt "Price:", rejected ␣ 5 ␣ U S D </s>

* Text rows: the begin token stands in front if the tokenizer itself puts it in front of a text;
  each response ends with exactly one end token.
* Text rows without a prompt: the prompt is the common token prefix of the two texts, so that a
  border never falls inside a token.
* Conversations: whatever the chat template writes, and nothing else.
* A prompt of zero tokens gets the begin token, so that the first response token has a context.
"""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from sdpo_scale.data.formats import FormattedRow, common_length
from sdpo_scale.data.rows import DataError, SourceRow

_TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedRow:
    """Token ids of one pair."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    conversational: bool
    repaired: bool
    """Whether the prompt alone has other tokens than the prompt inside the whole."""
    writes_end: bool
    """Whether both responses, before truncation, contain the tokenizer's end token."""
    cut: tuple[int, int, int] = (0, 0, 0)
    """Tokens lost to truncation: prompt, chosen, rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerTraits:
    """What the policy needs to know about a tokenizer."""

    name: str
    bos_id: int | None
    adds_bos: bool
    """Whether the tokenizer itself puts the begin token in front of a text."""
    eos_id: int | None
    has_template: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "TokenizerTraits":
        """Asks the tokenizer."""
        bos_id = tokenizer.bos_token_id
        return cls(
            name=str(tokenizer.name_or_path or type(tokenizer).__name__),
            bos_id=bos_id,
            adds_bos=bos_id is not None and list(tokenizer("x")["input_ids"])[:1] == [bos_id],
            eos_id=tokenizer.eos_token_id,
            has_template=bool(tokenizer.chat_template),
        )


def render_row(
    row: SourceRow,
    formatted: FormattedRow,
    tokenizer: PreTrainedTokenizerBase,
    traits: TokenizerTraits,
) -> list[str]:
    """The whole texts to tokenize: prompt unless implicit, prompt + chosen, prompt + rejected.

    Raises:
        DataError: the template refuses the turns or loses text, or a text is not valid.
        ValueError: the tokenizer lacks what this format needs.
    """
    if isinstance(formatted.prompt, list):
        texts = _render_conversation(row, formatted, tokenizer, traits)
    else:
        if traits.eos_id is None:
            raise ValueError(
                f"the tokenizer at {traits.name} defines no end-of-sequence token, so a model "
                f"trained on text rows would never stop ({row.label}); set the option eos_token"
            )
        prompt = formatted.prompt or ""
        texts = [prompt] if formatted.prompt is not None else []
        texts += [prompt + str(formatted.chosen), prompt + str(formatted.rejected)]
    for column, text in zip(("rejected", "chosen", "prompt"), reversed(texts), strict=False):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise row.error(column, "not valid text: half of a surrogate pair") from None
    return texts


def _render_conversation(
    row: SourceRow,
    formatted: FormattedRow,
    tokenizer: PreTrainedTokenizerBase,
    traits: TokenizerTraits,
) -> list[str]:
    if not traits.has_template:
        raise ValueError(
            f"the tokenizer at {traits.name} has no chat template but the data is conversational "
            f"({row.label}); set the option chat_template"
        )
    prompt: Any = formatted.prompt
    texts = []
    for column, turns in (
        ("prompt", []),
        ("chosen", formatted.chosen),
        ("rejected", formatted.rejected),
    ):
        messages = [*prompt, *turns]
        try:
            text = tokenizer.apply_chat_template(
                messages,
                tools=formatted.tools,
                add_generation_prompt=column == "prompt",
                tokenize=False,
                **formatted.template_options,
            )
        except _TEMPLATE_FAILURES as error:
            roles = ", ".join(str(turn["role"]) for turn in messages)
            raise row.error(
                column, "refused by the chat template", f"roles {roles}: {error}"
            ) from None
        _check_turns(row, column, turns, str(text))
        texts.append(str(text))
    return texts


def _check_turns(row: SourceRow, column: str, turns: Sequence[Any], rendered: str) -> None:
    """Refuses a response of which the template loses text, or that holds turns of others."""
    squeezed = None
    for turn in turns:
        for text in _spoken_texts(turn) if turn["role"] == "assistant" else ():
            if text in rendered:
                continue
            squeezed = squeezed or "".join(rendered.split())
            lost = _lost_text(text, squeezed)
            if lost:
                raise row.error(column, "text lost by the chat template", repr(lost[:200]))
    for turn in turns:
        if turn["role"] != "assistant":
            reason = f"role {turn['role']} inside a response: only assistant turns are scored"
            raise row.error(column, reason)


def _spoken_texts(turn: dict[str, Any]) -> Iterator[str]:
    """Everything an assistant turn says: content or its parts, reasoning, names of called tools."""
    content = turn.get("content")
    parts = content if isinstance(content, list) else [content]
    spoken = [part.get("text") if isinstance(part, dict) else part for part in parts]
    spoken += [turn.get("reasoning_content"), turn.get("thinking")]
    for call in turn.get("tool_calls") or ():
        if isinstance(call, dict):
            function = call.get("function", call)
            spoken.append(function.get("name") if isinstance(function, dict) else None)
    return (text for text in spoken if isinstance(text, str))


def _lost_text(text: str, squeezed: str) -> str:
    """The words between the longest beginning and the longest end that the rendering still holds.

    Templates trim and re-space what they print, so the comparison leaves white space out.
    """
    words = list(re.finditer(r"\S+", text))
    parts = [word.group() for word in words]
    count = len(parts)

    def head_is_lost(length: int) -> bool:
        return "".join(parts[:length]) not in squeezed

    head = bisect_left(range(1, count + 1), True, key=head_is_lost)

    def tail_is_lost(length: int) -> bool:
        return "".join(parts[count - length :]) not in squeezed

    tail = bisect_left(range(1, count - head + 1), True, key=tail_is_lost)
    return "" if head + tail >= count else text[words[head].start() : words[count - tail - 1].end()]


def split_row(
    row: SourceRow, formatted: FormattedRow, ids: Sequence[list[int]], *, traits: TokenizerTraits
) -> TokenizedRow:
    """Finds the border on token ids and puts begin and end tokens where the policy wants them.

    Args:
        row: for the errors' place.
        formatted: decides which policy applies.
        ids: ids of the texts that `render_row` gave.
        traits: of the tokenizer that made the ids.

    Raises:
        DataError: the prompt would be empty, or a response is empty or equal to the other.
    """
    *alone, full_chosen, full_rejected = ids
    conversational = isinstance(formatted.chosen, list)
    if alone:
        prompt = alone[0]
        border = min(common_length(prompt, full_chosen), common_length(prompt, full_rejected))
    else:
        prompt = full_chosen[: common_length(full_chosen, full_rejected)]
        border = len(prompt)
    repaired, prompt = border < len(prompt), prompt[:border]
    chosen, rejected = full_chosen[border:], full_rejected[border:]
    if not conversational and traits.eos_id is not None:
        chosen, rejected = (
            side if side[-1:] == [traits.eos_id] else [*side, traits.eos_id]
            for side in (chosen, rejected)
        )
    # Chat templates write their own begin token; a prompt of no tokens needs one in any format.
    if not prompt or (not conversational and traits.adds_bos and prompt[0] != traits.bos_id):
        if traits.bos_id is None:
            reason = (
                "empty, and the tokenizer has no bos_token: the first token would have no context"
            )
            raise row.error("prompt", reason)
        prompt = [traits.bos_id, *prompt]
    for column, side in (("chosen", chosen), ("rejected", rejected)):
        if not side:
            raise row.error(column, "no token to score")
    if chosen == rejected:
        raise row.error("rejected", "identical to chosen")
    return TokenizedRow(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        conversational=conversational,
        repaired=repaired,
        writes_end=traits.eos_id in chosen and traits.eos_id in rejected,
    )


def truncate_row(
    row: SourceRow, pair: TokenizedRow, *, max_length: int | None, mode: str
) -> TokenizedRow:
    """Cuts each sequence to `max_length` by its own length; a cut side gets no end token back.

    `keep_start` cuts the ends of the responses. `keep_end` first takes tokens off the beginning of
    the prompt, the same ones on both sides and at most all but one, then cuts the responses' ends.

    Raises:
        DataError: the prompt leaves no room, or the two sides are equal once cut.
    """
    prompt, chosen, rejected = pair.prompt, pair.chosen, pair.rejected
    longer = max(len(chosen), len(rejected))
    if max_length is None or len(prompt) + longer <= max_length:
        return pair
    if mode == "keep_end":
        prompt = prompt[-max(1, max_length - longer) :]
    elif len(prompt) >= max_length:
        detail = f"{len(prompt)} tokens, max_length {max_length}"
        raise row.error("prompt", "leaves no room for a response", detail)
    room = max_length - len(prompt)
    chosen, rejected = chosen[:room], rejected[:room]
    if chosen == rejected:
        raise row.error(
            "rejected", f"identical to chosen after truncation to max_length {max_length}"
        )
    cut = (
        len(pair.prompt) - len(prompt),
        len(pair.chosen) - len(chosen),
        len(pair.rejected) - len(rejected),
    )
    return replace(pair, prompt=prompt, chosen=chosen, rejected=rejected, cut=cut)


def tokenize_rows(
    rows: Sequence[tuple[SourceRow, FormattedRow]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    traits: TokenizerTraits,
) -> list[TokenizedRow | DataError]:
    """Tokenizes many rows with one tokenizer call; a bad row becomes its DataError.

    Raises:
        ValueError: the tokenizer lacks a chat template or an end token that the rows need.
    """
    rendered: list[list[str] | DataError] = []
    for row, formatted in rows:
        try:
            rendered.append(render_row(row, formatted, tokenizer, traits))
        except DataError as error:
            rendered.append(error)
    texts = [text for item in rendered if not isinstance(item, DataError) for text in item]
    # Nothing is added and nothing is cut here; the length warning of the tokenizer would mislead.
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    ids = iter(tokenizer(texts, **options)["input_ids"] if texts else [])
    results: list[TokenizedRow | DataError] = []
    for (row, formatted), item in zip(rows, rendered, strict=True):
        if isinstance(item, DataError):
            results.append(item)
            continue
        row_ids = [list(next(ids)) for _ in item]
        try:
            results.append(split_row(row, formatted, row_ids, traits=traits))
        except DataError as error:
            results.append(error)
    return results


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Digests that change when the tokenizer, its special tokens or its chat template change.

    Padding and truncation settings are left out: mere calls change them and they do not matter.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer written in Python
        state: Any = sorted(tokenizer.get_vocab().items())
    else:
        state = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = json.dumps(template, sort_keys=True)
    return {
        "tokenizer": _digest(
            json.dumps([state, tokenizer.special_tokens_map], sort_keys=True, default=str)
        ),
        "template": _digest(template) if template else "none",
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
