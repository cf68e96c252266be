"""``max_tokens: auto`` is close to the most that fits, exceeds no budget and changes no number."""

import json
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from sdpo_scale import SDPOTrainer
from sdpo_scale.cli import main
from sdpo_scale.memory.simulation import LiveBytes
from sdpo_scale.sharding import Sharding
from sdpo_scale.tuning import _reserved, worst_pack
from tests.helpers.runs import config, options, save_model, steps_of, text_rows, write_rows

TWO_PASS = {"pruning": "memory", "pruning_kwargs": {"branch_execution": "two_pass"}}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2, checkpointing": ("qwen2", {"activation_checkpointing": True}),
    "gemma2": ("gemma2", {"optim": "sgd"}),
    "pruned recomputation": ("llama", {"activation_checkpointing": True, "pruning": "memory"}),
    "two passes": ("qwen2", TWO_PASS),
    "LoRA": ("llama", {"use_peft": True, "lora_r": 4, "activation_checkpointing": True}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for family in {family for family, _ in SETTINGS.values()}:
        save_model(folder / family, family=family)
    write_rows(folder / "train.jsonl", text_rows(40))
    return folder


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """The command logs to the standard error that a test has; later tests have another."""
    logger = logging.getLogger("sdpo_scale")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def make(files: Path, folder: Path, family: str = "llama", **changes: Any) -> SDPOTrainer:
    data = {"model": files / family, "train_dataset": files / "train.jsonl"}
    run = {"max_tokens": "auto", "memory_budget": "4MiB", "train_batch_size": 40, "max_steps": 2}
    return SDPOTrainer(args=config(folder, **data, **{**run, **changes}))


def measured(trainer: SDPOTrainer) -> Callable[[int], float]:
    """The measurement that the choice is made by: in training mode, with gradients in place."""
    trainer.model.train()
    trainer.tuner._is_warm = False
    return partial(trainer.tuner._peak, trainer.model)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_choice_is_near_the_largest_that_fits_and_training_stays_within_the_budget(
    setting: str, files: Path, tmp_path: Path
):
    family, changes = SETTINGS[setting]
    roomy = make(files, tmp_path, family, memory_budget="1GiB", **changes)
    assert roomy.args.max_tokens == int(roomy.inputs.train.lengths.sum())  # a whole step
    budget = measured(roomy)(803)
    trainer = make(files, tmp_path, family, memory_budget=f"{budget / 1e6:.6f}MB", **changes)
    fits, exceeds, peak = 100, roomy.args.max_tokens, measured(trainer)
    while exceeds - fits > 8:
        middle = (fits + exceeds) // 2
        if peak(middle) <= budget:
            fits = middle
        else:
            exceeds = middle
    trainer.model.zero_grad()
    assert abs(fits - 803) <= 8
    assert 0.9 * exceeds <= trainer.args.max_tokens <= fits

    held = [*trainer.model.parameters(), *trainer.model.buffers()]
    live = LiveBytes()
    for tensor in held:
        live.ignore(tensor)
    with live:  # scoring, rehearsal, steps, the optimizer's real state
        trainer.train()
    assert live.peak + sum(tensor.nbytes for tensor in held) <= budget


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True, "pruning": "memory"}])
def test_tuning_leaves_no_trace_and_training_is_that_of_the_number(
    changes: dict[str, Any], files: Path, tmp_path: Path
):
    by_number = make(files, tmp_path / "probe", max_tokens=100, **changes)
    before = {n: t.clone() for n, t in by_number.model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    by_number.tuner.measure(by_number.model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert all(torch.equal(t, before[n]) for n, t in by_number.model.state_dict().items())
    assert all(p.grad is None for p in by_number.model.parameters())
    assert not by_number.model.training

    tuned = make(files, tmp_path / "tuned", **changes)
    number = make(files, tmp_path / "number", max_tokens=tuned.args.max_tokens, **changes)
    assert 100 < number.args.max_tokens < 1800
    for trainer in (tuned, number):
        trainer.train()
    for found, expected in zip(
        *(steps_of(t.state.log_history) for t in (tuned, number)), strict=True
    ):
        for name in ("loss", "grad_norm", "rewards/margins"):
            assert found[name] == expected[name], name
    pairs = zip(tuned.model.parameters(), number.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.usefixtures("own_handlers")
def test_the_command_measures_and_the_run_takes_its_file(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any
):
    path = tmp_path / "config.yaml"
    data = {"model": files / "llama", "train_dataset": files / "train.jsonl"}
    run = {"max_tokens": "auto", "memory_budget": "4MiB", "max_steps": 1}
    path.write_text(yaml.safe_dump(options(tmp_path, **data, **run)))
    assert main(["tune", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    saved = json.loads(Path(result["file"]).read_text())
    assert saved["max_tokens"] == result["max_tokens"]
    assert saved["peak_bytes"] <= saved["budget_bytes"] == 4 * 2**20
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="sdpo_scale"):
        assert main(["train", str(path), "--json"]) == 0
    assert f"max_tokens: auto → {result['max_tokens']}, measured before" in caplog.text
    assert "packs measured" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"memory_budget": "5MiB"}, "memory_budget 4MiB → 5MiB"),
        ({"activation_checkpointing": True}, "activation_checkpointing False → True"),
        ({"pruning": "memory"}, "pruning execution single → two_pass"),
        ({"use_peft": True}, "adapter none → "),
        ({"family": "qwen2"}, "model config "),
        ({"train_batch_size": 20}, "tokens of longest pair and step 68, 1881 → 68, 1"),
    ],
)
def test_a_file_of_another_run_is_left_and_what_differs_is_named(
    changes: dict[str, Any], named: str, files: Path, tmp_path: Path, caplog: Any
):
    make(files, tmp_path)
    with caplog.at_level(logging.INFO, logger="sdpo_scale"):
        make(files, tmp_path, **changes)
    assert "tuned.json is not valid for this run: " in caplog.text
    assert named in caplog.text
    assert "packs measured" in caplog.text


