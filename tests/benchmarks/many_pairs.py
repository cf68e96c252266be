"""Resident memory of `check-data` and of the first training step, by the number of pairs.

    OMP_NUM_THREADS=1 python tests/benchmarks/many_pairs.py [--pairs 120000 240000] [--json]

Writes so many synthetic pairs of about 60 tokens and a random Llama of 0.03M parameters into a
temporary folder, then runs for each number, in processes of their own:

    check-data        the command
    first step        `reference_free: true`, an epoch planned, stopped after one step
    with reference    the same against a reference whose cache holds every pair; filled beforehand,
                      as a run does it, with log-probabilities that are all −1

and prints for each the most resident memory of the process, the files it has mapped and open at
its end, and seconds. Everything but the number of pairs is the same in all rows: the last column
compares each row with that of the fewest pairs, and should stay under 5% where they double. What is
left is a pair's lengths, number and hash. Takes about 6 minutes on a core of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import TrainerCallback

from sdpo_scale import SDPOTrainer
from sdpo_scale.cli import main as command
from sdpo_scale.record import Ranks
from tests.helpers.runs import options, save_model


def rows(count: int) -> Iterator[dict[str, str]]:
    draw = np.random.default_rng(0)
    for number in range(count):
        words = ["".join(map(chr, draw.integers(99, 108, 5))) for _ in range(8)]
        prompt, chosen, rejected = " ".join(words[:4]), " ".join(words[4:6]), " ".join(words[6:])
        yield {"prompt": f"{number}: {prompt}?", "chosen": chosen, "rejected": rejected}


def write(folder: Path, count: int) -> None:
    folder.mkdir()
    with (folder / "train.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(count))
    changes = {"model": folder.parent / "model", "train_dataset": folder / "train.jsonl"}
    changes |= {"max_tokens": 4096, "num_train_epochs": 1}
    for name, more in {
        "free": {"reference_free": True},
        "apart": {"ref_model": folder.parent / "model"},
    }.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(options(folder, **changes, **more)))


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def trainer_of(config: Path) -> SDPOTrainer:
    from sdpo_scale.options import read_config

    return SDPOTrainer(args=read_config(str(config)), callbacks=[Stop()])


def fill(config: Path) -> None:
    """Completes the cache without a model, which would take hours."""
    trainer = trainer_of(config)
    trainer._open_reference()
    trainer._pairs.score(
        lambda layout: -torch.ones(len(layout.target_ids_R)), ranks=Ranks(), hidden_size=32
    )


def status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def child(what: str, folder: Path) -> None:
    """Does one thing and prints what it took as the last line."""
    start = time.perf_counter()
    if what == "check-data":
        assert command(["check-data", str(folder / "free.yaml"), "--json"]) == 0
    elif what == "fill":
        fill(folder / "apart.yaml")
    else:
        trainer = trainer_of(folder / ("free.yaml" if what == "first step" else "apart.yaml"))
        trainer.train()
        assert trainer.state.global_step == 1
    result = {
        "peak_bytes": status("VmHWM"),
        "mapped_files": sum(
            str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines()
        ),
        "open_files": len(os.listdir("/proc/self/fd")),
        "seconds": time.perf_counter() - start,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # PyTorch's threads may abort a process, now and then, as Python finalizes


def run(what: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", what, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def measure(counts: list[int], folder: Path) -> list[dict[str, Any]]:
    save_model(folder / "model")
    found = []
    for count in counts:
        write(folder / str(count), count)
        for what in ("check-data", "first step", "fill", "with reference"):
            result = run(what, folder / str(count))
            if what != "fill":
                found.append({"pairs": count, "what": what, **result})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, nargs="+", default=[120_000, 240_000])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], Path(given.child[1]))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.pairs, Path(folder))
    if given.json:
        print(json.dumps(found))
        return
    least = {row["what"]: row["peak_bytes"] for row in reversed(found)}
    print(f"{'pairs':>9}  {'what':<14} {'peak MiB':>9} {'mapped':>7} {'open':>5} {'s':>6}  growth")
    for row in found:
        print(
            f"{row['pairs']:>9}  {row['what']:<14} {row['peak_bytes'] / 2**20:>9.1f} "
            f"{row['mapped_files']:>7} {row['open_files']:>5} {row['seconds']:>6.1f}  "
            f"{row['peak_bytes'] / least[row['what']] - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
