"""One row at a time: which formats are accepted, which ids they give, and what is refused why."""

import pytest

from sdpo_scale.data.formats import format_row
from sdpo_scale.data.sources import DataError, SourceRow
from sdpo_scale.data.tokenization import (
    TokenizedRow,
    TokenizerTraits,
    tokenize_rows,
    tokenizer_fingerprint,
    truncate_row,
)
from tests.helpers.toy_tokenizers import build


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def source_row(values) -> SourceRow:
    return SourceRow(values=values, file="f", row=0)


def tokenize(values, tokenizer="chatml") -> TokenizedRow | DataError:
    tokenizer = build(tokenizer) if isinstance(tokenizer, str) else tokenizer
    row = source_row(values)
    rows = [(row, format_row(row))]
    (result,) = tokenize_rows(rows, tokenizer, traits=TokenizerTraits.of(tokenizer))
    return result


def texts(values, tokenizer="chatml") -> tuple[str, str, str]:
    tokenizer = build(tokenizer) if isinstance(tokenizer, str) else tokenizer
    pair = tokenize(values, tokenizer)
    assert isinstance(pair, TokenizedRow), pair
    return tuple(tokenizer.decode(ids) for ids in (pair.prompt, pair.chosen, pair.rejected))


def reason(values, tokenizer="chatml") -> str:
    error = tokenize(values, tokenizer)
    assert isinstance(error, DataError), error
    return str(error).removeprefix("f row 0, column ")


TURN = [user("q")]
CHAT = {"prompt": TURN, "chosen": [assistant("yo")], "rejected": [assistant("no")]}
RENDERED = (
    "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
    "yo<|im_end|>\n",
    "no<|im_end|>\n",
)


@pytest.mark.parametrize(
    "values",
    [
        CHAT,
        {"chosen": TURN + CHAT["chosen"], "rejected": TURN + CHAT["rejected"]},
        {"prompt": "q", "chosen": TURN + CHAT["chosen"], "rejected": TURN + CHAT["rejected"]},
        {**CHAT, "prompt": "q"},
        {**CHAT, "tools": None, "chat_template_kwargs": None},
        {**CHAT, "tools": "", "chat_template_kwargs": {"unused": 1}},
        {**CHAT, "tools": "[]"},
    ],
    ids=["explicit", "implicit", "text and turns", "text", "nulls", "options", "no tools"],
)
def test_every_conversational_format_gives_the_same_ids(values):
    assert texts(values) == RENDERED


def test_the_prompt_of_conversations_is_their_common_turns():
    shared = [user("q"), assistant("a"), user("again")]
    prompt, *responses = texts(
        {"chosen": [*shared, assistant("b")], "rejected": [*shared, assistant("c")]}
    )
    assert prompt.endswith("again<|im_end|>\n<|im_start|>assistant\n")
    assert responses == ["b<|im_end|>\n", "c<|im_end|>\n"]


def test_template_options_reach_the_template():
    tokenizer = build("chatml")
    tokenizer.chat_template = "{{- mark -}}" + tokenizer.chat_template
    prompt, *_ = texts({**CHAT, "chat_template_kwargs": {"mark": "!"}}, tokenizer)
    assert prompt == "!" + RENDERED[0]


@pytest.mark.parametrize("arguments", [{"x": None}, '{"x": null}'], ids=["object", "text"])
def test_tool_calls_are_handed_to_the_template_as_given(arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    values = {**CHAT, "chosen": [assistant(None, tool_calls=[call])]}
    written = '{"x": null}' if isinstance(arguments, dict) else '"{\\"x\\": null}"'
    assert texts(values, "tools")[1] == f"CALL add {written}<|im_end|>\n"


def test_a_prompt_rendered_otherwise_alone_is_counted_as_repaired():
    pair = tokenize(CHAT, "think_open")
    assert pair.repaired
    assert texts(CHAT, "think_open") == RENDERED
    assert not tokenize(CHAT).repaired


def test_text_rows_end_with_exactly_one_end_token():
    values = {"prompt": "q", "chosen": "yo</s>", "rejected": "no"}
    assert texts(values, "plain") == ("q", "yo</s>", "no</s>")
    ended = {"prompt": "q</s>", "chosen": "", "rejected": "no"}
    assert texts(ended, "plain") == ("q</s>", "</s>", "no</s>")


def test_one_begin_token_even_if_the_text_brings_its_own():
    values = {"prompt": "q", "chosen": "yo", "rejected": "no"}
    assert texts(values, "boseos") == ("<s>q", "yo</s>", "no</s>")
    assert texts({**values, "prompt": "<s>q"}, "bos")[0] == "<s>q"
    assert texts(values, "plain")[0] == "q"


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "", "chosen": "yo", "rejected": "no"},
        {"chosen": "yo", "rejected": "no"},
        {"prompt": ":", "chosen": ")", "rejected": "no"},
    ],
    ids=["empty", "nothing in common", "merged into the response"],
)
def test_an_empty_prompt_becomes_the_begin_token(values):
    assert texts(values, "plain")[0] == "<s>"
    assert texts(values, "bos")[0] == "<s>"
    assert reason(values, "chatml").startswith("prompt: empty, and the tokenizer has no bos_token")


