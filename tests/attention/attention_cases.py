"""Inputs, float64 oracles and error measures that the attention tests share."""

import math

import torch

from attention import AttentionSpec, attend
from attention.rounding import round_bf16

FLASH = ("flash_bf16", "flash_fa2", "flash_fp32", "stabilized")
INF = math.inf


def spec(backend="flash_bf16", **switches):
    return AttentionSpec(backend=backend, **switches)


def inputs(B=1, H=2, T=40, D=16, scale=1.0, seed=0, dtype=torch.float32, bf16=True):
    """q, k, v, dO with BF16 values in `dtype`, q and k multiplied by `scale`."""
    gen = torch.Generator().manual_seed(seed)
    x = [torch.randn(B, H, T, D, generator=gen) * s for s in (scale, scale, 1, 1)]
    return [(round_bf16(t) if bf16 else t).to(dtype) for t in x]


def with_scores(scores, values=None):
    """q, k, v (1, 1, T, T) with S = scores to the bit where BF16 holds sqrt(T) * scores, T = 4^n; v of ones."""
    scores = torch.as_tensor(scores, dtype=torch.float32)
    T = scores.shape[0]
    v = torch.ones(T, T) if values is None else values
    return (scores * math.sqrt(T))[None, None], torch.eye(T)[None, None], v[None, None]


def materialised(q, k, v, softcap=0.0):
    T = q.shape[2]
    s = (q @ k.mT) * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    return s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -INF).softmax(-1) @ v


def run(f, q, k, v, do):
    """o, dq, dk, dv of f."""
    x = [t.detach().requires_grad_() for t in (q, k, v)]
    o = f(*x)
    return [o.detach(), *torch.autograd.grad(o, x, do.to(o.dtype))]


def run_spec(s, q, k, v, do, rng=None):
    return run(lambda *x: attend(*x, s, rng), q, k, v, do)


def exact(q, k, v, do, softcap=0.0):
    return run(lambda *x: materialised(*x, softcap), *(t.double() for t in (q, k, v, do)))


def errors(got, want):
    """(largest error relative to the largest value, signed mean error) of each of o, dq, dk, dv."""
    return [(((g.double() - w).abs().max() / w.abs().max()).item(), (g.double() - w).mean().item())
            for g, w in zip(got, want, strict=True)]


def assert_within(got, budget, what):
    for name, (size, bias), (allowed, other) in zip(("o", "dq", "dk", "dv"), got, budget, strict=True):
        assert size <= allowed, (f"{what}: {name} is off by {size:.2e} of its largest value, allowed {allowed:.2e}; "
                                 f"signed mean error {bias:.2e}, of the reference {other:.2e}")


def bias(x, y):
    return (x.double() - y.double()).mean().item()


def describe(got, want):
    error = got.double() - want.double()
    return f"largest {error.abs().max():.2e}, signed mean {error.mean():.2e}, {(error != 0).double().mean():.2%} differ"
