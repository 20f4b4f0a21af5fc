"""The GRU's recurrence gives what torch's gives, values and gradients."""

import pytest
import torch
from torch import Tensor, nn

from vidur_ppo_plugin.policy import gru


def results(run: object, module: nn.GRU, inputs: Tensor, hidden: Tensor) -> list[Tensor]:
    """Outputs, last states and all gradients of a weighted sum of the outputs."""
    leaf = inputs.clone().requires_grad_()
    module.zero_grad()
    outputs, last = run(leaf, hidden)  # type: ignore[operator]
    weights = torch.linspace(-1, 1, outputs.numel()).reshape(outputs.shape)
    (outputs * weights).sum().backward()
    assert leaf.grad is not None
    gradients = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    return [outputs.detach(), last.detach(), leaf.grad, *gradients]


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (1, 64), (3, 20)])
def test_it_equals_torch(layers: int, steps: int) -> None:
    torch.manual_seed(layers)
    module, hidden, inputs = nn.GRU(10, 6, layers), torch.randn(layers, 6), 3 * torch.randn(steps, 10)
    expected = results(module, module, inputs, hidden)
    found = results(lambda x, h: gru.run(module, x, h), module, inputs, hidden)
    assert len(found) == 3 + 4 * layers
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_nan_stays_nan() -> None:
    module = nn.GRU(4, 3)
    inputs = torch.zeros(5, 4)
    inputs[2, 1] = torch.nan
    outputs, _ = gru.run(module, inputs, torch.zeros(1, 3))
    assert outputs[:2].isfinite().all() and outputs[2:].isnan().all()