def test_memory_that_runs_out_ends_the_growth_and_not_the_run(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    original = SDPOTrainer.run_pairs

    def run_pairs(self: SDPOTrainer, *args: Any, max_tokens: int | None = None, **kw: Any) -> Any:
        if max_tokens is not None and max_tokens > 500:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return original(self, *args, max_tokens=max_tokens, **kw)

    monkeypatch.setattr(SDPOTrainer, "run_pairs", run_pairs)
    trainer = make(files, tmp_path, memory_budget="1GiB")
    assert 450 <= trainer.args.max_tokens <= 500
    assert all(p.grad is None for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_budget": "0.5MiB"}, r"longest pair, 68 tokens, needs 0.0\d+ GiB, and memory_bud"),
        ({"memory_budget": "plenty"}, "memory_budget 'plenty' is no size"),
        ({"memory_budget": 0.9}, "memory_budget 0.9 is a share of a GPU's memory"),
        ({"memory_budget": 2.0}, r"memory_budget 2.0 is neither in \(0, 1\]"),
        ({"max_tokens": "most"}, "max_tokens 'most' is neither a number nor auto"),
        (
            {"train_batch_size": "auto", "gradient_accumulation_steps": 2},
            "train_batch_size is auto, but gradient_accumulation_steps is given",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused_by_name(
    changes: dict[str, Any], message: str, files: Path, tmp_path: Path
):
    with pytest.raises(ValueError, match=message):
        make(files, tmp_path, **changes)


def test_a_sharded_run_takes_a_file_or_says_how_to_make_it(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Sharding, "name", "FSDP")
    with pytest.raises(ValueError, match=r"auto under FSDP takes what was measured .* tune with"):
        make(files, tmp_path)


@pytest.mark.parametrize(
    ("changes", "pairs", "reason"),
    [
        # 47.0 tokens a pair on average: ⌊0.95 · 235 / 47⌋ = 4 in a pack, 8 packs for 32 pairs
        ({}, 32, "pruning is off"),
        ({"pruning": "exact-budget"}, 32, "pruning exact-budget adds none here"),
        ({"pruning": "memory", "activation_checkpointing": True}, 32, "memory adds none here"),
        ({**TWO_PASS, "keep_fraction": 0.9}, 40, "packs hold the 0.9 that is kept"),
    ],
)
def test_pairs_fill_the_micro_batches_that_the_dense_step_needs(
    changes: dict[str, Any], pairs: int, reason: str, files: Path, tmp_path: Path, caplog: Any
):
    with caplog.at_level(logging.INFO, logger="sdpo_scale"):
        trainer = make(files, tmp_path, max_tokens=235, train_batch_size="auto", **changes)
    assert trainer.args.train_batch_size == pairs == trainer.get_total_train_batch_size(None)
    assert reason in caplog.text
    assert "8 micro-batches on each of 1 ranks, as many as 32 pairs" in caplog.text
    assert "learning_rate stays 0.001, no rule was applied" in caplog.text


def test_a_resumed_run_has_the_same_pairs_in_a_step_or_is_refused(files: Path, tmp_path: Path):
    auto = {"train_batch_size": "auto", "save_strategy": "steps", "save_steps": 1}
    first = make(files, tmp_path, **auto)
    first.train()
    again = make(files, tmp_path, **auto)
    assert again.args.train_batch_size == first.args.train_batch_size
    assert again.train("auto").global_step == 2
    other = make(files, tmp_path, **auto, **{"memory_budget": "3MiB"})
    change = f"train_batch_size {first.args.train_batch_size} → {other.args.train_batch_size}"
    with pytest.raises(ValueError, match=f"other pairs in its steps: {change}; set them back"):
        other.train("auto")


def test_a_worst_pack_has_exactly_the_tokens_asked_for(files: Path, tmp_path: Path):
    pair = make(files, tmp_path, max_tokens=100).tuner._longest
    for tokens in range(68, 220):
        pack = worst_pack(pair, tokens)
        assert sum(len(ids) for p in pack for ids in p.tokens) == tokens
        assert all(len(ids) > 0 for p in pack for ids in p.tokens)
        assert len(pack) <= -(-tokens // 68)


def test_on_a_gpu_what_is_reserved_counts_with_all_that_others_hold(
    monkeypatch: pytest.MonkeyPatch,
):
    called: list[str] = []
    numbers = {"memory_reserved": 10, "max_memory_reserved": 40, "mem_get_info": (60, 100)}
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: called.append(name))
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    found = _reserved(lambda: called.append("pack"), torch.device("cuda", 0))
    assert found == (100 - 60 - 10) + 40
    assert called == ["empty_cache", "reset_peak_memory_stats", "pack"]
