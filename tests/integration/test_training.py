"""Runs of the trainer, from files to weights and metrics: what must hold whatever the data says."""

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from sdpo_scale import NonFiniteError, SDPOTrainer
from sdpo_scale.data.pairs import PairDataset
from tests.helpers import toy_tokenizers
from tests.helpers.oracle import dpo_loss, log_ratio_sum
from tests.helpers.runs import (
    AtStep,
    Recorder,
    SaveAt,
    chat_rows,
    config,
    read_lines,
    save_model,
    steps_of,
    text_rows,
    write_rows,
)

CASES = Path(__file__).resolve().parents[1] / "cases"
EVAL_METRICS = (
    *("eval_loss", "eval_rewards/chosen", "eval_rewards/rejected", "eval_rewards/accuracies"),
    *("eval_rewards/margins", "eval_logps/chosen", "eval_logps/rejected", "eval_entropy"),
    *("eval_logits/chosen", "eval_logits/rejected", "eval_mean_token_accuracy", "eval_runtime"),
)
Train = Callable[..., Recorder]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its pairs, used by all tests and never written to."""
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    write_rows(folder / "train.jsonl", text_rows(10))
    write_rows(folder / "eval.jsonl", text_rows(7, seed=1))
    return folder


@pytest.fixture
def make(files: Path, tmp_path: Path) -> Train:
    """A trainer on `files`, with options changed; everything it writes is under `tmp_path`."""

    def build(*, folder: Path = tmp_path, arguments: Any = None, **changes: Any) -> Recorder:
        changes = {"model": files / "model", "train_dataset": files / "train.jsonl", **changes}
        args = config(folder, **{k: v for k, v in changes.items() if v is not None})
        return Recorder(args=args, **(arguments or {}))

    return build


@pytest.fixture
def train(make: Train) -> Train:
    def build_and_train(**changes: Any) -> Recorder:
        trainer = make(**changes)
        trainer.train()
        return trainer

    return build_and_train


def weights(trainer: SDPOTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of the parameters that are not bit-equal."""
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def losses(trainer: SDPOTrainer) -> list[float]:
    return [line["loss"] for line in steps_of(trainer.state.log_history)]


def metrics_file(trainer: SDPOTrainer) -> list[dict[str, Any]]:
    return read_lines(trainer.args.output_path / "metrics.jsonl")


# The first step: policy and reference are one model.


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("max_tokens", [70, 10_000], ids=["pair_by_pair", "one_pack"])
@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-6), (True, 1e-3)], ids=["f32", "bf16"])
def test_NUM_07_the_first_step_is_at_margin_0(
    bf16: bool, tolerance: float, max_tokens: int, checkpointing: bool, train: Train
):
    trainer = train(
        bf16=bf16, max_tokens=max_tokens, activation_checkpointing=checkpointing, max_steps=1
    )
    (step,) = steps_of(metrics_file(trainer))
    assert step["loss"] == pytest.approx(math.log(2), abs=tolerance)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert step[name] == pytest.approx(0, abs=2 * tolerance), name
    assert step["grad_norm"] > 0.1


def test_NUM_08_dropout_of_the_config_is_not_applied_and_stays_in_the_saved_config(
    files: Path, tmp_path: Path, train: Train
):
    model = save_model(tmp_path / "model", attention_dropout=0.1)
    trainer = train(model=model, eval_dataset=files / "eval.jsonl", max_steps=2)
    assert losses(trainer)[0] == pytest.approx(math.log(2), abs=1e-6)
    trainer.model.train()
    first, second = (trainer.evaluate()["eval_loss"] for _ in range(2))
    assert first == second
    trainer.save_model()
    saved = json.loads((trainer.args.output_path / "config.json").read_text("utf-8"))
    assert saved["attention_dropout"] == 0.1


def test_case_dst_06_max_steps_wins_over_epochs(train: Train):
    trainer = train(max_steps=10, num_train_epochs=1)
    assert trainer.state.global_step == 10


