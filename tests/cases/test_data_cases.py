"""Small inputs distilled from public bug reports on data preparation, one test or more per case.

Each folder beside this file holds one case: the input and what must become of it. Folders are never
edited to fit the code; their bytes matter (line ends, a byte order mark, invalid UTF-8).
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sdpo_scale.data.preference import PairDataset, Preparation, PreparationReport, prepare_pairs
from sdpo_scale.data.sources import DataError
from tests.helpers.toy_tokenizers import build

CASES = Path(__file__).parent


def expected(case: str, name: str = "expected.json") -> Any:
    return json.loads((CASES / case / name).read_text("utf-8"))


class Prepared:
    """Pairs of one case as ids and as text."""

    def __init__(self, dataset: PairDataset, report: PreparationReport, tokenizer):
        self.dataset, self.report, self.tokenizer = dataset, report, tokenizer
        self.pairs = [dataset[i] for i in range(len(dataset))]
        self.ids = [tuple(part.tolist() for part in pair.tokens) for pair in self.pairs]

    def text(self, row: int) -> tuple[str, str, str]:
        return tuple(self.tokenizer.decode(part) for part in self.ids[row])

    def tokens(self, row: int) -> tuple[list[str], ...]:
        return tuple([self.tokenizer.decode([i]) for i in part] for part in self.ids[row])


@pytest.fixture
def prepare(tmp_path: Path):
    def run(source: Any, tokenizer: Any = "plain", **options: Any) -> Prepared:
        """Prepares `CASE/file` or rows in memory."""
        if isinstance(tokenizer, str):
            tokenizer = build(tokenizer)
        if isinstance(source, str):
            source = CASES / source
        preparation = Preparation(**options)
        found = prepare_pairs(source, tokenizer, options=preparation, cache_dir=tmp_path)
        return Prepared(*found, tokenizer)

    return run


def test_TOK_01_tokens_that_span_the_border_are_scored(prepare):
    prepared = prepare("TOK-01/train.jsonl")
    rows = [json.loads(line) for line in (CASES / "TOK-01/train.jsonl").read_text().splitlines()]
    for case, row in zip(expected("TOK-01")["rows"], rows, strict=True):
        want = case["policy_full_text"]
        prompt, chosen, rejected = prepared.tokens(case["row"])
        assert ("".join(prompt), chosen, rejected) == tuple(want.values())
        for column, response in (("chosen", chosen), ("rejected", rejected)):
            assert "".join(prompt + response) == row["prompt"] + row[column] + "</s>"
    assert prepared.report.boundary_repairs == 3


@pytest.mark.parametrize("case", expected("TOK-02", "run.json")["rows"], ids=str)
def test_TOK_02_one_begin_token(prepare, case):
    ((prompt, chosen, rejected),) = prepare([case["input"]], case["tokenizer"]).ids
    want = case["expect"]
    if "prompt_ids" in want:
        assert (prompt, chosen, rejected) == (
            want["prompt_ids"],
            want["chosen_ids"],
            want["rejected_ids"],
        )
    elif "prompt_len" in want:
        assert (len(prompt), prompt.count(1), prompt[0]) == (want["prompt_len"], 1, 1)
        assert 1 not in chosen + rejected
    else:
        assert prompt[0] == 4
        assert 1 not in prompt + chosen + rejected


def test_TOK_04_text_rows_need_an_end_token(prepare):
    tokenizer = build("nothing")
    with pytest.raises(
        ValueError, match=r"toy/nothing defines no end-of-sequence.*option eos_token"
    ):
        prepare("TOK-04/train.jsonl", tokenizer)
    option = expected("TOK-04")["with_option"]
    tokenizer.eos_token = option["eos_token"]
    ((_, chosen, _),) = prepare("TOK-04/train.jsonl", tokenizer).ids
    assert chosen == option["chosen_ids"]


@pytest.mark.parametrize("name", expected("TOK-05")["tokenizers"])
def test_TOK_05_the_end_token_is_scored_whatever_pads(prepare, name):
    prepared = prepare("TOK-05/train.jsonl", name)
    counts = expected("TOK-05")["scored_tokens"]
    assert prepared.dataset.lengths[:, 1:].tolist() == [counts["row0"], counts["row1"]]
    assert all(side[-1] == 2 for _, *sides in prepared.ids for side in sides)
    assert prepared.ids == prepare("TOK-05/train.jsonl", "plain").ids


def test_TOK_07_a_template_without_end_token_is_named_once(prepare, caplog):
    row = expected("TOK-07", "run.json")["input"]
    other = {**row, "chosen": [{"role": "assistant", "content": "yes"}]}
    with caplog.at_level(logging.WARNING):
        prepared = prepare([row, other], "no_eos_template")
    (warning,) = prepared.report.warnings
    assert "chat template of the tokenizer at toy/no_eos_template" in warning
    assert "'</s>'" in warning
    assert [record.getMessage() for record in caplog.records] == [warning]
    assert prepared.text(0)[1:] == ("yo\n", "no\n")
    plain = prepare([{"prompt": "hi", "chosen": "yo", "rejected": "no"}], "no_eos_template")
    assert plain.report.warnings == []
    assert plain.text(0)[1:] == ("yo</s>", "no</s>")


def test_TPL_01_text_lost_by_the_template(prepare):
    want = expected("TPL-01")
    with pytest.raises(DataError, match=r"row 1 .*column chosen: text lost") as caught:
        prepare("TPL-01/train.jsonl", "think_strip")
    assert want["row1"]["text_lost_by_template"] in str(caught.value)
    prompt, chosen, rejected = prepare("TPL-01/train.jsonl", "think_strip", on_bad_row="skip").text(
        0
    )
    assert want["row0"]["prompt_contains"] in prompt
    assert want["row0"]["prompt_lacks"] not in prompt
    assert want["row0"]["chosen_contains"] in chosen
    assert want["row0"]["rejected_contains"] in rejected


def test_TPL_03_borders_are_found_on_tokens(prepare):
    prepared = prepare("TPL-03/train.jsonl", "chatml")
    want = expected("TPL-03")
    assert [prepared.text(row)[0] for row in (0, 1)] == [
        want["row0"]["prompt"],
        want["row1"]["prompt"],
    ]
    _, chosen, rejected = prepared.ids[0]
    assert (chosen[0], rejected[0]) == (5, 4)
    assert chosen == [5]  # the text ends with the end token, no second one
    _, chosen_tokens, rejected_tokens = prepared.tokens(1)
    assert chosen_tokens[0] == want["row1"]["chosen_first_token"]
    assert rejected_tokens[0] == want["row1"]["rejected_first_token"]


def test_TPL_05_a_template_refusal_names_row_column_and_roles(prepare):
    with pytest.raises(DataError) as caught:
        prepare("TPL-05/train.jsonl", "strict")
    message = str(caught.value)
    for part in ("row 1 ", "column prompt", "roles system, user", "no system turns here"):
        assert part in message.splitlines()[0]
    assert "row 2" in message
    assert "row 3" in message
    report = prepare("TPL-05/train.jsonl", "strict", on_bad_row="skip").report
    assert (report.kept, report.skipped) == (1, {"prompt: refused by the chat template": 3})


def test_TPL_06_conversations_need_a_template(prepare):
    with pytest.raises(ValueError, match=r"toy/plain has no chat template.*option chat_template"):
        prepare("TPL-06/train.jsonl")


def test_TPL_07_tools_and_calls_are_rendered(prepare):
    prepared = prepare("TPL-07/train.jsonl", "tools")
    want = expected("TPL-07")
    prompt = prepared.text(0)[0]
    assert all(part in prompt for part in want["row0_prompt_contains"])
    assert not any(part in prompt for part in want["row0_prompt_lacks"])
    assert want["row1_chosen_contains"] in prepared.text(1)[1]


def test_TPL_09_only_the_assistant_responds(prepare):
    with pytest.raises(DataError, match=r"row 1 .*column rejected: role user, assistant expected"):
        prepare("TPL-09/train.jsonl", "chatml")


@pytest.mark.parametrize("tokenizer", ["chatml", "think_strip", "bos"])
def test_TPL_11_nothing_is_opened_behind_a_full_conversation(prepare, tokenizer):
    """The prompt ends with the assistant's header, once; responses neither hold nor end with it."""
    header = "<|im_start|>assistant\n"
    shared = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    turns = [[*shared, {"role": "assistant", "content": text}] for text in ("yes", "no")]
    prepared = prepare([{"chosen": turns[0], "rejected": turns[1]}], tokenizer)
    prompt, *responses = prepared.text(0)
    assert prompt.endswith(header)
    assert prompt.count(header) == 1
    end = prepared.tokenizer.eos_token
    assert responses == [f"yes{end}\n", f"no{end}\n"]
    explicit = [{"prompt": shared, "chosen": turns[0][2:], "rejected": turns[1][2:]}]
    assert prepare(explicit, tokenizer).ids == prepared.ids


