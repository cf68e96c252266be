"""The model card that is saved with a trained model."""

from collections.abc import Sequence
from typing import Any

from sdpo_scale.config import SDPOConfig
from sdpo_scale.inputs import RunInputs
from sdpo_scale.objective_options import describe_objective

__all__ = ["model_card", "write_model_card"]

_TEMPLATE = """---
library_name: {library}
{base_model}tags:{tags}
---

# {title}

{subject}, aligned with Direct Preference Optimization by sdpo_scale.

| option | value |
|---|---|
| preference pairs | {num_pairs} ({dataset}) |
| loss | {objective} |
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
    library: str = "transformers",
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
        library: what loads the files: ``transformers``, or ``peft`` for an adapter.
    """
    return _TEMPLATE.format(
        library=library,
        base_model=f"base_model: {base_model}\n" if base_model else "",
        subject=base_model or "A model given in Python",
        tags="".join(f"\n- {tag}" for tag in ["dpo", "sdpo_scale", *tags]),
        title=title,
        dataset=dataset,
        num_pairs=num_pairs,
        objective=describe_objective(args),
        learning_rate=args.learning_rate,
        train_batch_size=args.train_batch_size,
        pruning=args.pruning,
        num_steps=num_steps,
        seed=args.seed,
    )


def write_model_card(
    args: SDPOConfig,
    inputs: RunInputs,
    *,
    num_steps: int,
    model_name: str | None = None,
    dataset: Any = None,
    tags: str | Sequence[str] | None = None,
) -> None:
    """Writes README.md in the output folder.

    Args:
        args: options of the run.
        inputs: what it was started with.
        num_steps: optimizer steps taken.
        model_name: heading; the folder's name if not given.
        dataset: what to call the pairs; as the options do if not given.
        tags: one or several, added to the card's own.
    """
    folder = args.output_path
    is_adapter = inputs.adapter is not None and not args.merge_adapter
    card = model_card(
        args,
        title=model_name or folder.name,
        base_model=inputs.base_name,
        dataset=str(dataset or args.train_dataset or "given in Python"),
        num_pairs=len(inputs.train),
        num_steps=num_steps,
        tags=[tags] if isinstance(tags, str) else tags or (),
        library="peft" if is_adapter else "transformers",
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(card, "utf-8")