def test_the_rehearsal_happens_once_and_leaves_no_gradient(
    make: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = make(folder=tmp_path / "with", max_steps=3)
    rehearsals: list[None] = []
    rehearse = trainer._rehearse

    def counted(model: Any) -> None:
        rehearsals.append(None)
        rehearse(model)

    monkeypatch.setattr(trainer, "_rehearse", counted)
    trainer.train()
    assert len(rehearsals) == 1
    other = make(folder=tmp_path / "without", max_steps=3)
    monkeypatch.setattr(other, "_rehearse", lambda _model: setattr(other, "_is_rehearsed", True))
    other.train()
    assert differing(weights(trainer), weights(other)) == []


@pytest.mark.parametrize("bf16", [False, True], ids=["f32", "bf16"])
def test_OPT_08_updates_of_dpos_size_reach_the_weights(bf16: bool, make: Train):
    trainer = make(bf16=bf16, learning_rate=1e-6, optim="adamw_torch", max_grad_norm=0.0)
    optimizer = trainer.create_optimizer()
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.fill_(1.0)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    # just below 1, float32 steps by 2^-24: an update of 16.8 such steps is rounded to 17
    expected = 1 - 1000 * 17 * 2.0**-24
    assert weight.detach().mean().item() == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx(0.999, abs=2e-5)
    assert {state.dtype for state in optimizer.state[weight].values()} == {torch.float32}


def test_OPT_08_parameters_that_would_round_them_away_are_warned_of(
    make: Train, caplog: pytest.LogCaptureFixture
):
    trainer = make(model_init_kwargs={"dtype": "bfloat16"}, max_steps=1)
    with caplog.at_level(logging.WARNING, logger="sdpo_scale"):
        trainer.train()
    assert "parameters are bfloat16, and so is the optimizer's state: updates" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_REF_08_a_run_on_a_damaged_cache_is_the_run_on_a_new_one(
    damage: str, train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    cache = str(tmp_path / "shared")
    first = train(folder=tmp_path / "first", cache_dir=cache, max_steps=3)
    (shard,) = (tmp_path / "shared" / "reference").glob("*/shard-*.arrow")
    contents = bytearray(shard.read_bytes())
    if damage == "cut":
        contents = contents[:-100]
    else:
        contents[len(contents) // 2] ^= 0x40
    shard.write_bytes(contents)
    second = train(folder=tmp_path / "second", cache_dir=cache, max_steps=3)
    assert f"{shard} is damaged; its pairs are scored anew" in caplog.text
    assert losses(second) == losses(first)
    assert differing(weights(second), weights(first)) == []


# What is logged.


def test_one_object_per_logged_step_and_evaluations_before_the_first_and_after_the_last(
    files: Path, train: Train
):
    trainer = train(
        eval_dataset=files / "eval.jsonl", eval_strategy="epoch", num_train_epochs=2, beta=0.5
    )
    lines = metrics_file(trainer)
    kinds = ["eval" if "eval_loss" in line else "step" for line in lines[:-1]]
    assert kinds == ["eval", *3 * ["step"], "eval", *3 * ["step"], "eval"]
    assert [line["step"] for line in steps_of(lines)] == [1, 2, 3, 4, 5, 6]
    assert "train_runtime" in lines[-1]
    before, middle, after = (line for line in lines if "eval_loss" in line)
    assert [line["step"] for line in (before, middle, after)] == [0, 3, 6]
    for line in (before, middle, after):
        assert set(EVAL_METRICS) <= line.keys()
    assert before["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    # case REF-05: pairs of evaluation have a reference of their own, so their rewards move
    assert abs(before["eval_rewards/margins"]) < 1e-5
    assert abs(after["eval_rewards/margins"]) > 1e-2
    assert after["eval_rewards/accuracies"] > 0


def test_a_logged_step_averages_the_steps_since_the_last_one(train: Train, tmp_path: Path):
    each = steps_of(metrics_file(train(folder=tmp_path / "1", num_train_epochs=2)))
    every_third = steps_of(
        metrics_file(train(folder=tmp_path / "3", num_train_epochs=2, logging_steps=3))
    )
    assert [line["step"] for line in every_third] == [3, 6]
    sizes = np.array([4, 4, 2])  # pairs of an epoch's steps: each pair weighs the same
    for line, steps in zip(every_third, (each[:3], each[3:]), strict=True):
        for name in ("rewards/chosen", "rewards/margins", "logps/rejected", "rewards/accuracies"):
            expected = float(np.dot([step[name] for step in steps], sizes) / sizes.sum())
            assert line[name] == pytest.approx(expected, rel=1e-6, abs=1e-9), name
        assert line["num_tokens"] == steps[-1]["num_tokens"]


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ({"logging_strategy": "epoch"}, [3, 6]),
        ({"logging_steps": 0.5}, [3, 6]),
        ({"logging_steps": 4, "logging_first_step": True}, [1, 4]),
    ],
    ids=["each_epoch", "half_a_run", "first_and_fourth"],
)
def test_every_logged_step_has_all_metrics(
    options: dict[str, Any], logged: list[int], train: Train
):
    steps = steps_of(metrics_file(train(num_train_epochs=2, **options)))
    assert [line["step"] for line in steps] == logged
    for line in steps:
        assert {"entropy", "logits/chosen", "mean_token_accuracy", "rewards/margins"} <= line.keys()


def test_LOG_01_every_pair_weighs_the_same_in_an_evaluation(
    files: Path, make: Train, tmp_path: Path
):
    found = {}
    for batch_size in (1, 2, 3, 7):
        trainer = make(
            folder=tmp_path / str(batch_size),
            eval_dataset=files / "eval.jsonl",
            train_batch_size=batch_size,
            max_tokens=150,
        )
        trainer.score()
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(1.2)
        found[batch_size] = trainer.evaluate()
    reference = AutoModelForCausalLM.from_pretrained(files / "model")
    policy = AutoModelForCausalLM.from_pretrained(files / "model")
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.2)
        sums = [
            [log_ratio_sum(policy, reference, pair.prompt_ids, side) for side in pair.tokens[1:]]
            for pair in map(trainer.inputs.eval.__getitem__, range(7))
        ]
        expected_loss = float(np.mean([float(dpo_loss("sigmoid", *pair)) for pair in sums]))
    expected_accuracy = float(np.mean([float(chosen > rejected) for chosen, rejected in sums]))
    assert 0 < expected_accuracy < 1
    for metrics in found.values():
        assert metrics["eval_loss"] == pytest.approx(expected_loss, rel=1e-5)
        assert metrics["eval_rewards/accuracies"] == pytest.approx(expected_accuracy)


def test_an_evaluation_without_training_has_the_reference_as_well(files: Path, make: Train):
    metrics = make(eval_dataset=files / "eval.jsonl").evaluate()
    assert metrics["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["eval_rewards/chosen"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", ["rows", "dataset", "pairs"])
def test_evaluation_of_pairs_without_a_reference_is_refused(kind: str, files: Path, make: Train):
    trainer = make(eval_dataset=files / "eval.jsonl")
    rows = text_rows(3, seed=2)
    foreign = {
        "rows": lambda: rows,
        "dataset": lambda: datasets.Dataset.from_list(rows),
        "pairs": lambda: PairDataset(trainer.inputs.eval.path),
    }[kind]()
    with pytest.raises(ValueError, match="given to SDPOTrainer as eval_dataset"):
        trainer.evaluate(eval_dataset=foreign)


def test_tensorboard_gets_the_metrics(train: Train):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = train(report_to="tensorboard", max_steps=2)
    (file,) = trainer.args.output_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]
    assert "train/rewards/margins" in events.Tags()["scalars"]


