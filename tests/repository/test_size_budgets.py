"""The sizes that keep the project readable in one sitting."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "sdpo_scale").rglob("*.py"))
BUDGETS = {"sdpo_scale/trainer.py": 500}
FILE_BUDGET, PACKAGE_BUDGET, README_BUDGET, PUBLIC_NAMES = 400, 14500, 320, 6


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def num_lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_file_is_within_its_budget(path: Path):
    assert num_lines(path) <= BUDGETS.get(name_of(path), FILE_BUDGET)


def test_package_is_within_its_budget():
    assert sum(map(num_lines, FILES)) <= PACKAGE_BUDGET


def test_readme_is_within_its_budget():
    assert num_lines(ROOT / "README.md") <= README_BUDGET


def test_nothing_is_left_to_do():
    paths = [*FILES, *(path for path in (ROOT / "launch").rglob("*") if path.is_file())]
    left = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(r"\b(TODO|FIXME|XXX)\b", line)
    ]
    assert left == []


def test_few_names_are_public():
    tree = ast.parse((ROOT / "sdpo_scale/__init__.py").read_text("utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert len(names) <= PUBLIC_NAMES
