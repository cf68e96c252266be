"""Every kind of bad row, in a file beside a good one: named by place, column, reason; counted."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import sdpo_scale.data
from sdpo_scale.data.preference import DataError, Preparation, prepare_pairs
from tests.helpers.toy_tokenizers import build

BARE = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
TEXT = {"prompt": "ask: ", "chosen": "yes", "rejected": "no"}


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


ASK, YES, NO = turn("user", "q"), turn("assistant", "yes"), turn("assistant", "no")
CHAT = {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}

# Row (or its line), column, reason; then the tokenizer and options that it takes.
BAD: list[tuple[Any, ...]] = [
    (b'{"prompt": ', None, "invalid JSON"),
    (b'{"prompt": "\xff"}', None, "not UTF-8"),
    ([1], None, "not an object"),
    ({"prompt": "p", "rejected": "no"}, "chosen", "missing"),
    ({**TEXT, "rejected": None}, "rejected", "null"),
    ({**TEXT, "prompt": None}, "prompt", "null"),
    ({**TEXT, "chosen": 5}, "chosen", "neither text nor a list of messages"),
    ({**TEXT, "rejected": []}, "rejected", "an empty list of messages"),
    ({**TEXT, "chosen": [{"content": "x"}]}, "chosen", "not a list of messages"),
    ({**TEXT, "chosen": [YES]}, "rejected", "not of the same kind as chosen"),
    (
        {**TEXT, "prompt": [ASK]},
        "chosen",
        "text, although the prompt is a list of messages",
    ),
    (
        {"chosen": [ASK, YES], "rejected": [NO]},
        "rejected",
        "shares no first turn with chosen, and there is no prompt",
    ),
    ({"chosen": [ASK, YES], "rejected": [ASK, YES]}, "rejected", "identical to chosen"),
    (
        {"chosen": [ASK, YES], "rejected": [ASK]},
        "rejected",
        "no turn after the ones it shares with the other side",
    ),
    ({**CHAT, "rejected": [ASK]}, "rejected", "role user, assistant expected"),
    (
        {**CHAT, "chosen": [YES, ASK, YES]},
        "chosen",
        "role user inside a response: only assistant turns are scored",
    ),
    ({**CHAT, "tools": 5}, "tools", "neither a list nor a JSON array"),
    ({**CHAT, "tools": "[1"}, "tools", "invalid JSON"),
    ({**CHAT, "chat_template_kwargs": "[1]"}, "chat_template_kwargs", "not an object"),
    (
        {**CHAT, "chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs",
        "holds a reserved name",
    ),
    ({**CHAT, "prompt": [turn("system", "s")]}, "prompt", "refused by the chat template", "strict"),
    (
        {**CHAT, "chosen": [{**YES, "reasoning_content": "why"}]},
        "chosen",
        "text lost by the chat template",
    ),
    ({**TEXT, "chosen": "a\ud800"}, "chosen", "not valid text: half of a surrogate pair"),
    (
        {**TEXT, "prompt": ""},
        "prompt",
        "empty, and the tokenizer has no bos_token: the first token would have no context",
    ),
    ({**CHAT, "chosen": [turn("assistant", "")]}, "chosen", "no token to score", BARE),
    ({**TEXT, "rejected": "yes"}, "rejected", "identical to chosen"),
    (
        {**TEXT, "prompt": "p" * 20},
        "prompt",
        "leaves no room for a response",
        "chatml",
        {"max_length": 12},
    ),
    (
        {**TEXT, "chosen": "y" * 20 + "1", "rejected": "y" * 20 + "2"},
        "rejected",
        "identical to chosen after truncation to max_length 12",
        "chatml",
        {"max_length": 12},
    ),
]
# Of whole files, whose tests are in test_sources.py and test_mixtures.py.
OF_FILES = {
    *('neither an array of objects nor {"data": [...]}', "not a readable parquet file"),
    *("more than once in the header", "another number of cells", "invalid CSV"),
}


@pytest.mark.parametrize(
    ("row", "column", "reason", "more"), [(*case[:3], case[3:]) for case in BAD], ids=str
)
def test_a_bad_row_is_named_and_the_good_one_beside_it_is_kept(
    row: Any, column: str | None, reason: str, more: tuple[Any, ...], tmp_path: Path
):
    name, options = (*more, *("chatml", {})[len(more) :])
    tokenizer = build("chatml" if name == BARE else name)
    if name == BARE:
        tokenizer.chat_template = BARE
    path = tmp_path / "rows.jsonl"
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    path.write_bytes(json.dumps(TEXT).encode() + b"\n" + line + b"\n")
    place = f"{path} row 1 (line 2)" + (f", column {column}" if column else "")
    for on_bad_row in ("error", "skip"):
        chosen = Preparation(on_bad_row=on_bad_row, **options)
        if on_bad_row == "error":
            with pytest.raises(DataError) as caught:
                prepare_pairs(path, tokenizer, options=chosen, cache_dir=tmp_path / "cache")
            message = str(caught.value)
            assert message.startswith(f"{place}: {reason}")
            assert "on_bad_row: skip" in message.splitlines()[-1]
        else:
            _, report = prepare_pairs(path, tokenizer, options=chosen, cache_dir=tmp_path / "cache")
            assert report.kept == 1
            assert report.skipped == {f"{column}: {reason}" if column else reason: 1}


def reasons_in_the_code() -> set[str]:
    """What stands where an error's reason is given; of a text with values in it, its beginning."""
    found = set()
    for path in Path(sdpo_scale.data.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".error"):
                given = node.args[1:2]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "DataError":
                given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reason":
                given = [node.value]
            else:
                continue
            for value in given:
                start = value.values[0] if isinstance(value, ast.JoinedStr) else value
                if isinstance(start, ast.Constant):
                    found.add(str(start.value))
    return found


def test_every_reason_is_tried():
    tried = {reason for _, _, reason, *_ in BAD} | OF_FILES
    found = reasons_in_the_code()
    assert len(found) > 20
    assert {r for r in found if not any(t.startswith(r) for t in tried)} == set()