def test_TPL_12_shared_middle_turns_are_prompt(prepare):
    prepared = prepare("TPL-12/train.jsonl")
    want = expected("TPL-12")
    prompt, chosen, rejected = prepared.text(0)
    assert want["prompt_contains"] in prompt
    accepted = [
        (option["chosen"] + "</s>", option["rejected"] + "</s>") for option in want["accept"]
    ]
    assert (chosen, rejected) in accepted
    row = json.loads((CASES / "TPL-12/train.jsonl").read_text("utf-8"))
    assert prompt + chosen == row["chosen"] + "</s>"
    assert prompt + rejected == row["rejected"] + "</s>"


def test_DAT_02_other_columns_are_ignored_and_named(prepare):
    extra, clean = prepare("DAT-02/train.jsonl"), prepare("DAT-02/train_clean.jsonl")
    assert extra.ids == clean.ids
    assert extra.dataset.path == clean.dataset.path
    assert {"id", "messages", "labels", "ref_chosen_logps"} <= set(extra.report.ignored_columns)
    (line,) = [line for line in extra.report.describe() if line.startswith("ignored columns")]
    assert line.count("messages") == 1
    assert clean.report.ignored_columns == []


def test_DAT_03_missing_null_and_empty_values(prepare):
    with pytest.raises(DataError) as caught:
        prepare("DAT-03/train.jsonl")
    assert expected("DAT-03")["message_shape"] in str(caught.value)
    assert (caught.value.row, caught.value.line, caught.value.column) == (1, 2, "chosen")
    prepared = prepare("DAT-03/train.jsonl", on_bad_row="skip")
    assert prepared.report.skipped == {"chosen: null": 1, "prompt: null": 1, "rejected: missing": 1}
    assert [pair.pair_id for pair in prepared.pairs] == [0, 3, 4, 5]
    assert prepared.ids[1][1] == [2]
    assert prepared.text(2) == ("Blank? ", "   </s>", "\n</s>")
    assert prepared.text(3) == ("<s>", "Hello</s>", "Bye</s>")
    report = prepare("DAT-03/train.jsonl", "chatml", on_bad_row="skip").report
    assert report.kept == 3
    assert str(report.skipped_rows[2]).endswith("the first token would have no context")


