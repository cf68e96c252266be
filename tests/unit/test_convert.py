"""TRL's configs and command lines as configs of this project, with every difference said."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdpo_scale.cli import main
from sdpo_scale.convert import convert_trl, read_trl
from sdpo_scale.options import read_config

COMMAND = (
    "trl dpo --dataset_name org/pairs --model_name_or_path org/model --learning_rate 5.0e-7 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps=8 --eval_strategy steps "
    "--output_dir out --no_remove_unused_columns --use_peft --lora_r 32 "
    "--lora_target_modules q_proj v_proj"
)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trl.yaml"
    path.write_text(text)
    return str(path)


def test_a_command_line_becomes_a_config_that_train_reads(tmp_path: Path):
    converted = convert_trl(COMMAND)
    path = write(tmp_path, converted.to_yaml())
    found = read_config(path, ["--use_cpu", "--output_dir", str(tmp_path)])
    assert (found.model, found.train_dataset, found.eval_dataset) == (
        *("org/model", "org/pairs"),
        "org/pairs",
    )
    assert (found.train_batch_size, found.learning_rate) == (16, 5e-7)
    assert (found.use_peft, found.lora_r) == (True, 32)
    assert found.lora_target_modules == ["q_proj", "v_proj"]
    assert found.remove_unused_columns is False


@pytest.mark.parametrize(
    "prefix",
    ["python trl/scripts/dpo.py", "accelerate launch --num_processes 8 trl/scripts/dpo.py"],
)
def test_a_script_in_a_file_is_read_like_the_command(prefix: str, tmp_path: Path):
    text = f"# LoRA:\n{COMMAND.replace('trl dpo', prefix)}".replace(" --use", " \\\n    --use")
    assert convert_trl(write(tmp_path, text)).options == convert_trl(COMMAND).options


def test_the_file_that_a_command_names_is_read_and_the_command_wins(tmp_path: Path):
    path = write(tmp_path, "model_name_or_path: a\nlearning_rate: 1e-6\nloss_type: [ipo]\n")
    options = read_trl(f"trl dpo --config {path} --learning_rate 2e-6")
    assert options["learning_rate"] == 2e-6
    assert options["loss_type"] == ["ipo"]


@pytest.mark.parametrize(
    ("line", "options", "difference"),
    [
        ("max_prompt_length: 512", {}, "max_prompt_length: 512 is left out: max_length bounds"),
        ("padding_free: true", {}, "padding_free: True is left out, as it has no effect"),
        ("use_liger_kernel: true", {}, "use_liger_kernel: True is left out, as it would be ref"),
        ("attn_implementation: eager", {}, "attn_implementation: 'eager' is left out"),
        ("lora_dropout: 0.05", {}, "lora_dropout: 0.05 is left out: dropout is off"),
        ("bata: 0.2", {}, "bata: 0.2 is left out: unknown here, did you mean 'beta'?"),
        ("label_smoothing: 0.1", {}, "label_smoothing: 0.1 is left out: TRL's sigmoid ignores"),
        ("dtype: bfloat16", {"model_init_kwargs": {"dtype": "bfloat16"}}, "dtype is part of"),
        ("model_revision: v2", {"model_init_kwargs": {"revision": "v2"}}, "model_revision is par"),
        (
            'model_init_kwargs: \'{"attn_implementation": "eager", "device_map": null}\'',
            {"model_init_kwargs": {"device_map": None}},
            "model_init_kwargs: attn_implementation is left out",
        ),
        (
            "datasets: [{path: a/b, split: train}, {path: c/d}]",
            {"train_dataset": ["a/b", "c/d"]},
            "datasets: split of 'a/b' is left out",
        ),
        ("datasets: [{path: a/b}]", {"train_dataset": "a/b"}, "datasets is called train_dataset"),
        ("streaming: true", {}, "streaming: True is left out: a streaming source has no length"),
        ("dataset_streaming: false", {}, ""),
        ("datasets: []", {}, ""),
        ("gradient_checkpointing: false", {"activation_checkpointing": False}, "is called activ"),
        ("beta: -1", {"beta": -1}, "sdpo-scale train will refuse this config: beta must be posi"),
    ],
)
def test_each_option_goes_on_or_is_said_to_be_left_out(
    line: str, options: dict[str, Any], difference: str, tmp_path: Path
):
    converted = convert_trl(write(tmp_path, line))
    assert converted.options == {**options, "per_device_train_batch_size": 8}
    assert difference in "\n".join(converted.differences)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such.yaml", "neither a file nor the command line"),
        ("[1]", "expected a mapping of options"),
    ],
)
def test_what_is_no_config_is_refused(source: str, message: str, tmp_path: Path):
    given = write(tmp_path, source) if source.startswith("[") else source
    with pytest.raises(ValueError, match=message):
        convert_trl(given)


def test_the_command_prints_writes_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "sdpo.yaml"
    assert main(["convert-trl", COMMAND, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert printed == output.read_text("utf-8")
    assert printed.startswith("# Converted from TRL. Differences:\n# - ")
    assert main(["convert-trl", str(output.with_name("sdpo.yaml")), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["config"] == yaml.safe_load(printed) | {"learning_rate": 5e-7}
    assert result["differences"]
    assert main(["convert-trl", "trl", "dpo", "--beta", "1"]) == 2
