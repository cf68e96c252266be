"""A micro-batch that does not fit is answered by smaller ones, and the run's numbers stay."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpo_scale import SDPOTrainer
from sdpo_scale.token_limit import TokenLimit
from tests.helpers.gradients import relative_error
from tests.helpers.runs import config, save_model, steps_of, text_rows, write_rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_model(folder / "model")
    write_rows(folder / "train.jsonl", text_rows(12))
    return folder


def make(files: Path, folder: Path, **changes: Any) -> SDPOTrainer:
    data = {"model": files / "model", "train_dataset": files / "train.jsonl"}
    run = {"max_steps": 6, "max_tokens": 200, "pruning": "exact-budget", "keep_fraction": 0.6}
    return SDPOTrainer(args=config(folder, **data, **{**run, **changes}))


def fail_at(
    monkeypatch: pytest.MonkeyPatch, method: str, numbers: set[int], counted: list[int]
) -> None:
    """Makes calls of a trainer's method run out of memory, by their number."""
    original = getattr(SDPOTrainer, method)

    def call(self: SDPOTrainer, *args: Any, **kwargs: Any) -> Any:
        counted.extend([len(counted)] if self.is_in_train else [])  # not while scoring
        if len(counted) in numbers:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(SDPOTrainer, method, call)


@pytest.mark.parametrize("method", ["_forward", "_backward"])
@pytest.mark.parametrize("seed", range(3))
def test_DST_07_MEM_a_failed_micro_batch_changes_no_number(
    method: str,
    seed: int,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    calm = make(files, tmp_path / "calm")
    with monkeypatch.context() as patched:
        calls: list[int] = []
        fail_at(patched, method, set(), calls)
        calm.train()
    hit = make(files, tmp_path / "hit")
    fail_at(monkeypatch, method, {random.Random(seed).randrange(2, len(calls))}, [])
    with caplog.at_level(logging.WARNING, logger="sdpo_scale"):
        hit.train()
    assert "ran out of memory with micro-batches of 200 tokens" in caplog.text
    assert "repeated with 100, which changes no result" in caplog.text
    for found, expected in zip(
        steps_of(hit.state.log_history), steps_of(calm.state.log_history), strict=True
    ):
        for name in ("loss", "grad_norm", "pruning/backward_fraction"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    weights = [dict(trainer.model.named_parameters()) for trainer in (hit, calm)]
    with torch.no_grad():
        assert relative_error(weights[0], weights[1]) < 1e-4
    again = make(files, tmp_path / "hit")
    assert "max_tokens is 100, not 200: an earlier start ran out of memory" in caplog.text
    assert again._limit.max_tokens == 100


def test_one_pair_that_does_not_fit_alone_ends_the_run_with_what_to_do(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = make(files, tmp_path)
    fail_at(monkeypatch, "_backward", set(range(1, 100)), [])
    with pytest.raises(MemoryError, match=r"the longest pair has .* lower max_length"):
        trainer.train()


def test_several_ranks_end_and_the_next_start_takes_smaller_micro_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    sizes = {"configured": 200, "longest": 60, "world_size": 2}
    limit = TokenLimit(tmp_path, **sizes)
    error = torch.OutOfMemoryError("tried to allocate 20 GiB\nof which")
    with pytest.raises(MemoryError, match=r"step 3 .* 200 tokens \(tried .* next start take 100"):
        limit.lower(error, step=3)
    assert TokenLimit(tmp_path, **sizes).max_tokens == 100
    assert "an earlier start ran out of memory" in caplog.text
    assert TokenLimit(tmp_path, **{**sizes, "configured": 150}).max_tokens == 150
    assert TokenLimit(tmp_path, **{**sizes, "longest": 120}).max_tokens == 200
    assert json.loads((tmp_path / "max_tokens.json").read_text())["max_tokens"] == 100
