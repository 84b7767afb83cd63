"""The embedding's gradient on a GPU: deterministic, compiled or not, and without index_put's long tail."""

import pytest
import torch

from embedding import embedding

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_gradient():
    """32 x 1024 tokens with a text's frequencies: bit-equal twice and compiled, and near float64.

    A sum of n terms x in FP32, in any order, is off by at most (n - 1) u sum|x|, u = 2^-24; and with a probability of
    all but one by 4 sqrt(n) u sum|x|, as roundings go either way (Higham and Mary 2019). One term lost, or
    a sum in BF16, would exceed that.
    """
    g = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(50304, 768, device="cuda", generator=g, requires_grad=True)
    frequencies = 1 / torch.arange(1, 50258, device="cuda")
    idx = torch.multinomial(frequencies, 32 * 1024, replacement=True, generator=g).view(32, 1024)
    grad = torch.randn(32, 1024, 768, device="cuda", generator=g)

    def gradient(function):
        return torch.autograd.grad(function(idx, weight), weight, grad)[0]

    first = gradient(embedding)
    assert torch.equal(first, gradient(embedding)) and torch.equal(first, gradient(torch.compile(embedding)))
    exact, sizes = torch.zeros(2, 50304, 768, device="cuda", dtype=torch.float64)
    exact.index_add_(0, idx.flatten(), grad.flatten(0, 1).double())
    sizes.index_add_(0, idx.flatten(), grad.flatten(0, 1).double().abs())
    n = torch.bincount(idx.flatten(), minlength=50304).double()[:, None]
    error, one = first - exact, 2**-24 * sizes
    assert (error.abs() <= torch.minimum(n - 1, 4 * n.sqrt()).clamp_min(0) * one).all()
    relative = (error / one)[n[:, 0] > 1]
    mean, noise = relative.mean().item(), relative.std().item() / relative.numel()**0.5
    print(f"error in units of 2^-24 sum|x|: largest {relative.abs().max():.3g}, signed mean {mean:.2g} +- {noise:.2g}")
    assert abs(mean) < 6 * noise  # unbiased
