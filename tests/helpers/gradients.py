"""Gradients by name, and how far two of them are apart."""

import torch


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter's gradient; the model's are cleared."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of a parameter's gradient, relative to that gradient's largest entry."""
    assert found.keys() == expected.keys()
    return max(
        float((found[n] - expected[n]).abs().max() / expected[n].abs().max().clamp_min(1e-30))
        for n in expected
    )
