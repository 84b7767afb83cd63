"""What rows of dS add up to, of attention whose left-over is known, and of torch's and this project's kernels."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import AttentionSpec, attend, changed
from diagnostics.row_sums import exact_rows, row_sums

B, H, T, D = 2, 3, 160, 32


def inputs(scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(B, H, T, D, generator=generator, dtype=torch.float64) for _ in range(4))
    return [x.to(dtype) for x in (scale * q, scale * k, v, do)]


def probabilities(q, k):
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    return (q @ k.mT / math.sqrt(D)).masked_fill(later, -math.inf).softmax(-1)


class WrongDelta(torch.autograd.Function):
    """Attention whose delta is `off` too large in every row."""

    @staticmethod
    def forward(ctx, q, k, v, off):
        p = probabilities(q, k)
        ctx.save_for_backward(q, k, v, p, off)
        return p @ v

    @staticmethod
    def backward(ctx, do):
        q, k, v, p, off = ctx.saved_tensors
        dp = do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True) - off[..., None])
        return ds @ k / math.sqrt(D), ds.mT @ q / math.sqrt(D), p.mT @ do, None


def test_planted_error_of_delta():
    """Rows of P add up to 1, so what is left over is delta's error, with the other sign, in every row."""
    off = torch.randn(B, H, T, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    left, o = row_sums(lambda q, k, v: WrongDelta.apply(q, k, v, off), *inputs())
    assert left.shape == off.shape and left == pytest.approx(-off.float(), abs=1e-6)
    assert torch.equal(o, WrongDelta.apply(*(x for x in _ones(*inputs()[:3])), off))


def _ones(q, k, v):
    q, k = q.clone(), k.clone()
    q[..., -1], k[..., -1] = 0, 1
    return q, k, v


def test_exact_attention_and_its_rows():
    q, k, v, do = inputs()
    kept = [x.clone() for x in (q, k, v, do)]
    left, o = row_sums(lambda q, k, v: probabilities(q, k) @ v, q, k, v, do)
    size, exact = exact_rows(q, k, v, do)
    assert left.abs().max() < 1e-14 and torch.equal(o, exact)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, do), kept, strict=True))
    scores = (_ones(q, k, v)[0] @ _ones(q, k, v)[1].mT / math.sqrt(D)).masked_fill(
        torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf).requires_grad_()
    (ds,) = torch.autograd.grad(scores.softmax(-1) @ v, scores, do)  # dS by autograd, not by its formula
    assert size == pytest.approx(ds.abs().sum(-1), abs=1e-12) and size[..., 0].eq(0).all()


@pytest.mark.parametrize("arm, least, most", [
    ("sdpa/flash", 2e-3, 9e-3), ("flash_fa2", 2e-3, 9e-3), ("flash_bf16", 4e-3, 2e-2),
    ("sdpa/math", 0, 1e-6), ("standard", 0, 2e-3), ("flash_fa2+delta=dp_p", 0, 2e-3),
    ("flash_fa2+delta=do_o_corrected", 0, 2e-3)])
def test_kernels(arm, least, most):
    """Delta of the stored O leaves its rounding over; delta of dP and P what the cast of dS leaves. BF16, scale 4."""
    def attention(q, k, v):
        if arm.startswith("sdpa/"):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION if arm.endswith("flash") else SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attend(q, k, v, changed(AttentionSpec(), arm))

    q, k, v, do = inputs(4.0, torch.bfloat16)
    left, o = row_sums(attention, q, k, v, do)
    size, exact = exact_rows(q, k, v, do)
    assert least <= left.double().square().mean().sqrt() / size.square().mean().sqrt() <= most
    rounding = (do.double() * (exact - o.double())).sum(-1)
    cosine = F.cosine_similarity(left.double().flatten(), rounding.flatten(), dim=0)
    assert (cosine > 0.9) == (arm in ("sdpa/flash", "flash_fa2")), "is it the rounding of the stored O alone?"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_around_it(mode):
    attention, given = (lambda q, k, v: probabilities(q, k) @ v), inputs()
    with mode():
        left, o = row_sums(attention, *inputs())
    expected = row_sums(attention, *given)
    assert torch.equal(left, expected[0]) and torch.equal(o, expected[1]) and not o.requires_grad


def test_key_heads_that_several_query_heads_share():
    q, k, v, do = inputs(dtype=torch.bfloat16)
    k, v = k[:, :1], v[:, :1]
    shared = row_sums(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True), q, k, v, do)
    of_each = (q, k.expand_as(q), v.expand_as(q), do)
    each = row_sums(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *of_each)
    assert all(torch.equal(x, y) for x, y in zip(shared, each, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(exact_rows(q, k, v, do), exact_rows(*of_each), strict=True))


def test_attention_that_is_not_causal_is_refused():
    with pytest.raises(ValueError, match="not causal"):
        row_sums(F.scaled_dot_product_attention, *inputs())
