"""The largest micro-batches that fit into a memory budget, measured on the run's own devices."""

from contextlib import suppress
from typing import Any

from torch import nn
from transformers import Trainer

from sdpo_scale.config import SDPOConfig
from sdpo_scale.scoring import ScoredError
from sdpo_scale.trainer import SDPOTrainer
from sdpo_scale.trl_options import AUTO

__all__ = ["tune"]


class _Tuning(SDPOTrainer):
    only_tunes = True

    def _before_training(self, model: nn.Module) -> None:
        self.found = self.tuner.measure(model)
        raise ScoredError(0)  # ends the loop, which was started for the sake of its model only


def tune(args: SDPOConfig) -> dict[str, Any]:
    """Measures packs and writes what ``max_tokens: auto`` takes, on all ranks together.

    Args:
        args: the run's options, with ``max_tokens`` auto; an earlier file is replaced.
    """
    trainer = _Tuning(args=args)
    with suppress(ScoredError):
        if trainer.tuner.is_made_later:
            trainer._open_reference()
            Trainer.train(trainer)
        trainer._before_training(trainer.model)
    trainer.tuner.complete(trainer.model)
    found: dict[str, Any] = {name: getattr(args, name) for name in AUTO}
    found |= {f"{name}_gib": trainer.found[f"{name}_bytes"] / 2**30 for name in ("peak", "budget")}
    return {**found, "file": str(trainer.tuner.path)}
