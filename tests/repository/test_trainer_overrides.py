"""Of the transformers Trainer, public methods are overridden, as its private ones may change.

But one: no public hook stands around the writing of a checkpoint, which is complete or absent.
"""

import ast
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def methods(source: str, class_name: str) -> set[str]:
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef)}


def private_overrides(ours: set[str], theirs: set[str]) -> set[str]:
    return {name for name in ours & theirs if name.startswith("_") and name != "__init__"}


def test_trainer_overrides_no_private_method():
    # The file is parsed, not imported: transformers' trainer takes seconds to import.
    folder = importlib.util.find_spec("transformers").submodule_search_locations[0]
    theirs = methods((Path(folder) / "trainer.py").read_text("utf-8"), "Trainer")
    assert {"training_step", "_inner_training_loop"} <= theirs
    ours = methods((ROOT / "sdpo_scale/trainer.py").read_text("utf-8"), "SDPOTrainer")
    assert "training_step" in ours
    assert private_overrides(ours, theirs) == {"_save_checkpoint"}


def test_a_private_override_is_seen():
    ours = {"__init__", "_save_checkpoint", "_own_helper", "training_step"}
    theirs = {"__init__", "_save_checkpoint", "training_step"}
    assert private_overrides(ours, theirs) == {"_save_checkpoint"}
