"""The reference model: the policy as it is before training, or a model given apart.

Its log-probabilities are all that training needs, so a model given apart is held only until the
cache is complete: read on the host for its digest, moved to the device to be scored, then dropped.
A cache belongs to the model's contents: a policy's own start and the same weights given apart share
one, and so do runs that differ in β or learning rate.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sdpo_scale.config import SDPOConfig
from sdpo_scale.inputs import RunInputs
from sdpo_scale.modeling.adapted import adapter_off
from sdpo_scale.modeling.loading import prepare_model
from sdpo_scale.sharding import Sharding

__all__ = ["Reference"]


class Reference:
    """Whose log-probabilities the policy's are compared with."""

    def __init__(self, inputs: RunInputs, args: SDPOConfig, sharding: Sharding) -> None:
        """Takes the run's inputs; a model by name is read when it is first needed."""
        self._inputs, self._args, self._sharding = inputs, args, sharding
        self._apart: PreTrainedModel | None = None

    def key(self) -> dict[str, str]:
        """What log-probabilities depend on besides tokens: contents and dtypes."""
        if self._inputs.reference is None:
            model, has_adapter = self._inputs.model, not self._inputs.is_adapter_off_in_reference
        else:
            model, has_adapter = self._read(), True
        products = self._args.compute_dtype or model.dtype
        return {
            "model": self._sharding.fingerprint(model, with_adapter=has_adapter),
            "dtype": f"{model.dtype} parameters, {products} products",
        }

    @contextmanager
    def running(self, policy: nn.Module, *, num_missing: int) -> Iterator[nn.Module]:
        """The module to score pairs with, in evaluation mode; a model given apart is dropped after.

        Args:
            policy: the run's model as it can be executed, which has not been trained yet.
            num_missing: pairs to be scored.

        Raises:
            ValueError: a model given apart would have to run in shards.
        """
        if self._inputs.reference is not None:
            if num_missing > 0:
                with self._on_device(num_missing) as reference:
                    yield reference
            else:
                yield policy  # has nothing to do
            self._apart = None
            return
        was_training = policy.training
        policy.eval()
        if self._inputs.is_adapter_off_in_reference:
            with adapter_off(self._inputs.model):
                yield policy
        else:
            yield policy
        policy.train(was_training)

    def _read(self) -> PreTrainedModel:
        given = self._inputs.reference
        assert given is not None
        if self._apart is None:
            self._apart = given.load()
        return self._apart

    @contextmanager
    def _on_device(self, num_missing: int) -> Iterator[nn.Module]:
        if self._sharding.shards_parameters:
            raise ValueError(
                f"ref_model is refused under {self._sharding.name} while {num_missing} pairs are "
                "not in the cache: a second model is not sharded; run sdpo-scale score with the "
                "same config in one process or with DDP first, and this run takes them from there"
            )
        model: Any = self._read()
        home, was_training = model.device, model.training
        products = self._args.compute_dtype or model.dtype
        prepare_model(model, device=self._args.device, compute_dtype=products)
        yield model.to(self._args.device).eval()
        model.to(home).train(was_training)
