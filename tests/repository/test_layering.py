"""A file imports only from lower floors, or from what stands left of it on its own floor."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "sdpo_scale"

# fmt: off
FLOORS = (
    # 0: mathematics on tensors
    ("objectives", "estimator.rng", "estimator.designs", "estimator.prefixes", "estimator.branches",
     "estimator.positions"),
    # 1: planning on integers
    ("packing.plan", "pruning", "draws", "memory.footprint", "memory.budget",
     "memory.architectures"),
    # 2: tensors of one pack
    ("packing.layout", "modeling.families", "modeling.attention", "modeling.logprobs",
     "modeling.activation_checkpointing"),
    # 3: the outside world
    ("demo", "data.rows", "data.files", "data.sources", "data.formats", "data.tokenization",
     "data.pairs", "data.preference",
     "modeling.adapted", "modeling.adapters", "modeling.loading", "modeling.export",
     "memory.simulation",
     "data.reference", "data.loader", "metrics"),
    # 4: the step
    ("waiting", "failures", "trl_options", "objective_options", "config", "options", "run_data",
     "inputs",
     "card", "weighting", "record", "sharding", "references", "step", "checks", "callbacks",
     "checkpoints", "scoring",
     "token_limit", "tuning", "trainer"),
    # 5: evidence and commands
    ("reporting.bench", "reporting.verify", "reporting.report", "reporting.planner",
     "reporting.dry_run", "reporting.plan", "reporting.tune",
     "reporting.check_data", "convert", "cli",
     "__main__"),
)
# fmt: on
ORDER = [module for floor in FLOORS for module in floor]
# Besides the standard library; floors above import what they need.
THIRD_PARTY = {0: {"torch", "numpy"}, 1: {"numpy"}, 2: {"torch", "numpy", "transformers"}}
MAY_IMPORT_TRAINER = {"cli", "reporting.bench", "reporting.verify", "reporting.tune"}

FILES = sorted((ROOT / PACKAGE).rglob("*.py"))


def module_of(path: Path) -> str:
    """`packing.plan` for packing/plan.py; a package's name for its __init__.py; "" for the root."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}
MARKERS = {name for name, path in MODULES.items() if path.name == "__init__.py"} - {"", "demo"}
CODE = sorted(MODULES.keys() - MARKERS - {""})


def floor_of(module: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if module in floor)


def imports(source: str, module: str) -> Iterator[str]:
    """Full names that a module imports, those inside functions and relative ones included."""
    home = [PACKAGE, *module.split(".")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            anchor = home[: len(home) - node.level + 1] if node.level else []
            origin = ".".join([*anchor, *([node.module] if node.module else [])])
            yield from (f"{origin}.{name.name}" for name in node.names)


def violations(source: str, module: str) -> Iterator[str]:
    floor = floor_of(module)
    below = set(ORDER[: ORDER.index(module)])
    for name in imports(source, module):
        top, _, rest = name.partition(".")
        if top == PACKAGE:
            # `rest` is a module or a name in one: the longest part of it that is a module counts.
            parts = rest.split(".")
            known = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            target = next((part for part in known if part in ORDER), None)
            if target is None and rest != "__version__":
                yield f"{module} imports {name}, which is no module of the table"
            elif target == "trainer" and module not in MAY_IMPORT_TRAINER:
                yield f"{module} imports trainer"
            elif target is not None and target not in below:
                yield f"{module} (floor {floor}) imports {target} (floor {floor_of(target)})"
        elif top not in sys.stdlib_module_names and top not in THIRD_PARTY.get(floor, {top}):
            yield f"{module} (floor {floor}) imports {top}"


def test_every_file_stands_on_a_floor():
    assert set(CODE) <= set(ORDER)


@pytest.mark.parametrize("module", CODE)
def test_imports_point_downward(module: str):
    assert list(violations(MODULES[module].read_text("utf-8"), module)) == []


@pytest.mark.parametrize("package", sorted(MARKERS))
def test_package_markers_hold_a_docstring_only(package: str):
    tree = ast.parse(MODULES[package].read_text("utf-8"))
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_root_imports_nothing_of_the_package_when_imported():
    """The public names are loaded on first use; the imports for type checkers do not count."""
    tree = ast.parse(MODULES[""].read_text("utf-8"))
    at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [ast.unparse(node) for node in at_import]
    assert not [name for name in names if PACKAGE in name or "import torch" in name]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("packing.plan", "from sdpo_scale.trainer import SDPOTrainer"),
        ("packing.plan", "import sdpo_scale.packing.layout"),
        ("packing.plan", "from . import layout"),
        ("packing.plan", "from ..metrics import sums"),
        ("packing.plan", "import torch.nn"),
        ("objectives", "def f():\n    from sdpo_scale import metrics"),
        ("objectives", "from transformers import Trainer"),
        ("estimator.rng", "from sdpo_scale.estimator.designs import systematic"),
        ("metrics", "from sdpo_scale import SDPOConfig"),
        ("reporting.report", "from sdpo_scale.trainer import SDPOTrainer"),
    ],
)
def test_a_violation_is_seen(module: str, line: str):
    assert len(list(violations(line, module))) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("estimator.branches", "from .rng import uniform\nimport torch, math"),
        ("data.sources", "from sdpo_scale import demo, __version__"),
        ("cli", "from sdpo_scale.trainer import SDPOTrainer"),
        ("trainer", "from sdpo_scale.data.preference import Pair\nimport accelerate"),
    ],
)
def test_what_is_allowed_passes(module: str, line: str):
    assert list(violations(line, module)) == []