def test_implicit_text_rows_where_one_continues_the_other():
    assert texts({"chosen": "abc", "rejected": "abc d"}, "plain") == ("abc", "</s>", " d</s>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": 5}, "chosen: neither text nor a list of messages: of type int"),
        ({"rejected": []}, "rejected: an empty list of messages"),
        ({"prompt": []}, "prompt: an empty list of messages"),
        ({"prompt": 1.5}, "prompt: neither text nor a list of messages: of type float"),
        ({"prompt": None}, "prompt: null"),
        ({"rejected": "no"}, "rejected: not of the same kind as chosen: one is text"),
        (
            {"chosen": "yo", "rejected": "no"},
            "chosen: text, although the prompt is a list of messages",
        ),
        ({"chosen": [{"content": "x"}]}, "chosen: not a list of messages: turn 0 has no role"),
        ({"chosen": ["yo"]}, "chosen: not a list of messages: turn 0 has no role"),
        ({"chosen": [user("x")]}, "chosen: role user, assistant expected"),
        ({"tools": "[1"}, "tools: invalid JSON: "),
        ({"tools": {"a": 1}}, "tools: neither a list nor a JSON array: of type dict"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: not an object: of type list"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs: holds a reserved name: tokenize",
        ),
    ],
)
def test_rows_of_no_known_format_are_refused(changes, message):
    with pytest.raises(DataError) as caught:
        format_row(source_row({**CHAT, **changes}))
    assert str(caught.value).startswith(f"f row 0, column {message}")


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        (
            [user("a")],
            [user("b")],
            "rejected: shares no first turn with chosen, and there is no prompt",
        ),
        ([user("a"), assistant("b")], [user("a"), assistant("b")], "rejected: identical to chosen"),
        ([user("a")], [user("a"), assistant("b")], "chosen: no turn after the ones it shares"),
        (
            [user("a"), user("b")],
            [user("a"), assistant("b")],
            "chosen: role user, assistant expected",
        ),
    ],
)
def test_conversations_that_cannot_be_compared_are_refused(chosen, rejected, message):
    with pytest.raises(DataError) as caught:
        format_row(source_row({"chosen": chosen, "rejected": rejected}))
    assert f"column {message}" in str(caught.value)


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_turns_of_others_inside_a_response_are_refused(role):
    turns = [assistant("a"), {"role": role, "content": "b"}, assistant("c")]
    message = f"chosen: role {role} inside a response: only assistant turns are scored"
    assert reason({**CHAT, "chosen": turns}) == message


@pytest.mark.parametrize(
    ("turn", "lost"),
    [
        (assistant("yo", reasoning_content="because of it"), "'because of it'"),
        (assistant("yo", tool_calls=[{"function": {"name": "add", "arguments": {}}}]), "'add'"),
        (assistant("yo", tool_calls=[{"name": "add"}]), "'add'"),
    ],
)
def test_what_a_template_does_not_print_is_lost(turn, lost):
    assert reason({**CHAT, "chosen": [turn]}) == f"chosen: text lost by the chat template: {lost}"


