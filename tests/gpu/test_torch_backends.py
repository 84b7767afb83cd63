"""The PyTorch backends on a GPU, where products, autocast and TF32 are other code than on a CPU."""

import math

import pytest
import torch

from attention import AttentionSpec, attend
from attention.rounding import round_bf16, stochastic_round_bf16

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EMULATED = ("flash_bf16", "flash_fa2", "stabilized", "flash_fp32")
NAMES = ("o", "dq", "dk", "dv")


def inputs(T=1000, D=64):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, T, D, generator=gen) for _ in range(4)]


def run(f, q, k, v, do):
    x = [t.detach().requires_grad_() for t in (q, k, v)]
    o = f(*x)
    return [o.detach(), *torch.autograd.grad(o, x, do.to(o.dtype))]


def backend(name):
    s = AttentionSpec(name, kernel="emulated" if name in EMULATED else "auto")
    return lambda *x: attend(*x, s)


def nanogpt(q, k, v):
    T = q.shape[2]
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.shape[-1]))
    att = att.masked_fill(torch.tril(torch.ones(T, T, device=q.device)) == 0, float("-inf"))
    return torch.softmax(att, dim=-1) @ v


@pytest.fixture
def tf32_allowed():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("tf32_allowed")
def test_fp32_means_fp32_where_tf32_is_allowed():
    x = [t.cuda() for t in inputs()]
    want = run(nanogpt, *(t.double() for t in x))
    with torch.autocast("cuda", torch.bfloat16):
        got = run(backend("flash_fp32"), *x)
    for name, g, w in zip(NAMES, got, want, strict=True):
        assert (g - w).abs().max() < 1e-5, f"{name}: {(g - w).abs().max():.2e}, signed mean {(g - w).mean():.2e}"


def test_standard_is_nanogpt_under_autocast():
    x = [t.cuda().bfloat16() for t in inputs()]
    with torch.autocast("cuda", torch.bfloat16):
        want = run(nanogpt, *x)
    for name, g, w in zip(NAMES, run(backend("standard"), *x), want, strict=True):
        differ = (g != w).float().mean().item()
        assert differ < 2e-3, f"{name}: {differ:.2%} of the values differ"


@pytest.mark.usefixtures("tf32_allowed")
@pytest.mark.parametrize("name", ["standard", "sdpa", *EMULATED])
def test_containers_autocast_and_repetition_change_nothing(name):
    x = [round_bf16(t).cuda() for t in inputs(T=300)]
    want = run(backend(name), *x)
    with torch.autocast("cuda", torch.bfloat16):
        cast = run(backend(name), *x)
    native = run(backend(name), *(t.bfloat16() for t in x))
    for what, a, b, c, d in zip(NAMES, want, cast, run(backend(name), *x), native, strict=True):
        assert torch.equal(a, b), f"{what} differs under autocast"
        assert torch.equal(a, c), f"{what} differs from call to call"
        if name != "flash_fp32":  # whose gradients are FP32, and BF16 in a BF16 tensor
            assert torch.equal(a, d.float()), f"{what} differs between BF16 and FP32 tensors"


@pytest.mark.parametrize("name", ["standard", *EMULATED])
def test_cpu_and_gpu_agree(name):
    """Sums of another order move an FP32 value in its last places, and a BF16 rounding of it in few."""
    x = inputs(T=300)
    for what, c, g in zip(NAMES, run(backend(name), *x), run(backend(name), *(t.cuda() for t in x)), strict=True):
        error = (g.cpu() - c).abs()
        far = (error > 1e-5 * c.abs().max()).float().mean().item()
        print(f"{name} {what}: {far:.1e} differ, signed mean {(g.cpu() - c).mean():.1e}")
        assert far < (1e-2 if name != "flash_fp32" else 1e-9), f"{what}: {far:.2%}, largest {error.max():.2e}"
    _, gpu = attend(*(t.cuda() for t in x[:3]), AttentionSpec(name, kernel="emulated"), stats=True)
    _, cpu = attend(*x[:3], AttentionSpec(name, kernel="emulated"), stats=True)
    assert (gpu.ties.cpu() != cpu.ties).float().mean() < 1e-2


def test_stochastic_rounding_gives_the_same_bits():
    x, rng = inputs()[0], torch.tensor([3, 1, 2])
    assert torch.equal(stochastic_round_bf16(x, rng), stochastic_round_bf16(x.cuda(), rng.cuda()).cpu())