def test_DAT_05_formats_are_decided_row_by_row(prepare):
    prepared = prepare("DAT-05/train.jsonl", "chatml")
    assert prepared.text(0) == ("hi", "4<|im_end|>", "5<|im_end|>")
    assert prepared.text(1)[1:] == ("yo<|im_end|>\n", "no<|im_end|>\n")


def test_DAT_07_lines_end_at_newlines_only(prepare):
    prepared = prepare("DAT-07/train.jsonl")
    want = expected("DAT-07")["train.jsonl"]
    assert prepared.report.rows == want["rows"]
    # The toy vocabulary has no line separators: each becomes the unknown token.
    parts = want["row1_prompt"].replace("\u2028", "\0").replace("\x85", "\0").split("\0")
    assert prepared.text(1)[0] == "<unk>".join(parts)
    assert prepared.text(0)[0] == "one? "


def test_DAT_07_broken_lines_are_all_named(prepare):
    with pytest.raises(DataError) as caught:
        prepare("DAT-07/broken.jsonl")
    first, second, hint = str(caught.value).splitlines()
    assert "row 1 (line 2): invalid JSON" in first
    assert "row 2 (line 3): not UTF-8: byte 0xff" in second
    assert hint == "set on_bad_row: skip to leave such rows out"


def test_DAT_08_text_that_looks_like_dates_stays_text(prepare):
    prepared = prepare("DAT-08/train.jsonl")
    want = expected("DAT-08")
    assert [prepared.text(row)[1] for row in (0, 1)] == [
        want["row0"]["chosen_text"] + "</s>",
        want["row1"]["chosen_text"] + "</s>",
    ]
    assert len(prepared.ids[0][1]) == want["row0"]["scored_tokens_plain_tokenizer"]


