"""smooth_k: keys less their mean, before every backend."""

import dataclasses

import pytest
import torch

from attention import BACKENDS, AttentionSpec, attend, changed, layer_specs, same_numerics
from attention.op import smooth_keys
from attention.rounding import round_bf16
from attention.spec import from_key


def tensors(dtype=torch.float32, common=30.0):
    """q, k, v, dO (2, 3, 40, 16), BF16 values; keys share a part much longer than what they differ by."""
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, 3, 40, 16, generator=g) for _ in range(4))
    return [round_bf16(x).to(dtype).requires_grad_() for x in (q, k + common, v)], round_bf16(do).to(dtype)


def run(qkv, do, spec):
    o = attend(*qkv, spec)
    return o, *torch.autograd.grad(o, qkv, do.to(o.dtype))


@pytest.mark.parametrize("share", [1, -3])
@pytest.mark.parametrize("backend", ["sdpa", "standard", "flash_fp32"])
def test_it_changes_no_probability(backend, share):
    """In float64 output and gradients are the same but for its last places, and dK's mean is 0 either way."""
    qkv, do = tensors(torch.float64)
    spec = AttentionSpec(backend)
    plain, smooth = run(qkv, do, spec), run(qkv, do, dataclasses.replace(spec, smooth_k=share))
    for a, b in zip(plain, smooth, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12 * max(1.0, a.abs().max().item()) * 100)
    assert smooth[2].mean(2).abs().max() < 1e-14 * smooth[2].abs().max() * 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_gets_smooth_keys(backend):
    """Bit for bit what it makes of keys that were smoothed before, gradients of K by way of the mean."""
    qkv, do = tensors()
    (q, k, v), spec = qkv, AttentionSpec(backend)
    before = smooth_keys(k, 1.0)
    o = attend(q, before, v, spec)
    expected = (o, *torch.autograd.grad(o, (q, k, v), do.to(o.dtype)))
    found = run(qkv, do, dataclasses.replace(spec, smooth_k=1))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], attend(q, k, v, spec)) or backend in ("flash_fp32", "sdpa")
    assert torch.allclose(before, k - k.mean(2, keepdim=True), atol=1e-5)


def test_bf16_keys_are_made_smooth_in_fp32():
    k = tensors()[0][1].detach().bfloat16()
    mean = k.float().mean(2, keepdim=True)
    for share in (1.0, 0.5, -3.0):
        found = smooth_keys(k, share)
        assert found.dtype == torch.bfloat16 and torch.equal(found, (k.float() - share * mean).bfloat16())


def test_what_rows_of_ds_leave_over_meets_keys_without_their_common_part():
    """With keys that share a part thirty times their own, flash_fa2's error of dQ is along that part, and goes with
    it."""
    qkv, do = tensors()
    exact = run([x.detach().double().requires_grad_() for x in qkv], do.double(), AttentionSpec("flash_fp32"))[1]
    plain, smooth = (run(qkv, do, AttentionSpec("flash_fa2", smooth_k=on))[1].double() - exact for on in (0, 1))
    direction = torch.ones(16, dtype=torch.float64) / 4
    along = (plain @ direction).square().sum() / plain.square().sum()
    assert along > 0.9 and smooth.norm() < 0.2 * plain.norm()


def test_it_is_a_switch_of_every_layer():
    """Also of torch's own kernels, which have no other; named in overrides, remedies, keys and the header."""
    specs = layer_specs(3, 2, "sdpa", {"smooth_k": 1}, "1=standard,2=flash_bf16+smooth_k=0")
    assert [s.smooth_k for s in specs] == [1, 1, 0]
    assert ["smooth_k" in s.describe() for s in specs] == [True, True, False]
    moved = changed(AttentionSpec("sdpa"), "smooth_k=1")
    assert moved.smooth_k and not same_numerics(moved, AttentionSpec("sdpa")) and from_key(moved.key) == moved
    with pytest.raises(ValueError, match="smooth_k='yes' is not a number"):
        changed(AttentionSpec("sdpa"), "smooth_k=yes")
    for share in (1.5, -1e3, float("nan")):
        with pytest.raises(ValueError, match="must be from -100 to 1: the share of the keys' mean"):
            AttentionSpec("sdpa", smooth_k=share)


def test_a_soft_cap_would_show_what_follows():
    """It sees the mean, which later tokens are in, too."""
    for cap in (lambda: AttentionSpec(smooth_k=1, softcap=50.0),
                lambda: changed(AttentionSpec("standard", smooth_k=1), "softcap=50")):
        with pytest.raises(ValueError, match="smooth_k=1 with softcap=50"):
            cap()
