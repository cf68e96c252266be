"""sdpo_scale: DPO training on packed preference pairs, from one process to many GPUs.

Guided tour: objectives → packing.plan → packing.layout → step → trainer.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdpo_scale.config import SDPOConfig
    from sdpo_scale.data.reference import NonFiniteError
    from sdpo_scale.data.sources import DataError
    from sdpo_scale.trainer import SDPOTrainer

__version__ = "0.1.0"
__all__ = ["DataError", "NonFiniteError", "SDPOConfig", "SDPOTrainer"]

_HOMES = {
    "DataError": "sdpo_scale.data.sources",
    "NonFiniteError": "sdpo_scale.data.reference",
    "SDPOConfig": "sdpo_scale.config",
    "SDPOTrainer": "sdpo_scale.trainer",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: ``sdpo-scale --help`` need not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
