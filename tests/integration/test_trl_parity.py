"""The same run in TRL's DPOTrainer and here: every loss and metric of 20 steps agrees.

Both start from the same saved model, read the pairs in the same order and use the same optimizer,
in float32 on CPU. TRL pads each sequence with its own copy of the prompt; here they are packed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdpo_scale import SDPOTrainer
from tests.helpers.runs import chat_rows, config, save_model, steps_of, text_rows

# TRL 1.16 asks transformers 5.24 for this under its old name.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

NUM_STEPS, BATCH = 20, 4
ROWS = {"text": ("plain", text_rows), "chat": ("chatml", chat_rows)}
# Name → options; the loss is the one of that name unless they say it.
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "hinge": {},
    "ipo": {},
    "robust": {"label_smoothing": 0.1},
}
NEWER: dict[str, dict[str, Any]] = {
    "exo_pair": {"label_smoothing": 1e-3},
    **{name: {} for name in ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")},
    **{name: {} for name in ("discopop", "sigmoid_norm")},
    "weighted sum": {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.7, 0.3]},
    "js_divergence": {"loss_type": ["sigmoid"], "f_divergence_type": "js_divergence"},
    "ld_alpha": {"loss_type": ["sigmoid"], "ld_alpha": 0.5},
    "use_weighting": {"loss_type": ["sigmoid"], "use_weighting": True},
}
RUNS = [(loss, rows) for loss in LOSSES for rows in ROWS] + [(loss, "text") for loss in NEWER]

LOSS_TOLERANCE = 1e-3
"""Both run in float32 with sums in another order. Log-probabilities near −100 then differ by 1e-5,
a loss by 1e-6, and Adam, whose step has nearly one size whatever the gradient, may enlarge that
with every update. Seen: 1e-6, and 1e-5 for ipo, whose loss is near 25."""
MEAN_RESIDUAL = 1e-4
"""Wrong weights or masks drift one way; rounding goes up and down."""
# Name → (relative, absolute) tolerance. Rewards are β times differences of sums near −100, which
# float32 holds to 1e-5, and both sides may drift as the losses do. Counts are equal, up to the
# float32 of their means: no pair of these runs has a margin within rounding of 0, and no token ties
# with the most probable one.
METRICS = {
    "rewards/chosen": (1e-4, 1e-4),
    "rewards/rejected": (1e-4, 1e-4),
    "rewards/margins": (1e-4, 1e-4),
    "rewards/accuracies": (1e-6, 0),
    "logps/chosen": (1e-5, 0),
    "logps/rejected": (1e-5, 0),
    "logits/chosen": (0, 1e-4),
    "logits/rejected": (0, 1e-4),
    "entropy": (1e-4, 0),
    "mean_token_accuracy": (1e-6, 0),
    "num_tokens": (0, 0),
    "grad_norm": (1e-3, 0),
    "learning_rate": (0, 0),
}

Runs = Callable[[str, str], tuple[list[dict[str, Any]], list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("parity")
    return {name: save_model(base / name, tokenizer) for name, (tokenizer, _) in ROWS.items()}


@pytest.fixture(scope="module")
def runs(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """(loss, format of the rows) → the logged steps of TRL's run and of this project's."""
    known: dict[tuple[str, str], Any] = {}

    def run(loss: str, rows: str) -> Any:
        if (loss, rows) not in known:
            place = tmp_path_factory.mktemp(f"{loss}-{rows}")
            known[loss, rows] = tuple(
                steps_of(train(folders[rows], ROWS[rows][1](2 * BATCH * 5), loss, place))
                for train in (train_with_trl, train_here)
            )
        return known[loss, rows]

    return run


def options_of(loss: str) -> dict[str, Any]:
    return {"loss_type": [loss], **(LOSSES | NEWER)[loss]}


def train_with_trl(model: Path, rows: list[Any], loss: str, place: Path) -> Any:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        output_dir=str(place / "trl"),
        per_device_train_batch_size=BATCH,
        max_steps=NUM_STEPS,
        **options_of(loss),
        beta=0.1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim="adamw_torch",
        max_length=None,
        precompute_ref_log_probs=True,
        train_sampling_strategy="sequential",
        gradient_checkpointing=None,
        activation_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return trainer.state.log_history


def train_here(model: Path, rows: list[Any], loss: str, place: Path) -> Any:
    args = config(
        place,
        model=model,
        train_batch_size=BATCH,
        max_steps=NUM_STEPS,
        **options_of(loss),
        optim="adamw_torch",
        max_length=None,
        max_tokens=200,
        train_sampling_strategy="sequential",
    )
    trainer = SDPOTrainer(args=args, train_dataset=rows)
    trainer.train()
    return trainer.state.log_history


@pytest.mark.parametrize(("loss", "rows"), RUNS)
def test_losses_equal_trls_at_each_of_20_steps(loss: str, rows: str, runs: Runs):
    theirs, ours = ([step["loss"] for step in run] for run in runs(loss, rows))
    assert len(theirs) == len(ours) == NUM_STEPS
    residuals = np.array(ours) - np.array(theirs)
    # what the runs did must be 100 times what they may differ by; weighted losses are near 0
    scale = min(1.0, np.ptp(theirs) / (100 * LOSS_TOLERANCE))
    assert scale > 0.01
    assert np.abs(residuals).max() < LOSS_TOLERANCE * scale
    assert abs(residuals.mean()) < MEAN_RESIDUAL * scale


@pytest.mark.parametrize(("loss", "rows"), RUNS)
def test_metrics_equal_trls_at_each_of_20_steps(loss: str, rows: str, runs: Runs):
    theirs, ours = runs(loss, rows)
    for name, (relative, absolute) in METRICS.items():
        found, expected = ([step[name] for step in run] for run in (ours, theirs))
        assert found == pytest.approx(expected, rel=relative, abs=absolute), name
