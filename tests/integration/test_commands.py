"""The commands in this process: what they print, what they leave, and how they refuse bad input."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, OPTConfig

import sdpo_scale.demo
import sdpo_scale.inputs
import sdpo_scale.scoring
from sdpo_scale.cli import main
from sdpo_scale.options import read_config
from sdpo_scale.trainer import SDPOTrainer
from tests.helpers.runs import (
    chat_rows,
    options,
    read_lines,
    save_model,
    steps_of,
    text_rows,
    write_rows,
)

CASES = Path(__file__).resolve().parents[1] / "cases"
Write = Callable[..., str]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its pairs, used by all tests and never written to."""
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    write_rows(folder / "train.jsonl", text_rows(10))
    write_rows(folder / "eval.jsonl", text_rows(5, seed=1))
    return folder


@pytest.fixture
def write_config(files: Path, tmp_path: Path) -> Write:
    """Writes a YAML file and returns its path; None leaves an option out."""

    def write(**changes: Any) -> str:
        changes = {"model": files / "model", "train_dataset": files / "train.jsonl", **changes}
        values = options(tmp_path, **changes)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def _own_log_handler():
    """The command adds a handler to the package's logger once per process; tests start without."""
    logger = logging.getLogger("sdpo_scale")
    handlers, level = logger.handlers[:], logger.level
    logger.handlers.clear()
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_train_trains_evaluates_saves_and_reports(
    files: Path, tmp_path: Path, write_config: Write, capsys: pytest.CaptureFixture[str]
):
    path = write_config(eval_dataset=files / "eval.jsonl", max_steps=3)
    assert main(["train", path, "--max_steps", "5", "--learning-rate=2e-3", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert set(result) == {
        *("output_dir", "steps", "train_loss", "eval_before", "eval_after", "pairs_per_second"),
        *("peak_memory_gib", "seconds"),
    }
    assert result["output_dir"] == str(tmp_path / "output")
    assert result["steps"] == 5
    assert (result["eval_before"]["step"], result["eval_after"]["step"]) == (0, 5)
    lines = read_lines(tmp_path / "output" / "metrics.jsonl")
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 5]
    for printed, line in zip(("eval_before", "eval_after"), evaluations, strict=True):
        assert result[printed]["eval_loss"] == line["eval_loss"]
    assert {line["learning_rate"] for line in steps_of(lines)} == {2e-3}
    for name in ("model.safetensors", "tokenizer.json", "README.md", "trainer_state.json"):
        assert (tmp_path / "output" / name).is_file()
    for part in ("attention: sdpa", "check: a packed pair equals", "check: first step at margin 0"):
        assert part in captured.err
    assert "step 5/5: loss" in captured.err


def test_without_json_a_summary_is_printed(
    files: Path, write_config: Write, capsys: pytest.CaptureFixture[str]
):
    path = write_config(eval_dataset=files / "eval.jsonl", max_steps=1)
    assert main(["train", path]) == 0
    out = capsys.readouterr().out
    for part in ("held-out pairs", "rewards/accuracies", "step 0", "step 1", "output dir: "):
        assert part in out


def test_train_without_evaluation_pairs_reports_none(
    write_config: Write, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", write_config(max_steps=1), "--json"]) == 0
    result = last_line(capsys)
    assert (result["eval_before"], result["eval_after"]) == (None, None)


def test_train_resumes_from_the_latest_checkpoint(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_config(max_steps=2, save_strategy="steps", save_steps=2)
    assert main(["train", path]) == 0
    arguments = ["--max_steps", "4", "--resume_from_checkpoint", "true", "--json"]
    assert main(["train", path, *arguments]) == 0
    assert last_line(capsys)["steps"] == 4
    lines = steps_of(read_lines(tmp_path / "output" / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_a_restarted_job_goes_on_by_itself_and_a_new_one_starts(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_config(
        max_steps=2, save_strategy="steps", save_steps=2, resume_from_checkpoint="auto"
    )
    assert main(["train", path]) == 0
    assert main(["train", path, "--max_steps", "4", "--json"]) == 0
    assert last_line(capsys)["steps"] == 4
    lines = steps_of(read_lines(tmp_path / "output" / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_a_run_that_is_told_to_end_saves_its_state_and_goes_on_later(
    write_config: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    path = write_config(max_steps=5, pruning="exact-budget", resume_from_checkpoint="auto")
    step = SDPOTrainer.training_step

    def interrupted(self: SDPOTrainer, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)  # within the third step, which is finished
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(SDPOTrainer, "training_step", interrupted)
        assert main(["train", path]) == 143
    assert "stopped by SIGTERM after step 3" in capsys.readouterr().err
    checkpoint = tmp_path / "output" / "checkpoint-3"
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json", "pruning_history.npz"):
        assert (checkpoint / name).is_file()
    assert main(["train", path, "--json"]) == 0
    assert last_line(capsys)["steps"] == 5
    lines = steps_of(read_lines(tmp_path / "output" / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_the_evaluation_reported_after_training_is_that_of_the_saved_model(
    files: Path, tmp_path: Path, write_config: Write, capsys: pytest.CaptureFixture[str]
):
    path = write_config(
        eval_dataset=files / "eval.jsonl",
        max_steps=6,
        learning_rate=1e-2,  # much too high: the best model is an early one
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    assert main(["train", path, "--json"]) == 0
    result = last_line(capsys)
    lines = read_lines(tmp_path / "output" / "metrics.jsonl")
    evaluations = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    best = min((loss, step) for step, loss in evaluations.items() if step > 0)
    assert best[1] < 6
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "output")
    checkpoint = tmp_path / "output" / f"checkpoint-{best[1]}"
    expected = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(saved.lm_head.weight, expected.lm_head.weight)
    assert result["eval_after"]["eval_loss"] == pytest.approx(best[0], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "text"),
    [("run_name", "7"), ("eos_token", "[END]"), ("chat_template", "{{ messages }}")],
)
def test_text_options_take_the_text_as_it_is(name: str, text: str, write_config: Write):
    assert getattr(read_config(write_config(), [f"--{name}", text]), name) == text


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("save_strategy: no", "save_strategy", "no"),
        ("eval_strategy: no", "eval_strategy", "no"),
        ("resume_from_checkpoint: true", "resume_from_checkpoint", "true"),
    ],
)
def test_words_that_yaml_may_take_for_booleans_are_taken_as_meant(
    line: str, name: str, value: str, tmp_path: Path, write_config: Write
):
    path = tmp_path / "words.yaml"
    path.write_text(line)
    key, text = line.split(": ")
    configs = read_config(str(path)), read_config(write_config(), [f"--{key}", text])
    values = [getattr(found, name) for found in configs]
    assert [str(getattr(v, "value", v)).lower() for v in values] == [value, value]


def test_score_scores_once(
    files: Path, write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_config(eval_dataset=files / "eval.jsonl")
    counts = []
    for _ in range(2):
        assert main(["score", path, "--json"]) == 0
        counts.append(last_line(capsys))
    assert [c["scored"] for c in counts] == [15, 0]
    assert counts[0].keys() == {"pairs", "scored", "seconds"}
    assert counts[0]["pairs"] == counts[1]["pairs"] == 15
    assert not (tmp_path / "output" / "metrics.jsonl").exists()


def test_a_killed_score_goes_on_where_it_was(
    write_config: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    path = write_config(max_tokens=50)
    monkeypatch.setattr(sdpo_scale.scoring, "_PAIRS_PER_WINDOW", 3)
    forward, calls = SDPOTrainer._logprobs, []

    def interrupted(self: SDPOTrainer, model: Any, layout: Any) -> Any:
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return forward(self, model, layout)

    with monkeypatch.context() as patched:
        patched.setattr(SDPOTrainer, "_logprobs", interrupted)
        assert main(["score", path]) == 130
    assert "interrupted" in capsys.readouterr().err
    complete = len(list((tmp_path / "cache").rglob("shard-*")))
    assert complete > 0
    assert main(["score", path, "--json"]) == 0
    assert last_line(capsys)["scored"] == 10 - 3 * complete > 0


def test_help_is_printed_without_a_config():
    command = [sys.executable, "-m", "sdpo_scale", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("usage: sdpo-scale")
    for part in ("train, evaluate and save a model", "--field value"):
        assert part in done.stdout


# Bad input: exit code 2, one message, and no weights read.


class WeightsReadError(Exception):
    """The command got as far as the weights."""


@pytest.fixture
def _no_weights(monkeypatch: pytest.MonkeyPatch):
    def load_model(*args: Any, **kwargs: Any) -> Any:
        raise WeightsReadError

    monkeypatch.setattr(sdpo_scale.inputs, "load_model", load_model)


@pytest.fixture
def refuse(_no_weights: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must be refused and returns what it says."""

    def run(path: str, *arguments: str) -> str:
        messages = set()
        for command in ("train", "score"):
            assert main([command, path, *arguments]) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            assert "Traceback" not in captured.err
            messages.add(captured.err[captured.err.index("error: ") :])
        (message,) = messages
        return message

    return run


Refuse = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--lerning_rate", "1e-6"], ["unknown option 'lerning_rate'", "'learning_rate'"]),
        (["--beta", "high"], ["option beta: 'high' is not float"]),
        (["--beta", "-1"], ["beta must be positive, got -1"]),
        (["--loss_type", "sigmod"], ["loss_type 'sigmod' is unknown", "'sigmoid'"]),
        (["--gradient_accumulation_steps", "4"], ["accumulation_steps 4", "train_batch_size is 4"]),
        (["--eos_token", "END"], ["eos_token 'END' is not in the vocabulary"]),
        (["--chat_template", "no/such.jinja"], ["chat_template 'no/such.jinja' is neither"]),
        (["--train_dataset", "no/such.jsonl"], ["no/such.jsonl: no such file"]),
        (["--max_length", "10"], ["leaves no room for a response", "max_length 10"]),
        (["--report_to", "[a"], ["report_to", "[a"]),
        (["stray"], ["expected --field value, got 'stray'"]),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, list) else None,
)
def test_an_argument_that_cannot_be_used_is_named(
    arguments: list[str], parts: list[str], write_config: Write, refuse: Refuse
):
    message = refuse(write_config(), *arguments)
    for part in parts:
        assert part in message


def test_an_unknown_key_of_the_file_is_named_with_the_nearest(write_config: Write, refuse: Refuse):
    path = write_config(train_batchsize=4)
    message = refuse(path)
    assert f"{path}: unknown option 'train_batchsize', did you mean 'train_batch_size'?" in message


def test_a_missing_config_is_named(refuse: Refuse):
    assert "config file 'no/such.yaml' does not exist" in refuse("no/such.yaml")


def test_a_config_that_is_not_yaml_is_named(tmp_path: Path, refuse: Refuse):
    path = tmp_path / "broken.yaml"
    path.write_text("model: [a, b\nbeta: 0.1\n")
    message = refuse(str(path))
    assert str(path) in message
    assert "line 2" in message


@pytest.mark.parametrize("name", ["model", "train_dataset"])
def test_a_missing_option_is_named(name: str, write_config: Write, refuse: Refuse):
    assert f"option {name} is missing" in refuse(write_config(**{name: None}))


@pytest.mark.parametrize("name", ["no/such/model/folder", "/no/such/model", "no-such-model"])
def test_a_model_that_is_not_there_is_named(name: str, write_config: Write, refuse: Refuse):
    assert name in refuse(write_config(model=name))


def test_a_demo_model_that_is_not_installed_is_an_error_with_the_command_that_installs_it(
    write_config: Write, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
):
    def model_path(cache_dir: Path) -> Path:
        raise ModuleNotFoundError("pip install it")

    monkeypatch.setattr(sdpo_scale.demo, "model_path", model_path)
    assert "pip install it" in refuse(write_config(model="demo"))


def test_a_folder_without_a_model_is_named(tmp_path: Path, write_config: Write, refuse: Refuse):
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in refuse(write_config(model=tmp_path / "empty"))


def test_a_family_that_was_not_tested_is_named(tmp_path: Path, write_config: Write, refuse: Refuse):
    OPTConfig(vocab_size=128).save_pretrained(tmp_path / "opt")
    message = refuse(write_config(model=tmp_path / "opt"))
    for part in ("opt'", "family 'opt'", "supported families: cohere2, deepseek_v3"):
        assert part in message


def test_a_reference_of_such_a_family_is_named_before_weights_are_read(
    tmp_path: Path, write_config: Write, refuse: Refuse
):
    OPTConfig(num_hidden_layers=1, hidden_size=8, vocab_size=128).save_pretrained(tmp_path / "opt")
    message = refuse(write_config(ref_model=tmp_path / "opt"))
    assert f"model '{tmp_path / 'opt'}' is of family 'opt'" in message


def test_a_reference_with_too_few_embeddings_is_named(
    tmp_path: Path, write_config: Write, refuse: Refuse
):
    other = save_model(tmp_path / "other", vocab_size=40)
    assert "embedding rows, the model has 40" in refuse(write_config(ref_model=other))


def test_TPL_06_conversations_without_a_chat_template(
    files: Path, write_config: Write, refuse: Refuse
):
    message = refuse(write_config(train_dataset=CASES / "TPL-06" / "train.jsonl"))
    place = f"the tokenizer at {files / 'model'} has no chat template"
    for part in (place, "data is conversational", "option chat_template"):
        assert part in message


def test_TPL_06_a_chat_template_can_be_given(
    write_config: Write, capsys: pytest.CaptureFixture[str]
):
    template = Path(__file__).resolve().parents[1] / "helpers" / "templates" / "chatml.jinja"
    path = write_config(train_dataset=CASES / "TPL-06" / "train.jsonl", chat_template=template)
    assert main(["score", path, "--json"]) == 0
    assert last_line(capsys)["scored"] == 1


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A model whose tokenizer has no end token."""
    return save_model(tmp_path / "endless", "nothing")


def test_TOK_04_text_rows_without_an_end_token(endless: Path, write_config: Write, refuse: Refuse):
    message = refuse(write_config(model=endless, train_dataset=CASES / "TOK-04" / "train.jsonl"))
    for part in (str(endless), "no end-of-sequence token", "option eos_token"):
        assert part in message


def test_TOK_04_an_end_token_can_be_given(
    endless: Path, write_config: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    path = write_config(model=endless, train_dataset=CASES / "TOK-04" / "train.jsonl", max_steps=1)
    assert main(["train", path, "--eos_token", "<|im_end|>", "--json"]) == 0
    assert last_line(capsys)["steps"] == 1
    saved = json.loads((tmp_path / "output" / "tokenizer_config.json").read_text("utf-8"))
    assert saved["eos_token"] == "<|im_end|>"


def test_MOD_04_a_token_id_beyond_the_embedding(
    tmp_path: Path, write_config: Write, refuse: Refuse
):
    case = json.loads((CASES / "MOD-04" / "run.json").read_text("utf-8"))
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "chosen": "c", "rejected": "d"}])
    with rows.open("a") as file:
        file.write(json.dumps(case["row"]) + "\n")
    model = save_model(tmp_path / "small", vocab_size=104)
    message = refuse(write_config(model=model, train_dataset=rows))
    for part in (
        f"{rows} row 1 (line 2)",
        "token id 107 needs 108 embedding rows, the model has 104",
    ):
        assert part in message


def test_PCK_03_a_pair_over_max_tokens(tmp_path: Path, write_config: Write, refuse: Refuse):
    long = {"prompt": "long: ", "chosen": 50 * "x", "rejected": 30 * "y"}
    rows = [{"prompt": f"{name}: ", "chosen": "a", "rejected": "b"} for name in "st"]
    path = write_rows(tmp_path / "rows.jsonl", [rows[0], long, rows[1]])
    message = refuse(write_config(train_dataset=path, max_tokens=64))
    for part in (f"{path} row 1 (line 2)", "88 tokens", "max_tokens is 64"):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "column", "reason"),
    [
        ({"rejected": " same", "chosen": " same"}, "rejected", "identical to chosen"),
        ({"chosen": None}, "chosen", "null"),
        ({"prompt": 5}, "prompt", "neither text nor a list of messages"),
    ],
    ids=["identical", "null", "number"],
)
def test_a_row_that_cannot_be_used_is_named_with_file_line_and_column(
    changes: dict[str, Any],
    column: str,
    reason: str,
    tmp_path: Path,
    write_config: Write,
    refuse: Refuse,
):
    rows = text_rows(4)
    rows[2].update(changes)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    message = refuse(write_config(train_dataset=path))
    assert f"{path} row 2 (line 3), column {column}: {reason}" in message
    assert "set on_bad_row: skip" in message


def test_bad_evaluation_rows_are_refused_before_training(
    tmp_path: Path, write_config: Write, refuse: Refuse
):
    path = write_rows(tmp_path / "eval.jsonl", [{"prompt": "a", "chosen": "b"}])
    assert f"{path} row 0 (line 1), column rejected: missing" in refuse(
        write_config(eval_dataset=path)
    )


@pytest.mark.usefixtures("_no_weights")
def test_LEN_06_more_tokens_than_rotary_positions_are_warned_of(
    tmp_path: Path, write_config: Write, capsys: pytest.CaptureFixture[str]
):
    model = save_model(tmp_path / "short", max_position_embeddings=32)
    rows = [*text_rows(2), {"prompt": "z" * 30, "chosen": "cdefghik", "rejected": "kighfedc"}]
    path = write_config(model=model, train_dataset=write_rows(tmp_path / "rows.jsonl", rows))
    with pytest.raises(WeightsReadError):
        main(["score", path])
    said = [line for line in capsys.readouterr().err.splitlines() if "positions" in line]
    (warning,) = said
    longest = max(
        39, *(len(r["prompt"] + max(r["chosen"], r["rejected"], key=len)) + 1 for r in rows)
    )
    assert f"has {longest} tokens, the model was trained for 32 positions" in warning


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize("family", ["gpt2", "phi3_longrope"])
def test_LEN_06_more_tokens_than_positions_that_end_are_refused(
    family: str, tmp_path: Path, write_config: Write, refuse: Refuse
):
    row = json.loads((CASES / "LEN-06/train.jsonl").read_text("utf-8"))
    option = "max_position_embeddings" if family == "gpt2" else "original_max_position_embeddings"
    model = save_model(tmp_path / "short", family=family, **{option: 32})
    path = write_config(model=model, train_dataset=write_rows(tmp_path / "rows.jsonl", [row]))
    message = refuse(path)
    for part in ("has 39 tokens", "the model's 32 positions", "set max_length to 32"):
        assert part in message
    reason = "table cannot be extended" if family == "gpt2" else "the longest sequence of a batch"
    assert reason in message


def test_a_nan_in_the_weights_is_an_error_of_the_input(
    files: Path, tmp_path: Path, write_config: Write, capsys: pytest.CaptureFixture[str]
):
    model = save_model(tmp_path / "nan")
    broken = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.lm_head.weight[7] = torch.nan
    broken.save_pretrained(model)
    assert main(["train", write_config(model=model)]) == 2
    assert "a reference log-probability is not finite for the pairs of rows 0, 1, 2" in (
        capsys.readouterr().err
    )


def test_conversations_are_trained_on(
    tmp_path: Path, write_config: Write, capsys: pytest.CaptureFixture[str]
):
    model = save_model(tmp_path / "chat", "chatml")
    rows = write_rows(tmp_path / "chat.jsonl", chat_rows(4))
    assert main(["train", write_config(model=model, train_dataset=rows, max_steps=1)]) == 0
    assert "steps: 1" in capsys.readouterr().out
