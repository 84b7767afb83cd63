"""The loss in chunks against the plain path: its values, its errors and their signs, and what it never holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import loss
from loss import linear_cross_entropy
from model import GPT, GPTConfig
from tests.loss_cases import plain

ROOT = Path(__file__).parents[1]
N, C, V, CHUNK = 120, 64, 300, 32  # CHUNK does not divide N


def inputs(seed=0):
    """x, W and targets, a fifth of them left out; logits of about +-8, as a trained model's."""
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(4, N // 4, C, generator=g).double(), torch.randn(V, C, generator=g).double() / 2
    targets = torch.randint(V, (4, N // 4), generator=g)
    targets[torch.rand(targets.shape, generator=g) < 0.2] = -1
    return x, w, targets


def chunked(x, w, targets, softcap=0.0):
    return linear_cross_entropy(x, w, targets, CHUNK, softcap)


def run(function, seed=0, dtype=torch.float32, autocast=None, softcap=0.0, scale=1.0):
    """(loss, dx, dw) in float64."""
    x, w, targets = inputs(seed)
    x, w = (t.to(dtype).requires_grad_() for t in (x, w))
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        value = function(x, w, targets, softcap)
    (value * scale).backward()
    return [t.double() for t in (value.detach(), x.grad / scale, w.grad / scale)]


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_equals_the_formula_in_float64(softcap):
    for ours, theirs in zip(run(chunked, 0, torch.float64, softcap=softcap),
                            run(plain, 0, torch.float64, softcap=softcap), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("autocast, scale", [(None, 1.0), (torch.bfloat16, 0.25), (torch.float16, 2.0**14)])
def test_errors_are_the_plain_paths_or_smaller(autocast, scale, softcap):
    """Against float64, over seeds: the RMS error of loss, dX and dW at most the plain path's and a tenth, and a mean
    error within 4 standard errors of zero, or smaller than the plain path's. dW's, summed in FP32, is smaller."""
    errors = {plain: [[], [], []], chunked: [[], [], []]}
    for seed in range(6):
        exact = run(plain, seed, torch.float64, softcap=softcap)
        for function, lists in errors.items():
            for found, got, want in zip(lists, run(function, seed, torch.float32, autocast, softcap, scale), exact,
                                        strict=True):
                found.append((got - want).flatten())
    for name, ours, theirs in zip(("loss", "dx", "dw"), errors[chunked], errors[plain], strict=True):
        ours, theirs = torch.cat(ours), torch.cat(theirs)
        assert ours.square().mean().sqrt() <= 1.1 * theirs.square().mean().sqrt() + 1e-9, name
        if name != "loss":
            assert ours.mean().abs() <= max(4 * ours.std() / len(ours) ** 0.5, theirs.mean().abs()), name
    if autocast:
        assert ours.std() < theirs.std()  # of dw


def test_a_factor_that_is_a_power_of_two_changes_no_bit():
    """dX of the plain path is rounded after the factor, ours before."""
    x, w, targets = inputs()
    targets = targets.clamp_min(0).flatten()[:64].view(4, 16)  # the mean is over 64 tokens

    def gradient(function, scale):
        one = x[:, :16].float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            (function(one, w.float(), targets) * scale).backward()
        return one.grad

    assert torch.equal(gradient(chunked, 1.0), gradient(chunked, 0.25) * 4)
    difference = gradient(chunked, 1.0) - gradient(plain, 1.0)  # exp and log of another order of operations
    assert (difference != 0).float().mean() < 0.05 and difference.abs().max() < 2e-3 * gradient(plain, 1.0).abs().max()


def test_no_more_than_a_chunk_of_logits_exists(monkeypatch):
    shapes, original = [], loss.softmax_gradient
    monkeypatch.setattr(loss, "softmax_gradient", lambda logits, *rest: shapes.append((logits.shape, logits.dtype))
                        or original(logits, *rest))
    run(chunked, autocast=torch.bfloat16)
    assert [shape[0] for shape, _ in shapes] == [32, 32, 32, 24] and {dtype for _, dtype in shapes} == {torch.bfloat16}


def test_no_token_counts_and_non_finite_logits():
    """As torch's: NaN for a mean over nothing, and non-finite logits show in the loss."""
    x, w, targets = inputs()
    assert chunked(x, w, torch.full_like(targets, -1)).isnan()
    for bad in (float("nan"), float("inf")):
        broken = w.clone()
        broken[7, 3] = bad
        assert not chunked(x, broken, targets).isfinite() and not plain(x, broken, targets).isfinite()


@pytest.mark.parametrize("grad", [True, False])
def test_the_operator_keeps_torchs_rules(grad):
    x, w, targets = inputs()
    args = (x.flatten(0, 1).float().requires_grad_(grad), w.float().requires_grad_(grad), targets.flatten(),
            torch.float32, CHUNK, 5.0, grad)
    torch.library.opcheck(loss._op, args)


def model(**fields):
    torch.manual_seed(0)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=130, **fields), [attend] * 2)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_model(softcap):
    """The same loss and gradients, compiled in one graph too; no logits with targets, the last ones without."""
    x, y = torch.randint(130, (2, 4, 16), generator=torch.Generator().manual_seed(1))
    whole, parts = model(logit_softcap=softcap), model(logit_softcap=softcap, loss_chunk=24)
    compiled = torch.compile(model(logit_softcap=softcap, loss_chunk=24), backend="aot_eager", fullgraph=True)
    values = []
    for one in (whole, parts, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            logits, value = one(x, y)
        value.backward()
        values.append(value.item())
        assert (logits is None) == (one is not whole)
    assert values[1] == pytest.approx(values[0], rel=1e-6) and values[2] == values[1]
    for (name, a), b, c in zip(whole.named_parameters(), parts.parameters(), compiled.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 5e-3 * a.grad.norm(), name  # BF16: some roundings fall the other way
        assert torch.equal(b.grad, c.grad), name
    with torch.no_grad():
        assert parts(x, y)[1].item() == pytest.approx(whole(x, y)[1].item(), rel=1e-6)
        assert torch.equal(parts(x)[0], whole(x)[0])


KERNEL = """
import torch
from loss import softmax_gradient
from loss_kernel import softmax_gradient_kernel
g = torch.Generator().manual_seed(0)
for softcap in (0.0, 5.0):
    for V, block in ((300, 128), (256, 128), (50, 64)):
        logits = torch.randn(7, V, generator=g) * 8
        logits[2, 5] = 1e4
        targets = torch.tensor([0, V - 1, 5, -1, 3, 1, 2])
        for grad in (False, True):
            a, b, losses = logits.clone(), logits.clone(), torch.full((7,), -1.0)
            want = softmax_gradient(a, targets, softcap, grad)
            softmax_gradient_kernel[(7,)](b, targets, losses, b.stride(0), V, SOFTCAP=softcap, GRAD=grad, BLOCK=block)
            assert torch.allclose(losses, want, rtol=1e-6, atol=1e-6), (losses, want)
            assert (a - b).abs().max() < 1e-6 and losses[3] == 0 and (not grad or (b[3] == 0).all())
            assert grad != torch.equal(b, logits)
print("equal")
"""


def test_kernel_equals_torch():
    """In Triton's interpreter, which needs a process of its own. BF16 logits are for tests/gpu: it has none."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", KERNEL], env=env, capture_output=True, text=True, timeout=120)
    assert result.stdout == "equal\n", result.stderr
