"""The metrics file over restarts, and what the progress bar says without a terminal."""

import json

import torch
from transformers import TrainerControl, TrainerState

from sdpo_scale.callbacks import MetricsFile, ProgressBar, StopSignal, peak_memory_bytes
from tests.helpers.threads import run_ranks


def state(step):
    return TrainerState(global_step=step, max_steps=9, is_world_process_zero=True)


def log(file, step, **values):
    file.on_log(None, state(step), TrainerControl(), logs=values)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_has_no_step_twice_and_no_cut_line(tmp_path):
    file = MetricsFile(tmp_path / "out" / "metrics.jsonl")
    for step in (1, 2, 3):
        log(file, step, loss=0.5)
    with file.path.open("a") as handle:
        handle.write('{"step": 4, "lo')
    file.on_train_begin(None, state(2), TrainerControl())
    log(file, 3, loss=0.4)
    assert lines(file.path) == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 0.4},
    ]


def test_a_new_run_in_the_same_folder_keeps_the_old_file(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    log(file, 1, loss=0.5)
    file.on_train_begin(None, state(0), TrainerControl())
    assert not file.path.exists()
    (kept,) = tmp_path.glob("metrics-until-*.jsonl")
    assert lines(kept) == [{"step": 1, "loss": 0.5}]


def test_without_a_terminal_a_line_per_logged_step_is_printed(capsys):
    bar = ProgressBar(lambda: {"rewards/margins": 0.25, "pairs_per_second": 3.0})
    bar.on_train_begin(None, state(0), TrainerControl())
    bar.on_step_end(None, state(1), TrainerControl())
    bar.on_log(None, state(1), TrainerControl(), logs={"loss": 0.69})
    bar.on_log(None, state(1), TrainerControl(), logs={"eval_loss": 0.5})
    bar.on_log(None, state(1), TrainerControl(), logs={"train_runtime": 1.0})
    bar.on_train_end(None, state(1), TrainerControl())
    printed = [line for line in capsys.readouterr().err.splitlines() if "/9:" in line]
    assert printed == [
        "step 1/9: loss 0.6900  margin +0.2500  pairs/s 3.00",
        "evaluation 1/9: loss 0.5000",
    ]


def test_peak_memory_is_what_this_process_uses():
    assert peak_memory_bytes(torch.device("cpu")) > 50 * 2**20


def test_all_ranks_stop_after_the_same_step_though_one_was_signalled():
    def run(ranks):
        stop = StopSignal(ranks, torch.device("cpu"))
        stopped = []
        for step in range(4):
            if ranks.rank == 1 and step == 2:
                stop._receive()
            control = TrainerControl()
            stop.on_step_end(None, state(step), control)
            stopped.append(control.should_training_stop and control.should_save)
        return stopped

    assert run_ranks(3, run) == 3 * [[False, False, True, True]]
