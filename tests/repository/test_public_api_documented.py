"""Every public function, class and method of the package has a docstring."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "sdpo_scale").rglob("*.py"))


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public names without a docstring; what is nested in a function or private is not public."""
    if not ast.get_docstring(tree):
        yield "module"
    homes: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    while homes:
        prefix, home = homes.pop()
        for node in home.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                yield f"{prefix}{node.name}"
            if isinstance(node, ast.ClassDef):
                homes.append((f"{prefix}{node.name}.", node))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_public_names_are_documented(path: Path):
    assert list(undocumented(ast.parse(path.read_text("utf-8")))) == []


def test_a_missing_docstring_is_seen():
    source = '"""M."""\nclass A:\n  """A."""\n  def f(self): ...\n  def _g(self): ...\ndef h(): ...'
    assert sorted(undocumented(ast.parse(source))) == ["A.f", "h"]
