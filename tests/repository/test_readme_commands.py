"""Every command in the README names a file or a subcommand that exists."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commands(markdown: str) -> Iterator[list[str]]:
    """The words of each command line in a fenced bash block, continuation lines joined."""
    for block in re.findall(r"^```bash\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # VARIABLE=value command
                del words[0]
            if words:
                yield words


def subcommands() -> set[str]:
    """Every string in cli.py: a subcommand is at least written there."""
    tree = ast.parse((ROOT / "sdpo_scale/cli.py").read_text("utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def is_broken(words: list[str]) -> bool:
    match words:
        case ["sdpo-scale", name, *_] | ["python", "-m", "sdpo_scale", name, *_]:
            return not name.startswith("-") and name not in subcommands()
        case ["bash", script, *_] if script.startswith("launch/"):
            return not (ROOT / script).is_file()
        case ["python", "-m", *_]:
            return False  # another package's module
        case ["python", script, *_]:
            return not (ROOT / script).is_file()
    return False


def test_every_command_exists():
    found = list(commands((ROOT / "README.md").read_text("utf-8")))
    assert found, "the README has no fenced bash block"
    assert [" ".join(words) for words in found if is_broken(words)] == []


def test_a_broken_command_is_seen():
    markdown = """
```bash
SEED=1 bash launch/nowhere.sh  # comment
sdpo-scale frobnicate \\
  demo
python tests/benchmarks/nothing.py --json
pip install -e .
sdpo-scale --help
bash launch/test.sh
```
"""
    broken = [words[1] for words in commands(markdown) if is_broken(words)]
    assert broken == ["launch/nowhere.sh", "frobnicate", "tests/benchmarks/nothing.py"]
