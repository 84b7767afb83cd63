"""The loss in chunks on a GPU: BF16 and FP16 logits, which Triton's interpreter lacks, at GPT-2's vocabulary."""

import pytest
import torch

from loss import linear_cross_entropy, softmax_gradient, softmax_gradient_triton
from tests.loss_cases import plain

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

N, C, V = 4096, 768, 50304


def inputs():
    g = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(n, C, device="cuda", generator=g) * std for n, std in ((N, 1.0), (V, 0.1)))
    targets = torch.randint(V, (N,), device="cuda", generator=g)
    targets[::9] = -1
    return x, w, targets


def chunked(x, w, targets, softcap=0.0):
    return linear_cross_entropy(x, w, targets, 1000, softcap)


def run(function, dtype=None, softcap=0.0, scale=1.0, exact=False):
    x, w, targets = inputs()
    x, w = ((t.double() if exact else t).requires_grad_() for t in (x, w))
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = function(x, w, targets, softcap)
    (loss * scale).backward()
    return [t.double() for t in (loss.detach(), x.grad / scale, w.grad / scale)]


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_equals_torch(dtype, softcap):
    """Losses to FP32 rounding; of the gradients few fall to the other side of a rounding, by one unit in the last
    place, which of the smallest significand is 2^-7 of the value in BF16."""
    x, w, targets = inputs()
    logits = (x @ w.t()).to(dtype)[:1000]
    ours, theirs = logits.clone(), logits.clone()
    a = softmax_gradient_triton(ours, targets[:1000], softcap, True)
    b = softmax_gradient(theirs, targets[:1000], softcap, True)
    assert torch.allclose(a, b, rtol=2e-6, atol=2e-6)
    unit = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert torch.allclose(ours.float(), theirs.float(), rtol=unit, atol=1e-7)
    if dtype != torch.float32:
        assert (ours != theirs).float().mean() < 0.01


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype, scale", [(None, 1.0), (torch.bfloat16, 0.25), (torch.float16, 4096.0)])
def test_errors_are_the_plain_paths_or_smaller(dtype, scale, softcap):
    exact = run(plain, softcap=softcap, exact=True)
    ours, theirs = (run(function, dtype, softcap, scale) for function in (chunked, plain))
    for name, a, b, want in zip(("loss", "dx", "dw"), ours, theirs, exact, strict=True):
        a, b = (a - want).flatten(), (b - want).flatten()
        print(f"{dtype} {name}: RMS error {a.square().mean().sqrt():.3e} (plain {b.square().mean().sqrt():.3e}), "
              f"mean {a.mean():+.3e} (plain {b.mean():+.3e})")
        assert a.square().mean().sqrt() <= 1.1 * b.square().mean().sqrt() + 1e-6 * want.abs().max(), name
        if name != "loss":
            assert a.mean().abs() <= max(5 * a.std() / len(a) ** 0.5, b.mean().abs()), name


def test_repeats_and_holds_one_chunk():
    first, second = run(chunked, torch.bfloat16), run(chunked, torch.bfloat16)
    assert all(map(torch.equal, first, second))
    x, w, targets = inputs()
    x.requires_grad_(), w.requires_grad_()
    peaks = []
    for function in (plain, chunked):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            function(x, w, targets).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        x.grad = w.grad = None
    # One chunk of logits in BF16; W in BF16; dW, and its product with the factor, in FP32; what belongs to x is small.
    assert peaks[1] < 1000 * V * 2 + V * C * (2 + 4 + 4) + N * C * 16 < peaks[0]


def test_compiled_equals_eager():
    compiled = torch.compile(chunked, fullgraph=True)
    assert all(map(torch.equal, run(chunked, torch.bfloat16), run(compiled, torch.bfloat16)))
