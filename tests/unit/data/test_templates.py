"""A template that branches on everything: thinking, system turns, tools, nulls, variables.

Each row takes the public way, from a list in memory, JSON Lines, parquet and a `datasets.Dataset`.
Arrow gives every dictionary of a column the union of all keys, so that rows of different shape are
padded with nulls in the last two; what is trained on must not depend on that.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from sdpo_scale.data.preference import DataError, Preparation, prepare_pairs
from tests.helpers.toy_tokenizers import build

SOURCES: dict[str, Callable[[list[dict[str, Any]], Path], Any]] = {}
Texts = list[tuple[str, ...]]


def source(function: Callable[[list[dict[str, Any]], Path], Any]) -> Any:
    SOURCES[function.__name__] = function
    return function


@source
def memory(rows: list[dict[str, Any]], folder: Path) -> Any:
    return rows


@source
def json_lines(rows: list[dict[str, Any]], folder: Path) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@source
def dataset(rows: list[dict[str, Any]], folder: Path) -> Any:
    columns = {name: None for row in rows for name in row}  # from_list takes the first row's only
    return datasets.Dataset.from_list([{**columns, **row} for row in rows])


@source
def parquet(rows: list[dict[str, Any]], folder: Path) -> Any:
    path = folder / "rows.parquet"
    dataset(rows, folder).to_parquet(path)
    return path


@pytest.fixture(params=SOURCES)
def texts(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Texts]:
    """Rows → prompt, chosen and rejected of each pair as text."""

    def prepare(rows: list[dict[str, Any]], **template_options: Any) -> Texts:
        tokenizer = build("qwen3")
        pairs, _ = prepare_pairs(
            SOURCES[request.param](rows, tmp_path),
            tokenizer,
            options=Preparation(template_options=template_options),
            cache_dir=tmp_path / "cache",
        )
        return [tuple(map(tokenizer.decode, pairs[i].tokens)) for i in range(len(pairs))]

    return prepare


def turn(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def written(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


QUESTION = turn("user", "q")
OPENED = "<|im_start|>assistant\n"
PLAIN = {
    "prompt": [QUESTION],
    "chosen": [turn("assistant", "yes")],
    "rejected": [turn("assistant", "no")],
}
EMPTY = "<think>\n\n</think>\n\n"


def test_thinking_stays_in_responses_and_leaves_the_history(texts: Callable[..., Texts]):
    turns = [QUESTION, turn("assistant", "<think>\nold\n</think>\n\nhm"), turn("user", "and?")]
    chosen = turn("assistant", "<think>\nnew\n</think>\n\nyes")
    apart = turn("assistant", "no", reasoning_content="other")
    prompt, *responses = texts([{"prompt": turns, "chosen": [chosen], "rejected": [apart]}, PLAIN])[
        0
    ]
    history = written("user", "q") + written("assistant", "hm") + written("user", "and?")
    assert prompt == history + OPENED
    assert responses == [
        "<think>\nnew\n</think>\n\nyes<|im_end|>\n",
        "<think>\nother\n</think>\n\nno<|im_end|>\n",
    ]


def test_full_conversations_with_thinking_give_the_same_pair(texts: Callable[..., Texts]):
    history = [QUESTION, turn("assistant", "<think>old</think>hm"), turn("user", "and?")]
    sides = {name: [turn("assistant", f"<think>{name}</think>{name}")] for name in ("a", "b")}
    explicit = {"prompt": history, "chosen": sides["a"], "rejected": sides["b"]}
    implicit = {"chosen": history + sides["a"], "rejected": history + sides["b"]}
    assert texts([explicit]) == texts([implicit])


def test_thinking_that_the_template_would_drop_from_a_response_is_refused(
    texts: Callable[..., Texts],
):
    lost = turn("assistant", "before<think>a</think>b", reasoning_content=None)
    with pytest.raises(DataError, match=r"row 1.*, column chosen: text lost .*'before<think>a"):
        texts([PLAIN, {**PLAIN, "chosen": [lost]}])


@pytest.mark.parametrize("system", [None, "be kind"])
@pytest.mark.parametrize("tools", [None, [tool("add", x={"type": "number"})]])
def test_system_turns_and_tools_share_a_turn(
    system: str | None, tools: Any, texts: Callable[..., Texts]
):
    start = [turn("system", system)] if system else []
    row = {**PLAIN, "prompt": [*start, QUESTION], "tools": tools}
    other = {**PLAIN, "tools": [tool("sub", y={"kind": "text", "default": "0"})]}
    listed = f"# Tools\n{json.dumps(tools[0])}" if tools else None
    head = "\n".join(filter(None, (system, listed)))
    expected = (written("system", head) if head else "") + written("user", "q") + OPENED
    pairs = texts([row, other])
    assert pairs[0][0].removesuffix(EMPTY) == expected
    assert '"type": "number"' not in pairs[1][0]


def test_calls_and_answers_of_tools_are_prompt_and_calls_are_scored(texts: Callable[..., Texts]):
    asked = turn("assistant", None, tool_calls=[call("add", x=1), call("sub", y="2")])
    thought = {**asked, "reasoning_content": "why", "tool_calls": [call("add", x=1)]}
    prompt = [QUESTION, thought, turn("tool", "1"), turn("tool", "2")]
    rows = [
        {**PLAIN, "prompt": prompt},
        {**PLAIN, "chosen": [asked]},
        {**PLAIN, "rejected": [turn("assistant", "text", tool_calls=[call("sub", y="3")])]},
    ]
    answered, called, beside = texts(rows)
    answers = "<tool_response>1</tool_response><tool_response>2</tool_response>"
    add = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    sub = '<tool_call>{"name": "sub", "arguments": {"y": "2"}}</tool_call>'
    assert answered[0].startswith(
        written("user", "q")
        + written("assistant", f"<think>\nwhy\n</think>\n\n{add}")
        + written("user", answers)
        + OPENED
    )
    assert called[1].endswith(f"{add}\n{sub}<|im_end|>\n")
    assert beside[2].endswith(f"text\n{sub.replace('2', '3')}<|im_end|>\n")


def test_variables_of_the_run_and_of_a_row_reach_the_template(texts: Callable[..., Texts]):
    thinking = {"enable_thinking": True, "unused": "1"}
    rows = [
        PLAIN,
        {**PLAIN, "chat_template_kwargs": thinking},
        {**PLAIN, "chat_template_kwargs": {"enable_thinking": False, "unused": None}},
    ]
    opened = written("user", "q") + OPENED
    # a response without thoughts is written with empty ones: they belong to both sides' prompt
    # where the prompt opens and closes them, and are scored where the model has to write them
    for defaults in ({}, {"enable_thinking": False}):
        pairs = texts(rows, **defaults)
        closed = bool(defaults)
        assert [pair[0] == opened + EMPTY for pair in pairs] == [closed, False, True]
        assert [pair[1] for pair in pairs] == [
            ("" if closed else EMPTY) + "yes<|im_end|>\n",
            EMPTY + "yes<|im_end|>\n",
            "yes<|im_end|>\n",
        ]


def test_nulls_that_a_user_wrote_reach_the_prompt_from_json_only(tmp_path: Path):
    """Arrow cannot tell them from its padding, so there a null is no key."""
    rows = [{**PLAIN, "tools": [tool("add", x={"default": None})]}]
    found = {}
    for name in SOURCES:
        tokenizer = build("qwen3")
        pairs, _ = prepare_pairs(
            SOURCES[name](rows, tmp_path), tokenizer, options=Preparation(), cache_dir=tmp_path
        )
        found[name] = '"default": null' in tokenizer.decode(pairs[0].prompt_ids)
    assert found == {"memory": True, "json_lines": True, "dataset": False, "parquet": False}
