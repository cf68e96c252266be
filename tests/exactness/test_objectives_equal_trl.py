"""Each loss of 1,000 random pairs against TRL's own code, which is handed the log-probabilities."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sdpo_scale.config import SDPOConfig
from sdpo_scale.objective_options import objective_of
from sdpo_scale.weighting import draw_executed, telescoped_loss
from tests.helpers.pairs import pair_of_lengths

NUM_PAIRS, LONGEST = 1000, 12
BETA, EPSILON, TAU = 0.3, 0.1, 0.05
PLAIN = (
    *("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down"),
    *("discopop", "sigmoid_norm", "exo_pair", "robust"),
)
CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in PLAIN},
    "sft": {"loss_type": "sft"},
    "rpo": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.4]},
    "sum": {"loss_type": ["sppo_hard", "hinge"], "loss_weights": [0.2, 3.0]},
    "ld_alpha": {"ld_alpha": 0.3},
    "ld_alpha_ipo": {"ld_alpha": 0.0, "loss_type": "ipo"},
    "weighting": {"use_weighting": True},
    "weighted_sum": {"use_weighting": True, "loss_type": ["bco_pair", "apo_zero"]},
    **{
        f"forward_kl_{n}": {"f_divergence_type": "forward_kl", "loss_type": n} for n in ("sigmoid",)
    },
    **{f"js_{n}": {"f_divergence_type": "js_divergence", "loss_type": n} for n in ("ipo", "hinge")},
}


class Batch:
    """Random log-probabilities of pairs, as flat tokens here and padded as TRL has them."""

    def __init__(self, dtype: torch.dtype) -> None:
        rng = np.random.default_rng(7)
        self.lengths = rng.integers(1, LONGEST + 1, (NUM_PAIRS, 2))
        self.pairs = [
            pair_of_lengths(k % 200, (2, *map(int, n))) for k, n in enumerate(self.lengths)
        ]
        columns = np.arange(LONGEST) < self.lengths[:, :, None]
        self.is_token = torch.from_numpy(columns)  # [P, 2, LONGEST]

        def padded(low: float, high: float) -> torch.Tensor:
            values = torch.from_numpy(rng.uniform(low, high, columns.shape)).to(dtype)
            return torch.where(self.is_token, values, 0.0)

        self.logprobs, self.squares = padded(-6, -0.1), padded(-6, -0.1)
        self.reference = self.logprobs - padded(-1, 1)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.is_token]


def trl_loss(batch: Batch, rows: slice, options: dict[str, Any]) -> float:
    from trl import DPOTrainer

    def halves(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[rows, 0], values[rows, 1]])  # chosen rows first

    is_token = halves(batch.is_token).long()
    mask = torch.cat([torch.zeros(len(is_token), 1, dtype=torch.long), is_token], dim=1)
    alpha = options.get("ld_alpha")
    reference = batch.reference[rows]
    if alpha is not None:
        shared = torch.from_numpy(batch.lengths[rows].min(axis=1))[:, None, None]
        is_shared = (torch.arange(LONGEST) < shared).double()
        reference = reference * (is_shared + alpha * (1 - is_shared))
    sums = reference.sum(dim=2)
    names = options.get("loss_type", "sigmoid")
    names = names if isinstance(names, list) else [names]
    nothing = torch.zeros_like(halves(batch.logprobs))
    outputs = SimpleNamespace(
        log_probs=halves(batch.logprobs),
        log_sum_sq_probs=halves(batch.squares),
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            device="cpu",
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            parallelism_config=None,
        ),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        loss_types=names,
        loss_weights=options.get("loss_weights") or [1.0] * len(names),
        ld_alpha=alpha,
        f_divergence_type=options.get("f_divergence_type", "reverse_kl"),
        f_alpha_divergence_coef=0.5,
        use_weighting=options.get("use_weighting", False),
        label_smoothing=smoothing_of(options),
        beta=BETA,
        args=SimpleNamespace(discopop_tau=TAU),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": mask,
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": sums[:, 0],
        "ref_rejected_logps": sums[:, 1],
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return float(loss)


def smoothing_of(options: dict[str, Any]) -> float:
    return EPSILON if options.get("loss_type") in ("exo_pair", "robust") else 0.0


def our_losses(batch: Batch, options: dict[str, Any]) -> torch.Tensor:
    smoothing = smoothing_of(options)
    config = SDPOConfig(beta=BETA, label_smoothing=smoothing, **options)
    logprobs = batch.flat(batch.logprobs)
    _, rows = telescoped_loss(
        logprobs,
        logprobs - batch.flat(batch.reference),
        draw_executed(batch.pairs, None),
        objective=objective_of(config),
        beta=BETA,
        label_smoothing=smoothing,
        square_sums_R=batch.flat(batch.squares),
    )
    return rows[:, 0]


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_trls_in_float64(case, monkeypatch):
    options = CASES[case]
    batch = Batch(torch.float64)
    monkeypatch.setattr("torch.tensor", _float64_tensor)  # TRL's ε is float32 by default
    found = our_losses(batch, options)
    if "sft" in options.get("loss_type", ""):  # a mean over the step's tokens
        expected = torch.full((1,), trl_loss(batch, slice(None), options), dtype=torch.float64)
        found = found.mean(dim=0, keepdim=True)
    else:
        each = [trl_loss(batch, slice(k, k + 1), options) for k in range(NUM_PAIRS)]
        expected = torch.from_numpy(np.array(each))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


ORIGINAL_TENSOR = torch.tensor


def _float64_tensor(data: Any, **kwargs: Any) -> torch.Tensor:
    made = ORIGINAL_TENSOR(data, **kwargs)
    return ORIGINAL_TENSOR(data, dtype=torch.float64) if made.dtype == torch.float32 else made


def test_alpha_divergence_equals_trls_in_float32():
    """TRL's takes no float64."""
    options = {"f_divergence_type": "alpha_divergence"}
    batch = Batch(torch.float32)
    each = [trl_loss(batch, slice(k, k + 1), options) for k in range(NUM_PAIRS)]
    torch.testing.assert_close(our_losses(batch, options), torch.tensor(each), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss_type", ["simpo", "sigmoid", "hinge"])
def test_reference_free_losses_equal_trls_cpo_trainer(loss_type, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOTrainer

    batch = Batch(torch.float64)
    batch.reference = torch.zeros_like(batch.reference)
    sums = batch.logprobs.sum(dim=2)
    if loss_type == "simpo":
        sums = sums / torch.from_numpy(batch.lengths)
    trainer = SimpleNamespace(
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
        loss_type=loss_type,
        simpo_gamma=0.5,
        beta=BETA,
        label_smoothing=0.0,
    )
    expected, _, _ = CPOTrainer.cpo_loss(trainer, sums[:, 0], sums[:, 1])
    found = our_losses(batch, {"loss_type": loss_type, "reference_free": True})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
