"""The embedding's gradient on a GPU: deterministic, compiled or not, and without index_put's long tail."""

import pytest
import torch

from embedding import embedding

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_gradient():
    """32 x 1024 tokens with a text's frequencies: bit-equal twice and compiled, and near float64."""
    g = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(50304, 768, device="cuda", generator=g, requires_grad=True)
    frequencies = 1 / torch.arange(1, 50258, device="cuda")
    idx = torch.multinomial(frequencies, 32 * 1024, replacement=True, generator=g).view(32, 1024)
    grad = torch.randn(32, 1024, 768, device="cuda", generator=g)

    def gradient(function):
        return torch.autograd.grad(function(idx, weight), weight, grad)[0]

    first = gradient(embedding)
    assert torch.equal(first, gradient(embedding)) and torch.equal(first, gradient(torch.compile(embedding)))
    exact = torch.zeros(50304, 768, device="cuda", dtype=torch.float64)
    exact.index_add_(0, idx.flatten(), grad.flatten(0, 1).double())
    assert (first - exact).abs().max() < 1e-4  # sums of some thousand terms of size 1
