"""The references: `standard` against nanoGPT's code under autocast, both against float64."""

import math

import pytest
import torch
from attention_cases import describe, inputs, run
from torch.nn import functional as F

from attention import AttentionSpec, attend
from attention.rounding import round_bf16
from attention.standard import sdpa, standard

BACKENDS = ("standard", "sdpa")
RNG = torch.zeros(3, dtype=torch.int64)


def nanogpt(q, k, v, softcap=0.0):
    """Attention as in nanoGPT's model.py without flash; the softmax in FP32, as autocast has it on a GPU."""
    T = q.shape[2]
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.shape[-1]))
    if softcap:
        att = softcap * torch.tanh(att / softcap)
    att = att.masked_fill(torch.tril(torch.ones(T, T)) == 0, float("-inf"))
    return F.softmax(att, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)) @ v


def run_backend(backend, q, k, v, do, **switches):
    return run(lambda *x: attend(*x, AttentionSpec(backend, **switches)), q, k, v, do)


def exact(q, k, v, do, softcap=0.0):
    return run(lambda *x: nanogpt(*x, softcap), *(t.double() for t in (q, k, v, do)))


@pytest.mark.parametrize(("D", "scale", "softcap"), [(64, 1, 0.0), (48, 3, 0.0), (64, 3, 4.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_standard_is_nanogpt_under_autocast(dtype, D, scale, softcap):
    """Up to the order in which a product is summed, which moves a rounding in very few places."""
    x = inputs(T=100, D=D, scale=scale, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        want = run(lambda *x: nanogpt(*x, softcap), *x)
    got = run_backend("standard", *(t.to(dtype) for t in x), softcap=softcap)
    for name, g, w in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        assert g.dtype == dtype and w.dtype == torch.bfloat16
        differ = g.float() != w.float()
        assert differ.float().mean() < 2e-3, f"{name}: {describe(g, w)}"
        torch.testing.assert_close(g.float(), w.float(), rtol=2**-7, atol=2**-9, msg=f"{name}: {describe(g, w)}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_is_not_rounded(backend):
    x = [torch.randn(1, 2, 33, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for softcap in (0.0, 2.0) if backend == "standard" else (0.0,):
        for got, want in zip(run_backend(backend, *x, softcap=softcap), exact(*x, softcap), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
        small = [t[:, :1, :5, :3].clone().requires_grad_() for t in x[:3]]
        assert torch.autograd.gradcheck(lambda *x: attend(*x, AttentionSpec(backend, softcap=softcap)), small)  # noqa: B023


def test_fp32_containers_hold_bf16_values():
    fine = [torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for backend in BACKENDS:
        got, rounded = run_backend(backend, *fine), run_backend(backend, *map(round_bf16, fine))
        for name, g, again in zip(("o", "dq", "dk", "dv"), got, rounded, strict=True):
            assert g.dtype == torch.float32 and torch.equal(g, round_bf16(g)), f"{backend}: {name} is no BF16 value"
            assert torch.equal(g, again), f"{backend} must round q, k, v and dO on entry: {name}"
    native = run_backend("standard", *(t.bfloat16() for t in fine))
    for a, b in zip(native, run_backend("standard", *fine), strict=True):
        assert torch.equal(a.float(), b)
    q, k, v, do = map(round_bf16, fine)
    want = run(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), q, k, v, do)
    for a, b in zip(run_backend("sdpa", *fine), want, strict=True):
        assert torch.equal(a, round_bf16(b)), "sdpa is torch's FP32 kernel between two roundings"
    bf16 = [t.bfloat16() for t in fine]
    want = run(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *bf16)
    for a, b in zip(run_backend("sdpa", *bf16), want, strict=True):
        assert torch.equal(a, b), "BF16 tensors run torch's BF16 kernel as it is"


def test_float16_rounds_to_float16():
    x = inputs(T=40, D=64, dtype=torch.float16)
    want = run(nanogpt_float16, *x)
    for name, g, w in zip(("o", "dq", "dk", "dv"), run_backend("standard", *x), want, strict=True):
        assert g.dtype == torch.float16
        torch.testing.assert_close(g, w, rtol=2**-10, atol=2**-11, msg=f"{name}: {describe(g, w)}")
        assert not torch.equal(g.float(), round_bf16(g.float())), f"{name} must not be rounded to BF16"
    assert all(t.dtype == torch.float16 for t in run_backend("sdpa", *x))


def nanogpt_float16(q, k, v):
    with torch.autocast("cpu", torch.float16):
        return nanogpt(q, k, v)


@pytest.mark.parametrize("scale", [0.5, 1, 4])
def test_error_budget(scale):
    """BF16 gives about two roundings of half a unit each in O: of a softmax weight and of O itself."""
    x = inputs(T=129, D=64, scale=scale, seed=1)
    want = exact(*x)
    with torch.autocast("cpu", torch.bfloat16):
        eager = run(nanogpt, *(t.bfloat16() for t in x))
    for backend in BACKENDS:
        for name, g, e, w in zip(("o", "dq", "dk", "dv"), run_backend(backend, *x), eager, want, strict=True):
            error, allowed = (g - w).abs().max(), 2 * (e.double() - w).abs().max()
            assert error <= allowed, f"{backend} {name}: {describe(g, w)}; twice the error of eager is {allowed:.2e}"


@pytest.mark.parametrize("D", [16, 32, 48, 64, 80, 96, 128])
@pytest.mark.parametrize("T", [1, 2, 15, 17, 64, 127, 129])
def test_every_shape(T, D):
    x = inputs(B=2, H=1, T=T, D=D, seed=T + D)
    want = exact(*x)
    for backend in BACKENDS:
        for name, g, w in zip(("o", "dq", "dk", "dv"), run_backend(backend, *x), want, strict=True):
            assert g.shape == x[0].shape
            assert (g - w).abs().max() <= 2e-2 * max(w.abs().max().item(), 1), f"{backend} {name}: {describe(g, w)}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_autocast_and_repetition_change_nothing(backend):
    B, T, H, D = 2, 33, 3, 16
    packed = round_bf16(torch.randn(B, T, 3 * H * D, generator=torch.Generator().manual_seed(3)))
    q, k, v = (t.view(B, T, H, D).transpose(1, 2) for t in packed.split(H * D, dim=2))
    do = inputs(B, H, T, D)[3]
    for g in (do, do.transpose(1, 2).contiguous().transpose(1, 2), do[:1, :, :1].expand_as(do)):
        plain = run_backend(backend, q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous())
        with torch.autocast("cpu", torch.bfloat16):
            cast = run_backend(backend, q, k, v, g)
        for a, b, c in zip(plain, run_backend(backend, q, k, v, g), cast, strict=True):
            assert torch.equal(a, b), "the layout must not matter"
            assert torch.equal(a, c), "autocast must not matter"


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_equals_eager(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    B, T, H, D = 1, 20, 2, 16
    do = inputs(B, H, T, D)[3]
    spec = AttentionSpec(backend)  # outside: to a compiler it is a constant

    def block(x):
        q, k, v = (t.view(B, T, H, D).transpose(1, 2) for t in x.split(H * D, dim=2))
        o, stats = attend(q, k, v, spec, stats=True)
        return o, stats.ties, stats.row_max

    x = torch.randn(B, T, 3 * H * D, generator=torch.Generator().manual_seed(5)).requires_grad_()
    results = []
    for f in (block, torch.compile(block, fullgraph=True)):
        o, ties, row_max = f(x)
        results.append((o, ties, row_max, *torch.autograd.grad(o, x, do)))
    for name, a, b in zip(("o", "ties", "row_max", "gradient"), *results, strict=True):
        assert torch.equal(a, b), f"{name} differs when compiled"


def test_the_operator_is_registered_correctly():
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in inputs(T=9, D=16)[:3])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    results = torch.library.opcheck(standard, (q, k, v, RNG, AttentionSpec("standard").key, True), test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}


def test_statistics_see_the_full_row():
    T = 300  # three chunks of rows
    rows = torch.arange(T)
    q, k = torch.zeros(1, 1, T, 64), torch.zeros(1, 1, T, 64)
    q[..., 0] = 8.0
    k[..., 0] = -2.0
    k[:, :, [10, 140, 299], 0] = 3.0  # maxima a key tile apart, the last of them in sight of one row only
    for backend in BACKENDS:
        _, stats = attend(q, k, torch.ones_like(q), AttentionSpec(backend), stats=True)
        want = (rows >= 10).int() + (rows >= 140).int() + (rows >= 299).int()
        assert stats.ties.dtype == torch.int32 and torch.equal(stats.ties[0, 0, 10:], want[10:])
        assert torch.equal(stats.ties[0, 0, :10].long(), rows[:10] + 1), "masked keys never count"
        assert stats.row_max.dtype == torch.float32
        assert torch.equal(stats.row_max[0, 0], torch.where(rows < 10, -2.0, 3.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_of_the_first_sequences(backend):
    q, k, v, _ = inputs(B=3, D=64)
    whole = attend(q, k, v, AttentionSpec(backend), stats=True)[1]
    for counted in (0, 2, 5):
        some = attend(q, k, v, AttentionSpec(backend), stats=True, counted=counted)[1]
        assert torch.equal(some.ties, whole.ties[:counted]) and torch.equal(some.row_max, whole.row_max)
    for counted in (-1, -2, 1.5, torch.tensor(1)):  # not all of them, nor what a slice makes of it
        with pytest.raises(ValueError, match="must be a number of sequences"):
            attend(q, k, v, AttentionSpec(backend), stats=True, counted=counted)


def test_statistics_only_where_asked_for():
    q, k, v, _ = inputs(D=64)
    scores = (q.double() @ k.double().mT) / 8
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    want = scores.amax(-1)
    # `standard` rounds its scores to BF16
    for backend, function, allowed in (("standard", standard, 2**-8), ("sdpa", sdpa, 2**-22)):
        spec = AttentionSpec(backend)
        o, lse, ties, row_max, *_ = function(q, k, v, RNG, spec.key, False)
        assert o.shape == q.shape and ties.shape == row_max.shape == (0,)
        stats = attend(q, k, v, spec, stats=True)[1]
        error = (stats.row_max - want).abs()
        assert (error <= allowed * want.abs().clamp(min=1)).all(), f"{backend}: {describe(stats.row_max, want)}"
        if backend == "standard":
            torch.testing.assert_close(lse, scores.logsumexp(-1).float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_1e4_and_repeated_maxima(backend):
    T = 64
    gen = torch.Generator().manual_seed(6)
    scores = torch.stack([torch.randperm(T, generator=gen) for _ in range(T)]) * 64.0 + 6000
    v = round_bf16(torch.randn(1, 1, T, T, generator=gen))
    q, k = (8 * scores)[None, None], torch.eye(T)[None, None]
    q = round_bf16(q)
    best = (q[0, 0]).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    unique = (best == best.amax(-1, keepdim=True)).sum(-1) == 1
    o = attend(q, k, v, AttentionSpec(backend))
    assert unique.sum() > T // 2 and torch.equal(o[0, 0][unique], v[0, 0][best.argmax(-1)][unique])
    for level in (20.0, -120.0, 0.0):
        tied = torch.full((1, 1, T, T), level * 8)
        got = run_backend(backend, tied, k, v, torch.ones_like(v))
        assert all(t.isfinite().all() for t in got)
        mean = v.double().cumsum(2) / torch.arange(1, T + 1)[:, None]
        assert (got[0] - mean).abs().max() < 2**-7 * v.abs().max(), describe(got[0], mean)
