"""Options: numbers as users write them, errors that name the option and a way out."""

import pytest
import torch

from sdpo_scale.config import SDPOConfig
from sdpo_scale.options import read_config


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def config(tmp_path, **options):
    return SDPOConfig(output_dir=str(tmp_path), report_to="none", **options)


def test_case_cfg_04_numbers_are_numbers(tmp_path):
    text = "learning_rate: 5e-7\nbeta: 1e-1\nmax_length: 1_024\nwarmup_steps: .1\n"
    found = read_config(write(tmp_path, text))
    assert (found.learning_rate, found.beta, found.max_length) == (5e-7, 0.1, 1024)
    assert found.warmup_steps == 0.1


def test_words_that_yaml_1_1_takes_for_truths_stay_text(tmp_path):
    text = "save_strategy: no\nrun_name: on\nreference_free: true\nresume_from_checkpoint: true"
    found = read_config(write(tmp_path, text))
    assert (found.save_strategy, found.run_name) == ("no", "on")
    assert found.reference_free is found.resume_from_checkpoint is True


def test_the_command_line_wins_over_the_file(tmp_path):
    path = write(tmp_path, "learning_rate: 5e-7\nmax_tokens: 100\n")
    arguments = ["--learning-rate", "2e-6", "--max_tokens=64", "--reference_free"]
    found = read_config(path, arguments)
    assert (found.learning_rate, found.max_tokens, found.reference_free) == (2e-6, 64, True)