@pytest.mark.parametrize(
    ("written", "lost"),
    [
        ("turn['content'] | trim", None),
        ("turn['content'] | replace('</think>', '</think>\\n\\n')", None),
        ("turn['content'] | replace('three', 'inserted three')", None),
        ("turn['content'].split('</think>')[-1]", "'<think>one\\ntwo</think>'"),
        ("turn['content'][:12]", "'two</think> three'"),
        ("turn['content'] | replace('two</think>', '')", "'two</think>'"),
    ],
)
def test_respaced_text_is_not_lost(written, lost):
    tokenizer = build("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("turn['content']", written)
    values = {**CHAT, "chosen": [assistant("  <think>one\ntwo</think> three \n")]}
    if lost is None:
        assert "three" in texts(values, tokenizer)[1]
    else:
        assert reason(values, tokenizer) == f"chosen: text lost by the chat template: {lost}"


def test_content_in_parts_is_compared_part_by_part():
    tokenizer = build("chatml")
    parts = "(turn['content'] if turn['content'] is string else turn['content'][0]['text'])"
    tokenizer.chat_template = tokenizer.chat_template.replace("turn['content']", parts)
    part = {"type": "text", "text": "yo"}
    assert texts({**CHAT, "chosen": [assistant([part])]}, tokenizer)[1] == "yo<|im_end|>\n"
    two = [assistant([part, {"type": "text", "text": "more"}])]
    assert reason({**CHAT, "chosen": two}, tokenizer).endswith("lost by the chat template: 'more'")


def test_errors_inside_templates_name_the_roles():
    message = reason({**CHAT, "prompt": [user(5)]})
    assert message.startswith("prompt: refused by the chat template: roles user: can only conc")
    message = reason({**CHAT, "chosen": [assistant(None)]})
    assert message.startswith("chosen: refused by the chat template: roles user, assistant: ")


def test_half_a_surrogate_pair_is_refused():
    values = {"prompt": "q", "chosen": "yo", "rejected": "n\ud800"}
    assert reason(values).startswith("rejected: not valid text")
    assert reason({"chosen": "yo\ud800", "rejected": "no"}).startswith("chosen: not valid text")


def test_a_response_without_tokens_is_refused():
    tokenizer = build("plain")
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    assert reason({**CHAT, "chosen": [assistant("")]}, tokenizer) == "chosen: no token to score"


def test_identical_ids_are_refused():
    assert (
        reason({"prompt": "q", "chosen": "yo", "rejected": "yo"}) == "rejected: identical to chosen"
    )
    assert reason({"chosen": "yo", "rejected": "yo<|im_end|>"}) == "rejected: identical to chosen"


@pytest.mark.parametrize(
    ("max_length", "mode", "sizes"),
    [
        (None, "keep_start", (4, 6, 3)),
        (10, "keep_start", (4, 6, 3)),
        (9, "keep_start", (4, 5, 3)),
        (6, "keep_start", (4, 2, 2)),
        (9, "keep_end", (3, 6, 3)),
        (5, "keep_end", (1, 4, 3)),
    ],
)
def test_truncation(max_length, mode, sizes):
    pair = TokenizedRow(
        prompt=[1, 2, 3, 4],
        chosen=[5, 6, 7, 8, 9, 10],
        rejected=[6, 7, 8],
        conversational=False,
        repaired=False,
        writes_end=False,
    )
    cut = truncate_row(source_row({}), pair, max_length=max_length, mode=mode)
    assert (len(cut.prompt), len(cut.chosen), len(cut.rejected)) == sizes
    assert cut.prompt == pair.prompt[4 - sizes[0] :]
    assert cut.chosen == pair.chosen[: sizes[1]]
    assert cut.rejected == pair.rejected[: sizes[2]]
    assert cut.cut == (4 - sizes[0], 6 - sizes[1], 3 - sizes[2])


def test_truncation_refuses_what_it_would_empty_or_make_equal():
    pair = tokenize({"prompt": "abcd", "chosen": "xxxy", "rejected": "xxxz"}, "plain")
    row = source_row({})
    with pytest.raises(DataError, match="column prompt: leaves no room for a response: 3 tokens"):
        truncate_row(row, pair, max_length=3, mode="keep_start")
    with pytest.raises(DataError, match="identical to chosen after truncation to max_length 4"):
        truncate_row(row, pair, max_length=4, mode="keep_end")


def test_a_bad_row_does_not_disturb_its_neighbours():
    tokenizer = build("chatml")
    bad = {**CHAT, "chosen": [assistant(None)]}
    rows = [source_row(values) for values in (CHAT, bad, {"chosen": "ab", "rejected": "ac"}, CHAT)]
    pairs = [(row, format_row(row)) for row in rows]
    first, error, text, last = tokenize_rows(pairs, tokenizer, traits=TokenizerTraits.of(tokenizer))
    assert first == last == tokenize(CHAT)
    assert isinstance(error, DataError)
    # "ab" is one token: the texts have none in common, and this tokenizer has no begin token.
    assert isinstance(text, DataError)
    assert tokenize_rows([], tokenizer, traits=TokenizerTraits.of(tokenizer)) == []


def test_fingerprint_follows_tokenizer_tokens_and_template():
    names = ("plain", "bos", "boseos", "chatml", "strict", "nopad")
    prints = {name: tokenizer_fingerprint(build(name)) for name in names}
    assert len({value["tokenizer"] for value in prints.values()}) == len(names) - 1
    assert prints["strict"]["tokenizer"] == prints["plain"]["tokenizer"]
    assert len({value["template"] for value in prints.values()}) == 4
    assert prints["plain"]["template"] == "none"
    used = build("plain")
    used(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(used) == prints["plain"]
    used.chat_template = {"default": "x", "tool_use": "y"}
    assert tokenizer_fingerprint(used)["template"] != "none"


def test_fingerprint_of_a_tokenizer_written_in_python():
    class Plain:
        chat_template = None
        special_tokens_map = {"eos_token": "b"}  # noqa: RUF012

        def get_vocab(self):
            return {"a": 0, "b": 1}

    assert (
        tokenizer_fingerprint(Plain())["tokenizer"] == tokenizer_fingerprint(Plain())["tokenizer"]
    )
