"""Launch scripts pass shellcheck, stop at the first error and open with their own command."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci/run"]


def test_there_are_scripts():
    assert {"quickstart.sh", "test.sh", "run"} <= {script.name for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_passes_shellcheck(script: Path):
    shellcheck = Path(sys.executable).with_name("shellcheck")  # beside python: pip installs it
    result = subprocess.run([shellcheck, "-x", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_opens_with_its_command_and_stops_at_errors(script: Path):
    lines = script.read_text("utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert f"bash {script.relative_to(ROOT)}" in lines[1]
    assert "set -euo pipefail" in lines
