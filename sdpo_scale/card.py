"""The model card that is saved with a trained model."""

from collections.abc import Sequence

from sdpo_scale.config import SDPOConfig

__all__ = ["model_card"]

_TEMPLATE = """---
library_name: transformers
{base_model}tags:{tags}
---

# {title}

{subject}, aligned with Direct Preference Optimization by sdpo_scale.

| option | value |
|---|---|
| preference pairs | {num_pairs} ({dataset}) |
| loss | {loss_type}, beta {beta}, label smoothing {label_smoothing} |
| learning rate | {learning_rate} |
| pairs per step | {train_batch_size} |
| pruning | {pruning} |
| optimizer steps | {num_steps} |
| seed | {seed} |

`metrics.jsonl` beside this file has the metrics of every logged step.
"""


def model_card(
    args: SDPOConfig,
    *,
    title: str,
    base_model: str,
    dataset: str,
    num_pairs: int,
    num_steps: int,
    tags: Sequence[str] = (),
) -> str:
    """Markdown with the metadata block that model hubs read.

    Args:
        args: options of the run.
        title: heading.
        base_model: the policy before training; "" if it has no name.
        dataset: the pairs, as they should be called.
        num_pairs: pairs trained on.
        num_steps: optimizer steps taken.
        tags: added to ``dpo`` and ``sdpo_scale``.
    """
    return _TEMPLATE.format(
        base_model=f"base_model: {base_model}\n" if base_model else "",
        subject=base_model or "A model given in Python",
        tags="".join(f"\n- {tag}" for tag in ["dpo", "sdpo_scale", *tags]),
        title=title,
        dataset=dataset,
        num_pairs=num_pairs,
        loss_type=args.loss_type,
        beta=args.beta,
        label_smoothing=args.label_smoothing,
        learning_rate=args.learning_rate,
        train_batch_size=args.train_batch_size,
        pruning=args.pruning,
        num_steps=num_steps,
        seed=args.seed,
    )