def test_DAT_09_identical_sides_are_left_out(prepare):
    prepared = prepare("DAT-09/train.jsonl", max_length=10, on_bad_row="skip")
    assert [pair.pair_id for pair in prepared.pairs] == [2]
    assert prepared.report.skipped == {
        "rejected: identical to chosen": 1,
        "rejected: identical to chosen after truncation to max_length 10": 1,
    }


def test_DAT_10_tool_schemas_keep_their_own_keys(prepare):
    prepared = prepare(
        [str(CASES / "DAT-10/train.jsonl"), str(CASES / "TPL-07/train.jsonl")], "tools"
    )
    first, second = prepared.text(0)[0], prepared.text(1)[0]
    assert '"y"' not in first
    assert "null" not in first
    assert '"default": null' in second
    assert [pair.pair_id for pair in prepared.pairs] == [0, 1, 2, 3]


def test_LEN_01_no_row_without_a_scored_token(prepare):
    max_length = expected("LEN-01")["max_length"]
    prepared = prepare("LEN-01/train.jsonl", max_length=max_length, on_bad_row="skip")
    assert prepared.report.skipped == {"prompt: leaves no room for a response": 1}
    assert [pair.pair_id for pair in prepared.pairs] == [1, 2]
    assert prepared.dataset.lengths.tolist() == [[19, 1, 1], [7, 4, 3]]


def test_LEN_02_and_03_each_side_is_cut_by_its_own_length(prepare):
    want = expected("LEN-02")
    prepared = prepare("LEN-02/train.jsonl", max_length=want["max_length"])
    assert prepared.dataset.lengths.tolist() == [
        [want["prompt_tokens"], want["chosen_scored"], want["rejected_scored"]]
    ]
    _, chosen, rejected = prepared.ids[0]
    assert 2 not in chosen
    assert rejected.count(2) == 1
    assert prepared.text(0)[2] == want["rejected_text"]


def test_LEN_04_keep_end_cuts_the_prompt_first(prepare):
    options = {"max_length": 20, "truncation_mode": "keep_end"}
    prepared = prepare("LEN-01/train.jsonl", **options)
    assert prepared.dataset.lengths.tolist() == [[16, 4, 3], [16, 4, 3], [7, 4, 3]]
    assert all(side[-1] == 2 for _, *sides in prepared.ids for side in sides)
    assert prepared.report.truncated_prompts == 2
    assert prepared.report.tokens_cut == (40 - 16) + (19 - 16)
    # A prompt is never cut to nothing: the responses lose their ends instead.
    short = prepare("LEN-02/train.jsonl", max_length=12, truncation_mode="keep_end")
    assert short.dataset.lengths.tolist() == [[1, 11, 3]]
    assert short.text(0)[0] == "x"


def test_LEN_07_what_was_cut_is_reported(prepare):
    report = prepare("LEN-01/train.jsonl", max_length=20, on_bad_row="skip").report
    assert (report.rows, report.kept) == (3, 2)
    assert (report.truncated_prompts, report.truncated_chosen, report.truncated_rejected) == (
        0,
        1,
        1,
    )
    assert report.tokens_cut == 3 + 2
    assert (report.longest_before_truncation, report.longest_sequence) == (23, 20)
    assert report.length_percentiles == {"p50": 20, "p90": 20, "p99": 20}
    assert report.longest_pair == 21
    assert report.longest_pair_row.endswith("train.jsonl row 1 (line 2)")
    text = "\n".join(report.describe())
    for part in (
        "3 read, 2 kept, 1 skipped",
        "0 prompts, 1 chosen, 1 rejected; 5 tokens cut",
        "p90 20",
    ):
        assert part in text


def test_MOD_04_the_largest_token_id_is_reported(prepare):
    report = prepare([expected("MOD-04", "run.json")["row"]]).report
    assert (report.max_token_id, report.max_token_id_row) == (107, "<memory> row 0")
