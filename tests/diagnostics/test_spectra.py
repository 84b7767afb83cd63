"""Norms, alignments and entropies while training, against NumPy's SVD, and what a probe logs of them."""

import numpy as np
import pytest
import torch

from attention import AttentionLayer, AttentionSpec
from diagnostics import spectra, weights
from diagnostics.spectra import Spectra, alignment, as_record, power_iteration
from model import GPT, GPTConfig

L, H, C, T, V = 2, 2, 32, 24, 64
D = C // H


def model() -> GPT:
    torch.manual_seed(0)
    one = GPT(GPTConfig(n_layer=L, n_head=H, n_embd=C, block_size=T, vocab_size=V),
              [AttentionLayer(AttentionSpec("flash_fp32"), i) for i in range(L)])
    with torch.no_grad():
        for block in one.transformer.h:
            block.attn.c_attn.weight.mul_(10)
    return one


def svd(w) -> tuple[np.ndarray, np.ndarray]:
    """sigma_1 (...) and v_1 (..., n) by NumPy in float64."""
    _, sigma, vt = np.linalg.svd(w.detach().double().numpy(), full_matrices=False)
    return sigma[..., 0], vt[..., 0, :]


@pytest.mark.parametrize("shape", [(5, 20, 20), (2, 3, 8, 30), (4, 30, 8), (1, 1)])
def test_exact(shape):
    """Norms and directions of random, rank-one, zero, NaN and doubly degenerate matrices."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sigma, v = weights.top_singular(w)
    expected, direction = svd(w)
    np.testing.assert_allclose(sigma, expected, rtol=1e-6)
    np.testing.assert_allclose(abs((v.double().numpy() * direction).sum(-1)), 1, atol=1e-5)


def test_exact_where_it_is_hard():
    rank_one = 3e-3 * torch.outer(torch.ones(6) / 6**0.5, torch.eye(9)[2])
    twice = torch.diag(torch.tensor([2.0, 2.0, 1.0]))
    assert weights.top_singular(rank_one)[0].item() == pytest.approx(3e-3, rel=1e-6)
    assert abs(weights.top_singular(rank_one)[1][2].item()) == pytest.approx(1)
    sigma, v = weights.top_singular(twice)
    assert sigma.item() == 2 and v[2].item() == 0 and v.norm().item() == pytest.approx(1)
    close = torch.diag(torch.tensor([1.0, 1 - 1e-6, 0.5]))
    assert weights.top_singular(close)[0].item() == pytest.approx(1, rel=1e-7)
    assert [x.abs().sum().item() for x in weights.top_singular(torch.zeros(3, 4))] == [0, 0]
    assert weights.top_singular(torch.full((3, 3), torch.nan))[0].isnan()


def test_power_iteration_keeps_up():
    """From an exact start, weights that drift a little between probes: a lower bound, within 1e-3 of SVD at every one
    (random matrices, whose first singular values lie close); with a gap, within 1e-5. A random start gets there too."""
    draw = torch.Generator().manual_seed(0)
    for gap, tolerance in ((0.0, 1e-3), (10.0, 1e-5)):
        w = torch.randn(6, 48, 64, generator=draw)
        w[:, 0, 0] += 2 * gap
        v = weights.top_singular(w)[1]
        for _ in range(20):
            w = w + 0.02 * torch.randn(w.shape, generator=draw)
            sigma, v = power_iteration(w, v)
            expected = svd(w)[0]
            assert (sigma.numpy() <= expected * (1 + 1e-6)).all()
            np.testing.assert_allclose(sigma, expected, rtol=tolerance)
            np.testing.assert_allclose(v.norm(dim=-1), 1, rtol=1e-5)
    start = torch.nn.functional.normalize(torch.randn(6, 64, generator=draw), dim=-1)
    np.testing.assert_allclose(power_iteration(w, start, 60)[0], expected, rtol=1e-6)
    sigma, v = power_iteration(torch.zeros(2, 3, 4), torch.ones(2, 4) / 2)
    assert sigma.tolist() == [0, 0] and not v.any()
    assert power_iteration(torch.eye(4)[None], v[:1])[0].item() == pytest.approx(1)  # it starts anew


def test_alignment():
    """Against cosines by hand; one-sided inputs are all on one side."""
    draw = torch.Generator().manual_seed(0)
    x, v = torch.randn(3, 10, 8, generator=draw), torch.randn(2, 8, generator=draw)
    v = torch.nn.functional.normalize(v, dim=-1)
    size, positive = alignment(x.flatten(0, 1), v)
    flat = x.reshape(-1, 8).double().numpy()
    cosine = flat @ v.double().numpy().T / np.linalg.norm(flat, axis=1)[:, None]
    np.testing.assert_allclose(size, abs(cosine).mean(0), rtol=1e-5)
    np.testing.assert_allclose(positive, (cosine > 0).mean(0), rtol=1e-6)
    for side in (1, -1):
        size, positive = alignment(side * torch.ones(4, 8), torch.ones(1, 8) / 8**0.5)
        assert size.item() == pytest.approx(1) and positive.item() == (side > 0)


def test_entropy_of_grams():
    """That of `qk_entropy`, by SVD; a head that lacks directions, and a NaN in one head alone."""
    weight = torch.randn(3 * C, C, generator=torch.Generator().manual_seed(0))

    def grams(w):
        heads = w.view(3, H, D, C)[:2].double()
        return (heads @ heads.mT).unbind(0)

    np.testing.assert_allclose(weights.entropy_of_grams(*grams(weight)), weights.qk_entropy(weight, H), atol=1e-5)
    weight[D // 2:D] = 0  # head 0's W_Q has D / 2 directions
    np.testing.assert_allclose(weights.entropy_of_grams(*grams(weight)), weights.qk_entropy(weight, H), atol=1e-3)
    expected = weights.qk_entropy(weight, H)[1].item()
    weight[0, 0] = torch.nan
    found = weights.entropy_of_grams(*grams(weight))
    assert found[0].isnan() and found[1].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_logged(exact):
    """Every key against SVD of the weights and cosines of the inputs that the layers saw; no hook stays."""
    one, idx = model(), torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(1))
    watch = Spectra(one)
    for _ in range(1 if exact else 60):
        watch.update(exact)
    seen = {}
    modules = {f"{i}{n}": one.get_submodule(f"transformer.h.{i}.{n}") for i in range(L)
               for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    hooks = [m.register_forward_pre_hook(lambda _m, a, n=n: seen.__setitem__(n, a[0].detach()))
             for n, m in modules.items()]
    with watch.listening():
        one(idx)
    for hook in hooks:
        hook.remove()
    assert not any(m._forward_pre_hooks for m in one.modules())
    record = as_record(watch.values().tolist())
    places = dict(zip(weights.KINDS, ("attn.c_attn",) * 3 + ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"), strict=True))
    for i, block in enumerate(one.transformer.h):
        for kind, w in weights.block_matrices(block).items():
            sigma, v = svd(w)
            assert record[f"probe/norm_{kind}/layer{i}"] == pytest.approx(sigma, rel=1e-5)
            x = seen[f"{i}{places[kind]}"].reshape(-1, w.shape[1]).double().numpy()
            cosine = x @ v / np.linalg.norm(x, axis=1)
            assert record[f"probe/alignment_{kind}/layer{i}"] == pytest.approx(abs(cosine).mean(), rel=0.02)
            share = min((cosine > 0).mean(), (cosine < 0).mean())
            assert record[f"probe/sign_diversity_{kind}/layer{i}"] == pytest.approx(share, abs=0.05)
        heads = block.attn.c_attn.weight.view(3, H, D, C)
        for n, name in ((1, "wk"), (2, "wv")):
            assert record[f"probe/{name}_norm_head/layer{i}"] == pytest.approx(svd(heads[n])[0], abs=1e-4)
        x = seen[f"{i}attn.c_attn"].reshape(-1, C).double().numpy()
        cosine = x @ svd(heads[0])[1].T / np.linalg.norm(x, axis=1)[:, None]
        assert record[f"probe/alignment_head/layer{i}"] == pytest.approx(abs(cosine).mean(0), rel=0.02)
        assert record[f"probe/sign_diversity_head/layer{i}"] == pytest.approx(
            np.minimum((cosine > 0).mean(0), (cosine < 0).mean(0)), abs=0.05)
        entropy = weights.qk_entropy(block.attn.c_attn.weight, H)
        assert record[f"probe/qk_entropy_head/layer{i}"] == pytest.approx(entropy.tolist(), abs=1e-4)
        assert record[f"probe/qk_entropy/layer{i}"] == pytest.approx(entropy.min().item(), abs=1e-4)
    assert len(record) == L * (3 * len(weights.KINDS) + 6)


def test_directions_go_on_from_a_state():
    """Deterministic, and equal after a state was loaded to what follows without a pause."""
    one = model()
    a, b = Spectra(one), Spectra(one)
    for kind, v in a.v.items():
        assert torch.equal(v, b.v[kind])
        assert v.norm(dim=-1).numpy() == pytest.approx(1, rel=1e-5)
    a.update(False)
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        one.transformer.h[0].mlp.c_fc.weight.add_(0.01)
    for watch in (a, b):
        watch.update(False)
    assert all(torch.equal(a.norms[kind], b.norms[kind]) and torch.equal(a.v[kind], b.v[kind]) for kind in a.v)
    assert set(a.v) == {*weights.KINDS, "heads"} and spectra.ROUNDS >= 2


@pytest.mark.parametrize("exact", [True, False])
def test_weights_too_large_to_iterate_on_leave_directions_that_can_be_saved(exact):
    """W^T W of 1e30 overflows FP32, the weights themselves do not; the next probe starts anew."""
    model = GPT(GPTConfig(1, 2, 32, 8, 64), [AttentionLayer(AttentionSpec("flash_fp32"), 0)])
    found = Spectra(model)
    weight = model.transformer.h[0].attn.c_proj.weight.data
    kept = weight.clone()
    weight.mul_(1e32)
    found.update(exact)
    assert all(v.isfinite().all() for v in found.state_dict().values())
    weight.copy_(kept)
    for _ in range(100):
        found.update(False)
    assert found.norms["W_O"].item() == pytest.approx(torch.linalg.matrix_norm(kept, 2).item(), rel=1e-2)


@pytest.mark.parametrize("D", [2, 16, 64])
def test_factor_entropy(D):
    """That of the singular values by SVD: random, nearly rank one, and decaying to 1e-9 matrices; scale and 0."""
    draw = torch.Generator().manual_seed(0)
    f = torch.randn(6, D, D, generator=draw).double()
    f[1] += 1e4
    f[2] = torch.linalg.qr(f[2]).Q * torch.logspace(0, -9, D)
    f[3] *= 1e-20
    f[4] = torch.eye(D) * 1e20
    f[5] = 0
    assert weights.factor_entropy(f * torch.nan).isnan().all()
    expected = weights.spectral_entropy(torch.linalg.svdvals(f))
    np.testing.assert_allclose(weights.factor_entropy(f), expected, atol=2e-6)
    np.testing.assert_allclose(weights.factor_entropy(f[None])[0], expected, atol=2e-6)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_of_weights_that_are_not_finite_is_nan(exact, bad):
    """Of one entry of W_Q, in layer 0 and head 1: in that matrix and head, and, but for norms, in the next layer, whose
    inputs are not finite. The next probe of finite ones starts anew."""
    one, idx = model(), torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(1))
    weight = one.transformer.h[0].attn.c_attn.weight

    def record():
        watch.update(exact)
        with watch.listening(), torch.no_grad():
            one(idx)
        return as_record(watch.values().tolist())

    watch, kept = Spectra(one), weight.detach().clone()
    weight.data[D, 3] = bad
    found = record()
    for name in ("norm", "alignment", "sign_diversity"):
        assert np.isnan(found[f"probe/{name}_W_Q/layer0"]) and np.isfinite(found[f"probe/{name}_W_K/layer0"])
        assert np.isnan(found[f"probe/{name}_W_K/layer1"]) == (name != "norm")
    for name in ("qk_entropy_head", "alignment_head", "sign_diversity_head"):
        assert np.isfinite(found[f"probe/{name}/layer0"]).tolist() == [True, False]
    weight.data.copy_(kept)
    assert np.isfinite(np.concatenate([np.atleast_1d(value) for value in record().values()])).all()


@pytest.mark.parametrize("heads", [[torch.nan, 1.0], [1.0, torch.nan]])
def test_a_layers_entropy_is_nan_where_a_heads_is(heads):
    row = [0.0] * 3 * len(weights.KINDS) + [0.0] * 2 * H + heads + [0.0] * 2 * H
    assert np.isnan(as_record([row])["probe/qk_entropy/layer0"])