def test_negative_numbers_and_text_on_the_command_line(tmp_path):
    found = read_config(write(tmp_path, ""), ["--max_steps", "-1", "--run_name", "a b"])
    assert (found.max_steps, found.run_name) == (-1, "a b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learning_rat: 1",
            r"run.yaml: unknown option 'learning_rat', did you mean 'learning_rate'",
        ),
        ("zzzzzz: 1", r"unknown option 'zzzzzz'$"),
        ("learning_rate: fast", r"option learning_rate: 'fast' is not float"),
        ("max_tokens: 1.5", r"option max_tokens: 1.5 is not int"),
        ("reference_free: 3", r"option reference_free: 3 is not bool"),
        ("- a\n- b", r"a config is a mapping of options, got list"),
        ("beta: [1", r"(?s)run\.yaml is not YAML: .*line 1"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_config(write(tmp_path, text))


def test_case_dst_06_a_source_without_length_is_refused():
    with pytest.raises(ValueError, match=r"'streaming' is refused: .* no length, .* max_steps"):
        read_config("tests/cases/DST-06/config.yaml")


def test_a_missing_file_and_a_stray_argument_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        read_config("nowhere.yaml")
    with pytest.raises(ValueError, match="expected --field value, got 'oops'"):
        read_config(write(tmp_path, ""), ["oops"])


def test_names_of_trl_and_transformers_scripts_are_understood(tmp_path):
    text = "model_name_or_path: a\ndataset_name: b\ngradient_checkpointing: false\n"
    found = read_config(write(tmp_path, text))
    assert (found.model, found.train_dataset) == ("a", "b")
    assert found.activation_checkpointing is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sigmiod"}, r"loss_type 'sigmiod' is unknown, did you mean 'sigmoid'"),
        ({"loss_type": ["sigmoid", "ipp"]}, r"loss_type 'ipp' is unknown, did you mean 'ipo'"),
        ({"loss_type": []}, r"loss_type is an empty list"),
        ({"loss_type": "aot"}, r"loss_type 'aot' is refused: it sorts .* micro-batch"),
        ({"loss_type": "aot_unpaired"}, r"loss_type 'aot_unpaired' is refused: it sorts"),
        ({"loss_type": "alphapo"}, r"choose simpo"),
        ({"loss_type": "cpo"}, r"\[sigmoid, sft\].*reference_free: true"),
        ({"loss_weights": [1.0, 2.0]}, r"loss_weights has 2 numbers for 1 losses"),
        ({"loss_weights": 2.0}, r"loss_weights must be a list of numbers"),
        ({"loss_weights": [-1.0]}, r"loss_weights must be at least 0"),
        ({"loss_type": "exo_pair"}, r"'exo_pair' takes the logarithm of label_smoothing"),
        ({"loss_type": "simpo"}, r"'simpo' has no reference model: set reference_free: true"),
        ({"discopop_tau": 0.1}, r"discopop_tau = 0.1 has no effect without loss_type discopop"),
        ({"loss_type": "discopop", "discopop_tau": 0.0}, r"discopop_tau must be positive"),
        ({"simpo_gamma": 1.0}, r"simpo_gamma = 1.0 has no effect without loss_type simpo"),
        (
            {"loss_type": "simpo", "reference_free": True, "simpo_gamma": -1.0},
            r"simpo_gamma must be at least 0",
        ),
        ({"f_alpha_divergence_coef": 0.7}, r"f_alpha_divergence_coef = 0.7 has no effect"),
        (
            {
                "f_divergence_type": "alpha_divergence",
                "f_alpha_divergence_coef": float("inf"),
            },
            r"f_alpha_divergence_coef must be finite",
        ),
        ({"f_divergence_type": "js"}, r"f_divergence_type 'js' is unknown"),
        (
            {"f_divergence_type": "forward_kl", "loss_type": "bco_pair"},
            r"f_divergence_type 'forward_kl' .* 'bco_pair'",
        ),
        (
            {"f_divergence_type": "forward_kl", "reference_free": True},
            r"f_divergence_type 'forward_kl' needs a reference model",
        ),
        ({"ld_alpha": 1.5}, r"ld_alpha must be in \[0, 1\]"),
        (
            {"loss_type": ["sigmoid", "sft"], "use_weighting": True},
            r"use_weighting multiplies .* sft",
        ),
        ({"beta": 0.0}, r"beta must be positive"),
        ({"label_smoothing": 0.5}, r"label_smoothing must be in \[0, 0.5\)"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, r"has no effect with loss_type 'ipo'"),
        ({"truncation_mode": "middle"}, r"choose keep_start or keep_end"),
        ({"on_bad_row": "ignore"}, r"choose error or skip"),
        ({"loss_weights": [0.0]}, r"loss_weights must be at least 0, and one of them positive"),
        ({"loss_weights": ["1"]}, r"loss_weights must be a list of numbers, got \['1'\]"),
        ({"simpo_gamma": float("nan")}, r"simpo_gamma = nan has no effect"),
        ({"beta": float("nan")}, r"beta must be positive, got nan"),
        ({"gradient_reduction": "step"}, r"gradient_reduction 'step' .* micro_batch or last"),
        ({"train_batch_size": 0}, r"train_batch_size must be at least 1, got 0"),
        ({"max_tokens": 2}, r"max_tokens must be at least 3, got 2"),
        ({"max_length": 1}, r"max_length must be at least 2, got 1"),
        ({"max_train_samples": 0}, r"max_train_samples must be at least 1, got 0"),
        ({"max_eval_samples": 0}, r"max_eval_samples must be at least 1, got 0"),
        ({"per_device_train_batch_size": 0}, r"per_device_train_batch_size must be at least 1"),
        (
            {"score_max_tokens": 64, "max_tokens": 65},
            r"score_max_tokens is 64, less than .* \(65\)",
        ),
        (
            {"chat_template_kwargs": [1]},
            r"chat_template_kwargs must map names to values, got \[1\]",
        ),
        ({"chat_template_kwargs": {"tools": []}}, r"chat_template_kwargs: 'tools' is no variable"),
        ({"deepspeed": "nowhere.json"}, r"option deepspeed: there is no file 'nowhere\.json'"),
        ({"eval_holdout": 1}, r"eval_holdout must be at least 2, got 1"),
        ({"eval_holdout": 10, "eval_dataset": "x"}, r"drop one of them"),
        ({"per_device_train_batch_size": 4, "train_batch_size": 9}, r"give one of them"),
        ({"gradient_accumulation_steps": 0}, r"must be at least 1"),
        ({"neftune_noise_alpha": 1.0}, r"differ from the reference"),
        ({"torch_compile": True}, r"not tested"),
        ({"train_sampling_strategy": "group_by_length"}, r"packing needs no grouping"),
    ],
)
def test_each_contradiction_is_refused_by_name(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_a_deepspeed_file_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text("{zero_optimization: 3}")
    with pytest.raises(ValueError, match=r"option deepspeed: .*zero\.json is not JSON: .*line 1"):
        config(tmp_path, deepspeed=str(path))


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(SDPOConfig, "n_gpu", property(lambda self: 4))
    with pytest.raises(ValueError, match=r"4 GPUs are visible to one process.*torchrun"):
        config(tmp_path)


def test_defaults_and_resolution(tmp_path, monkeypatch):
    found = config(tmp_path, loss_type=["ipo"])
    assert found.loss_type == "ipo"
    assert found.compute_dtype is None
    assert config(tmp_path, bf16=True).compute_dtype == torch.bfloat16
    assert found.train_batch_size == 32
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert found.cache_path == tmp_path / "cache" / "sdpo_scale"
    assert config(tmp_path, cache_dir="here").cache_path.name == "here"
    assert "tensorboard" in SDPOConfig(output_dir=str(tmp_path)).report_to


def test_every_added_option_is_explained():
    import ast
    import inspect

    import sdpo_scale.config as module

    (definition,) = [
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and node.name == "SDPOConfig"
    ]
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign):
            assert isinstance(following, ast.Expr), f"{node.target.id} has no docstring"
