"""The formats a row of preference data may have, decided row by row.

| format | `prompt` | `chosen`, `rejected` |
|---|---|---|
| text | text | texts that continue the prompt |
| text, implicit prompt | no such column | full texts |
| conversation | messages | messages, the first by the assistant |
| conversation, text prompt | text: one user turn | messages, the first by the assistant |
| conversation, implicit prompt | no such column, or text | full conversations with a shared start |

Conversations may bring `tools` (a list, or the list as JSON text) and `chat_template_kwargs` (an
object, or the object as JSON text). A text prompt beside full conversations is taken to be repeated
in their turns.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sdpo_scale.data.rows import SourceRow

Messages: TypeAlias = list[dict[str, Any]]

KNOWN_COLUMNS = ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs")
RESERVED_OPTIONS = {
    *("conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""What `apply_chat_template` takes for itself and does not hand to the template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormattedRow:
    """A row whose format is known: texts, or lists of messages."""

    prompt: str | Messages | None
    """None if both responses are full texts; a list if and only if the responses are lists."""
    chosen: str | Messages
    rejected: str | Messages
    prompt_key: str
    """Equal for rows with the same prompt; decides to which part of a holdout a row belongs."""
    tools: list[Any] | None = None
    """Tool schemas for the chat template."""
    template_options: dict[str, Any]
    """Further variables for the chat template."""


def format_row(row: SourceRow) -> FormattedRow:
    """Decides the format of one row and checks its columns; later rows may have another format.

    Raises:
        DataError: a column is missing, null, of the wrong type or of the wrong roles.
    """
    chosen, rejected = _response(row, "chosen"), _response(row, "rejected")
    prompt = _prompt(row)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if isinstance(prompt, list):
            raise row.error("chosen", "text, although the prompt is a list of messages")
        key = chosen[: common_length(chosen, rejected)] if prompt is None else prompt
        return FormattedRow(
            prompt=prompt, chosen=chosen, rejected=rejected, prompt_key=key, template_options={}
        )
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _format_conversation(row, prompt, chosen, rejected)
    raise row.error(
        "rejected", "not of the same kind as chosen", "one is text, one a list of messages"
    )


def _response(row: SourceRow, column: str) -> str | Messages:
    if column not in row.values:
        raise row.error(column, "missing")
    return _text_or_messages(row, column)


def _prompt(row: SourceRow) -> str | Messages | None:
    return _text_or_messages(row, "prompt") if "prompt" in row.values else None


def _text_or_messages(row: SourceRow, column: str) -> str | Messages:
    value = row.values[column]
    if value is None:
        raise row.error(column, "null")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise row.error(
            column, "neither text nor a list of messages", f"of type {type(value).__name__}"
        )
    if not value:
        raise row.error(column, "an empty list of messages")
    for number, turn in enumerate(value):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise row.error(column, "not a list of messages", f"turn {number} has no role")
    return value


def _format_conversation(
    row: SourceRow, prompt: str | Messages | None, chosen: Messages, rejected: Messages
) -> FormattedRow:
    key = prompt if isinstance(prompt, str) else None
    if isinstance(prompt, str) and chosen[0]["role"] == "assistant":
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(
        prompt, list
    ):  # full conversations, with or without their first turn repeated as text
        shared = common_length(chosen, rejected)
        if shared == 0:
            raise row.error("rejected", "shares no first turn with chosen, and there is no prompt")
        if shared == len(chosen) == len(rejected):
            raise row.error("rejected", "identical to chosen")
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    for column, turns in (("chosen", chosen), ("rejected", rejected)):
        if not turns:
            raise row.error(column, "no turn after the ones it shares with the other side")
        if turns[0]["role"] != "assistant":
            raise row.error(column, f"role {turns[0]['role']}, assistant expected")
    if key is None:
        key = json.dumps(
            prompt, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str
        )
    return FormattedRow(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        prompt_key=key,
        tools=_tools(row),
        template_options=_template_options(row),
    )


def _tools(row: SourceRow) -> list[Any] | None:
    tools = _from_json(row, "tools")
    if tools is not None and not isinstance(tools, list):
        raise row.error(
            "tools", "neither a list nor a JSON array", f"of type {type(tools).__name__}"
        )
    return tools or None


def _template_options(row: SourceRow) -> dict[str, Any]:
    options = _from_json(row, "chat_template_kwargs")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise row.error(
            "chat_template_kwargs", "not an object", f"of type {type(options).__name__}"
        )
    reserved = sorted(RESERVED_OPTIONS & options.keys())
    if reserved:
        raise row.error("chat_template_kwargs", "holds a reserved name", ", ".join(reserved))
    return options


def _from_json(row: SourceRow, column: str) -> Any:
    """A column that may hold JSON text."""
    value = row.values.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise row.error(column, "invalid JSON", str(error)) from None


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])
