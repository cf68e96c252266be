"""The README's first command, whole: real weights, real pairs, held-out loss before and after."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_quickstart_trains_and_the_held_out_loss_falls(tmp_path: Path):
    # all cores, as a user has them: the suite itself runs on one thread
    environment = {name: v for name, v in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["SDPO_VENV"] = sys.prefix
    done = subprocess.run(
        ["bash", "launch/quickstart.sh", str(tmp_path / "output")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for part in ("held-out pairs", "rewards/accuracies", "rewards/margins", "done: see"):
        assert part in done.stdout
    lines = (tmp_path / "output" / "metrics.jsonl").read_text("utf-8").splitlines()
    evaluations = [entry for entry in map(json.loads, lines) if "eval_loss" in entry]
    before, after = evaluations[0], evaluations[-1]
    assert (before["step"], after["step"]) == (0, 12)
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_rewards/accuracies"] > 0.5
    assert after["eval_rewards/margins"] > 0
    for name in ("model.safetensors", "tokenizer.json", "README.md"):
        assert (tmp_path / "output" / name).is_file()