def test_on_a_terminal_scoring_training_and_evaluation_have_bars(
    files: Path, train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    monkeypatch.setenv("COLUMNS", "200")
    train(eval_dataset=files / "eval.jsonl", eval_strategy="steps", eval_steps=1, max_steps=2)
    shown = capsys.readouterr().err
    for part in ("scoring training pairs", "training", "evaluation", "2/2", "loss 0.69", "pairs/s"):
        assert part in shown


def test_callbacks_of_the_user_run(make: Train):
    called = []

    class Count(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            called.append(state.global_step)

    trainer = make(max_steps=2, arguments={"callbacks": [Count()]})
    trainer.train()
    assert called == [1, 2]


# How a step is executed and where its pairs come from do not matter.


def test_losses_do_not_depend_on_max_tokens(train: Train, tmp_path: Path):
    runs = [
        losses(train(folder=tmp_path / str(most), max_tokens=most, max_steps=6))
        for most in (70, 150, 10_000)
    ]
    assert runs[0] == pytest.approx(runs[2], rel=1e-4)
    assert runs[1] == pytest.approx(runs[2], rel=1e-4)
    assert np.ptp(runs[2]) > 1e-2


@pytest.mark.parametrize("given", ["path", "rows", "dataset", "model", "folder_of_dataset"])
def test_model_and_pairs_are_accepted_in_every_form(
    given: str, files: Path, train: Train, tmp_path: Path
):
    expected = train(folder=tmp_path / "expected", max_steps=2)
    rows = read_lines(files / "train.jsonl")
    options: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    if given == "path":
        arguments = {"train_dataset": files / "train.jsonl"}
    elif given == "rows":
        arguments = {"train_dataset": rows}
    elif given == "dataset":
        arguments = {"train_dataset": datasets.Dataset.from_list(rows)}
    elif given == "folder_of_dataset":
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
        options = {"train_dataset": tmp_path / "saved"}
    else:
        arguments = {
            "model": AutoModelForCausalLM.from_pretrained(files / "model"),
            "processing_class": AutoTokenizer.from_pretrained(files / "model"),
        }
    found = train(max_steps=2, arguments=arguments, **options)
    assert differing(weights(found), weights(expected)) == []


def test_DAT_02_other_columns_change_no_bit_of_the_weights(train: Train, tmp_path: Path):
    extra, clean = (
        train(
            folder=tmp_path / name,
            train_dataset=CASES / "DAT-02" / name,
            train_batch_size=3,
            max_steps=1,
        )
        for name in ("train.jsonl", "train_clean.jsonl")
    )
    assert losses(extra) == losses(clean)
    assert differing(weights(extra), weights(clean)) == []
    assert differing(weights(extra), weights(train(max_steps=1))) != []


def test_a_worker_that_loads_pairs_changes_no_bit_of_the_weights(train: Train, tmp_path: Path):
    here = train(folder=tmp_path / "here", num_train_epochs=2)
    worker = train(folder=tmp_path / "worker", num_train_epochs=2, dataloader_num_workers=1)
    assert worker.trained == here.trained
    assert differing(weights(worker), weights(here)) == []


def test_REF_04_the_order_of_pairs_does_not_depend_on_the_reference(train: Train, tmp_path: Path):
    empty = train(num_train_epochs=2)
    filled = train(num_train_epochs=2)
    free = train(num_train_epochs=2, reference_free=True)
    assert empty.trained == filled.trained == free.trained
    first, second = empty.trained[:3], empty.trained[3:]
    for epoch in (first, second):
        assert sorted(pair_id for step in epoch for pair_id in step) == list(range(10))
    assert first != second
    assert losses(empty) == losses(filled)
    other = train(folder=tmp_path / "other", num_train_epochs=2, seed=7)
    assert other.trained != empty.trained


def test_pairs_are_trained_in_the_order_of_the_file_if_asked_for(train: Train):
    trainer = train(train_sampling_strategy="sequential")
    assert trainer.trained[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_OPT_04_the_last_partial_step_is_kept_and_divides_by_its_own_pairs(
    train: Train, files: Path, tmp_path: Path
):
    trainer = train(
        train_batch_size=4, num_train_epochs=2, lr_scheduler_type="linear", learning_rate=1e-6
    )
    assert [len(step) for step in trainer.trained] == [4, 4, 2, 4, 4, 2]
    assert trainer.state.max_steps == 6
    steps = steps_of(metrics_file(trainer))
    rates = [step["learning_rate"] for step in steps]
    assert rates == pytest.approx([1e-6 * (6 - k) / 6 for k in range(6)])
    # at margin 0 a step of 2 pairs has the loss of any other, not half of it
    assert [step["loss"] for step in steps] == pytest.approx(6 * [math.log(2)], abs=1e-3)
    rows = read_lines(files / "train.jsonl")
    last = [rows[pair_id] for pair_id in trainer.trained[2]]
    alone = train(
        folder=tmp_path / "alone",
        learning_rate=1e-6,
        max_steps=1,
        arguments={"train_dataset": last},
    )
    (step,) = steps_of(metrics_file(alone))
    assert steps[2]["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-2)


# The reference cache.


def scored(trainer: SDPOTrainer) -> int:
    return trainer.score()["scored"]


def test_REF_01_a_second_run_scores_nothing_and_changed_weights_score_all(
    files: Path, make: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="sdpo_scale")
    model = save_model(tmp_path / "model")
    assert scored(make(model=model)) == 10
    assert scored(make(model=model, max_tokens=100, beta=0.5, seed=3, loss_type="ipo")) == 0
    assert "built anew" not in caplog.text
    save_model(model)  # the same weights once more: other times, the same model
    assert scored(make(model=model)) == 0
    changed = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        changed.lm_head.weight[5, 5] += 1e-3
    changed.save_pretrained(model)
    assert scored(make(model=model)) == 10
    assert "reference cache: built anew, changed: model" in caplog.messages


def test_REF_01_an_edited_template_scores_all(
    make: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="sdpo_scale")
    model = save_model(tmp_path / "model", "chatml")
    rows = write_rows(tmp_path / "chat.jsonl", chat_rows(6))
    assert scored(make(model=model, train_dataset=rows)) == 6
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "helper")
    tokenizer.save_pretrained(model)
    assert scored(make(model=model, train_dataset=rows)) == 6
    assert "reference cache: built anew, changed: template" in caplog.messages


def test_REF_01_new_and_edited_rows_are_scored_and_reordered_ones_found(
    make: Train, tmp_path: Path
):
    rows = text_rows(10)

    def count(rows: list[Any]) -> int:
        return scored(make(train_dataset=write_rows(tmp_path / "rows.jsonl", rows)))

    assert count(rows[:6]) == 6
    assert count(rows) == 4
    assert count(rows[::-1]) == 0
    rows[3] = {**rows[3], "chosen": rows[3]["chosen"][::-1]}
    assert count(rows) == 1


def test_a_run_that_ends_in_its_first_epoch_scores_only_the_pairs_it_uses(
    make: Train, tmp_path: Path
):
    trainer = make(max_steps=2)
    assert trainer.score() == {"pairs": 8, "scored": 8}
    trainer.train()
    assert sum(map(len, trainer.trained)) == 8
    longer = make(max_steps=4)
    assert longer.score() == {"pairs": 10, "scored": 2}


def test_a_resumed_run_without_cache_scores_the_model_before_training(
    train: Train, make: Train, tmp_path: Path
):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4}
    whole = train(**options)
    shutil.rmtree(tmp_path / "cache")
    resumed = make(**options)
    resumed.train(str(whole.args.output_path / "checkpoint-4"))
    assert losses(resumed) == losses(whole)


# Numbers that are not finite.


def poisoned_model(files: Path, folder: Path, character: str) -> Path:
    """The model with a NaN in the embedding of one character."""
    model = AutoModelForCausalLM.from_pretrained(files / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight[toy_tokenizers.VOCABULARY[character], 3] = torch.nan
    model.save_pretrained(folder)
    toy_tokenizers.build("plain").save_pretrained(folder)
    return folder


def test_a_nan_in_the_weights_names_the_rows_and_stores_nothing(
    files: Path, make: Train, tmp_path: Path
):
    rows = text_rows(10)
    for number in (3, 8):
        rows[number]["prompt"] += " Z"
    trainer = make(
        model=poisoned_model(files, tmp_path / "poisoned", "Z"),
        train_dataset=write_rows(tmp_path / "rows.jsonl", rows),
    )
    with pytest.raises(NonFiniteError, match=r"rows 3, 8$") as caught:
        trainer.train()
    assert caught.value.pair_ids == (3, 8)
    assert trainer.trained == []
    assert list((tmp_path / "cache").rglob("shard-*")) == []
    assert not (tmp_path / "output" / "metrics.jsonl").exists()


def test_a_nan_that_appears_in_training_stops_the_next_step(make: Train, tmp_path: Path):
    def poison(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.lm_head.weight.fill_(torch.nan)

    trainer = make(
        max_steps=5,
        save_strategy="steps",
        save_steps=1,
        arguments={"callbacks": [AtStep(3, poison)]},
    )
    with pytest.raises(NonFiniteError, match="the loss or a log-probability") as caught:
        trainer.train()
    assert sorted(caught.value.pair_ids) == sorted(trainer.trained[3])
    assert [line["step"] for line in steps_of(metrics_file(trainer))] == [1, 2, 3]
    assert not (tmp_path / "output" / "checkpoint-4").exists()


# Resuming.


class KilledError(Exception):
    """Stands for the signal that ends a run."""


def kill(_model: Any) -> None:
    raise KilledError


RESUMABLE = {
    "train_batch_size": 2,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
}


@pytest.fixture(scope="module")
def uninterrupted(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    folder = tmp_path_factory.mktemp("uninterrupted")
    args = config(
        folder,
        model=files / "model",
        train_dataset=files / "train.jsonl",
        eval_dataset=files / "eval.jsonl",
        eval_strategy="epoch",
        **RESUMABLE,
    )
    trainer = Recorder(args=args)
    trainer.train()
    return trainer


@pytest.mark.parametrize("saves", [(5,), (7,), (10,), (14,), (5, 10), (7, 12)], ids=str)
def test_CKP_04_a_resumed_run_equals_one_that_was_never_killed(
    saves: tuple[int, ...], uninterrupted: Recorder, files: Path, make: Train
):
    options = {**RESUMABLE, "eval_dataset": files / "eval.jsonl", "eval_strategy": "epoch"}
    start, checkpoint = 0, None
    trained: list[list[int]] = []
    for save in saves:
        # killed when the metrics file already has the step after the checkpoint
        killed = make(
            arguments={"callbacks": [SaveAt(save), AtStep(min(save + 2, 15), kill)]},
            **options,
        )
        with pytest.raises(KilledError):
            killed.train(checkpoint)
        trained += killed.trained[: save - start]
        start, checkpoint = save, str(killed.args.output_path / f"checkpoint-{save}")
    resumed = make(**options)
    resumed.train(checkpoint)
    assert trained == uninterrupted.trained[:start]
    assert resumed.trained == uninterrupted.trained[start:]
    assert differing(weights(resumed), weights(uninterrupted)) == []
    found, expected = (steps_of(metrics_file(run)) for run in (resumed, uninterrupted))
    assert [line["step"] for line in found] == list(range(1, 16))
    for name in ("loss", "learning_rate", "grad_norm", "num_tokens", "rewards/margins"):
        assert [line[name] for line in found] == [line[name] for line in expected], name
    evaluations = [
        [(line["step"], line["eval_loss"]) for line in metrics_file(run) if "eval_loss" in line]
        for run in (resumed, uninterrupted)
    ]
    assert evaluations[0] == evaluations[1]


def test_the_latest_checkpoint_is_found_by_resuming_with_true(make: Train):
    options = {**RESUMABLE, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 2}
    killed = make(arguments={"callbacks": [AtStep(5, kill)]}, **options)
    with pytest.raises(KilledError):
        killed.train()
    resumed = make(**options)
    resumed.train(True)
    assert killed.trained[:4] + resumed.trained == killed.trained
