"""The probes of tensors against direct NumPy float64, and on planted cases whose answer is known."""

import math

import numpy as np
import pytest
import torch

from attention import AttentionSpec
from attention.rounding import round_bf16
from diagnostics import bias, coherence, precision, ties, weights

B, T, D, C = 2, 48, 16, 24


def bf16(x) -> np.ndarray:
    return round_bf16(torch.as_tensor(np.asarray(x, dtype=np.float64))).numpy()


def head(seed=0, scale=3.0):
    """q, k, v, do (B, T, D) of BF16 values with large scores; keys 5 and 9 are one key, so they tie exactly."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v, do = (round_bf16(torch.randn(B, T, D, generator=draw) * s) for s in (scale, scale, 1, 1e-3))
    k[:, 9] = k[:, 5]
    q[:, 12::3] = k[:, 5, None] * 2  # these rows have their maximum at both
    return q, k, v, do


def direct_scores(q, k, spec):
    q, k = q.double().numpy(), k.double().numpy()
    s = bf16(bf16(q @ k.T) * D**-0.5) if spec.scores == "bf16" else q @ k.T * D**-0.5
    return np.where(np.tril(np.ones((T, T))), s, -np.inf)


def direct(s, v, spec):
    """O of one sequence before its last rounding, by loops over tiles in NumPy."""
    o, m, l = np.zeros((T, D)), np.full(T, -np.inf), np.zeros(T)
    for start in range(0, T, spec.tile_k):
        for t in range(start, T):
            row = s[t, start:start + spec.tile_k]
            new = max(m[t], row.max())
            p, a = np.exp(row - new), np.exp(m[t] - new)
            l[t], m[t] = l[t] * a + p.sum(), new
            pv = np.float32(bf16(p) @ v[start:start + spec.tile_k])  # FP32 drops what would break a tie of two ones
            o[t] = bf16(bf16(o[t] * a) + bf16(pv)) if spec.pv == "bf16" else o[t] * a + pv
    return o / l[:, None]


@pytest.mark.parametrize("spec", [AttentionSpec(tile_k=16), AttentionSpec("flash_fa2", tile_k=32)])
def test_both_precisions(spec):
    """hp is plain float64 softmax attention on lp's scores; lp differs from it by what the spec rounds after S."""
    q, k, v, do = head()
    pair = precision.both(q, k, v, spec, do)
    for b in range(B):
        s, wide = pair.s[b].numpy(), v[b].double().numpy()
        np.testing.assert_allclose(np.where(s == -np.inf, 0, s), np.tril(direct_scores(q[b], k[b], spec)),
                                   rtol=1e-6, atol=1e-5)
        pbar = np.exp(s - s.max(1, keepdims=True))
        l = pbar.sum(1)[:, None]
        unrounded, o_hp = direct(s, wide, spec), pbar @ wide / l
        np.testing.assert_allclose(pair.o_hp[b], o_hp, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(pair.p[b], pbar / l, rtol=1e-12)
        # FP32 sums and exponentials next to a BF16 boundary may round the other way.
        near = np.isclose(pair.unrounded[b], unrounded, rtol=2e-6, atol=1e-6)
        assert near.mean() > 0.98 and (pair.o_lp[b].numpy() == bf16(pair.unrounded[b])).all()
        np.testing.assert_allclose(pair.pv_error[b][near], ((unrounded - o_hp) * l)[near], atol=2e-5)
        assert torch.equal(pair.o_error[b], pair.o_lp[b] - pair.o_hp[b])
        direct_delta = (do[b].double().numpy() * (pair.o_lp[b].numpy() - o_hp)).sum(1)
        np.testing.assert_allclose(pair.delta_error[b], direct_delta, atol=1e-9)
    assert (pair.o_error.abs().max() < 0.05) and (pair.o_error != 0).any()
    lse = torch.logsumexp(pair.s, -1)
    torch.testing.assert_close(pair.lse, lse, rtol=1e-6, atol=1e-5)


def test_high_precision_sees_the_backends_own_scores():
    """S is bit-equal to what lp exponentiates: where nothing is rounded after S the two agree to FP32's last places."""
    q, k, v, do = head(1)
    exact = AttentionSpec(probs="fp32", pv="fp32", output="fp32", tile_k=16)
    pair = precision.both(q, k, v, exact, do)
    assert pair.o_error.abs().max() < 5e-6 and pair.pv_error.abs().max() < 2e-5
    unrounded_scores = precision.both(q, k, v, AttentionSpec("flash_fa2", tile_k=16)).s
    assert (pair.s[~pair.s.isinf()] != unrounded_scores[~pair.s.isinf()]).double().mean() > 0.5
    assert precision.both(q, k, v, exact).delta_lp is None
    spec = AttentionSpec(output_heads=(2,))
    assert precision.head_spec(spec, 2).output == "fp32" and precision.head_spec(spec, 1).output == "bf16"
    other = AttentionSpec(output_heads=(2,), delta="dp_p")
    assert [precision.head_spec(other, h).delta for h in (1, 2)] == ["dp_p", "dp_p"]


def test_delta_follows_what_o_left_over():
    """delta_lp is rowsum(dO O) of an O that has lost 2^-16 of itself; a head whose O is FP32 leaves nothing over."""
    q, k, v, do = head(1)
    spec = AttentionSpec("flash_fa2", delta="do_o_exact", output_heads=(2,), tile_k=16)
    pair = precision.both(q, k, v, precision.head_spec(spec, 1), do)
    exact, stored = ((do.double() * o).sum(-1) for o in (pair.unrounded, pair.o_lp))
    lost = 2**-16 * (do.double() * pair.unrounded).abs().sum(-1) + 1e-6
    assert ((pair.delta_lp - exact).abs() <= lost).all() and ((pair.delta_lp - stored).abs() > lost).any()
    one, other = precision.head_spec(spec, 2), precision.head_spec(spec, 1)
    assert (one.output, one.delta, other.output, other.delta) == ("fp32", "do_o", "bf16", "do_o_exact")


def planted_row(ones: int, remainder: float, value=-2.296875, spec=None):
    """A last row with `ones` equal maxima at V = value, and one key of V = remainder / P below them; others far off."""
    n = ones + 2
    q, k, v = (torch.zeros(1, n, D) for _ in range(3))
    q[0, -1, 0] = 4.0
    k[0, :ones, 0], k[0, ones, 0], k[0, -1, 0] = 8.0, 0.0, -64.0  # S = 8, 0 and -64 in the last row
    v[0, :ones] = value
    v[0, ones] = round_bf16(torch.tensor(remainder / math.exp(-8)))
    return q, k, v, precision.both(q, k, v, spec or AttentionSpec(tile_k=16))


@pytest.mark.parametrize("ones, remainder", [(1, 0.0), (1, -1e-3), (2, 0.0), (2, -1e-3), (2, 1e-3), (3, -1e-3), (4, 0)])
def test_planted_row_of_ones(ones, remainder):
    """pv_error of the last row is BF16(x) - x with x = K V + P V of the remainder: the paper's one addition."""
    _, _, v, pair = planted_row(ones, remainder)
    p = bf16(np.float32(math.exp(-8)))
    x = ones * -2.296875 + p * v[0, ones, 0].double().item()
    hp = ones * -2.296875 + math.exp(-8) * v[0, ones, 0].double().item()
    assert pair.pv_error[0, -1, 0].item() == pytest.approx(bf16(x) - hp, abs=1e-6)
    mask = ties.maxima(pair.s, "exact")
    assert mask[0, -1].sum() == ones
    lines = bias.by_ones(pair, v, mask)
    if ones == 4:  # the only row with that many ones besides rows 3 and 4 of q = 0, which see S = 0 everywhere
        assert {line["ones"] for line in lines} >= {1, 4}
    error = bias.prefix_error(pair.pbar[0, -1], v[0])
    running = np.cumsum(np.append(np.full(ones, -2.296875), [p * v[0, ones, 0].item(), 0]))
    exact = np.cumsum(pair.pbar[0, -1].numpy() * v[0, :, 0].double().numpy())
    np.testing.assert_allclose(error[:, 0], bf16(running) - exact, atol=1e-7)
    assert error[0, 0] == 0  # one value alone is BF16 already


def test_the_papers_addition():
    """Paper section 3.3.2: -2.4071154594421387 + -2.296875 errs by -0.014759540557861328, without residual by a tie."""
    v = torch.tensor([[-2.40625, -2.296875]])
    error = bias.addition_error(v, torch.tensor([-2.4071154594421387 + 2.40625], dtype=torch.float64))
    assert error.item() == pytest.approx(-0.014759540557861328, abs=1e-7)
    assert bias.addition_error(v, torch.zeros(1)).item() == -4.6875 + 4.703125


def test_synthetic_table():
    """K = 1: the remainder is lost. K = 2: half the sums are ties, which the remainder decides."""
    size = 2.0**-12
    table = {(line["ones"], line["remainder"]): line for line in bias.synthetic_table(size=size)}
    assert len(table) == 12
    assert table[1, "none"]["error_size"] == 0
    assert table[1, "same sign"]["error"] == pytest.approx(size / 2, rel=0.02)
    assert table[1, "opposite sign"]["error"] == pytest.approx(-size / 2, rel=0.02)
    assert table[2, "same sign"]["error"] == pytest.approx(-1 / 128 + size / 2, rel=0.03)
    assert table[2, "opposite sign"]["error"] == pytest.approx(1 / 128 - size / 2, rel=0.03)
    assert abs(table[2, "none"]["error"]) < 3e-4 and table[2, "none"]["error_size"] == pytest.approx(1 / 128, rel=0.03)
    for k in (3, 4):
        assert table[k, "same sign"]["error"] < table[k, "none"]["error"] < table[k, "opposite sign"]["error"]


def test_by_ones_against_loops():
    """Every line of the table is the mean over the entries that a plain loop puts there; lines cover all entries."""
    q, k, v, do = head(2)
    pair = precision.both(q, k, v, AttentionSpec(tile_k=16), do)
    ones = ties.maxima(pair.s, "one")
    found = {}
    for b in range(B):
        for t in range(T):
            at = ones[b, t].nonzero()[:, 0]
            for i in range(D):
                values = v[b, at, i]
                sign = "negative" if (values < 0).all() else "positive" if (values > 0).all() else "mixed"
                key = (min(len(at), bias.MOST), sign)
                found.setdefault(key, []).append((pair.pv_error[b, t, i].item(), pair.o_error[b, t, i].item(),
                                                  math.copysign(1, pair.o_hp[b, t, i])))
    lines = bias.by_ones(pair, v, ones)
    assert {(line["ones"], line["sign"]) for line in lines} == found.keys() and len(found) > 4
    for line in lines:
        pv, o, sign = np.array(found[line["ones"], line["sign"]]).T
        assert line["entries"] == len(pv)
        for name, value in (("pv_error", pv), ("o_error", o), ("pv_size", abs(pv)), ("away", pv * sign)):
            assert line[name] == pytest.approx(value.mean(), rel=1e-9, abs=1e-15)


def test_by_remainder():
    """A plain loop over entries gives the same lines; planted rows fall where they were planted, turned to V < 0."""
    q, k, v, do = head(5)
    pair = precision.both(q, k, v, AttentionSpec(tile_k=16), do)
    ones = ties.maxima(pair.s, "one")
    found = {}
    for b, t, i in np.ndindex(B, T, D):
        at = ones[b, t].nonzero()[:, 0]
        sides = set(torch.sign(v[b, at, i]).tolist())
        if len(at) <= 4 and len(sides) == 1 and (side := sides.pop()):
            rest = side * (pair.o_hp[b, t, i] * pair.l[b, t] - v[b, at, i].double().sum()).item()
            name = "same sign" if rest > 0 else "opposite sign" if rest < 0 else "none"
            found.setdefault((len(at), name), []).append(-side * pair.pv_error[b, t, i].item())
    lines = bias.by_remainder(pair, v, ones)
    assert {(line["ones"], line["remainder"]) for line in lines} == found.keys() and len(found) >= 4
    for line in lines:
        values = np.array(found[line["ones"], line["remainder"]])
        assert line["entries"] == len(values) and line["error"] == pytest.approx(values.mean(), abs=1e-12)
        assert line["error_size"] == pytest.approx(abs(values).mean())
    # V = 2.296875 twice sums to a BF16 value, so a remainder of its sign is lost: towards zero, whatever that sign.
    for value in (-2.296875, 2.296875):
        _, _, v, pair = planted_row(2, math.copysign(1e-2, value), value)
        mask = ties.maxima(pair.s, "one")
        mask[0, :-1] = False
        line, = (x for x in bias.by_remainder(pair, v, mask) if x["ones"] == 2 and x["entries"] == D)
        assert line["remainder"] == "same sign" and line["error"] == pytest.approx(1e-2, rel=0.01)


def test_delta_shares():
    """Parts add up to the sum, rows by a loop, and positions by `prefix_error` row by row."""
    q, k, v, do = head(3)
    spec = AttentionSpec(tile_k=16)
    pair = precision.both(q, k, v, spec, do)
    ones = ties.maxima(pair.s, "one")
    found = bias.delta_shares(pair, v, do, ones, spec)
    error = (do.double() * pair.o_error).sum(-1)
    assert found["sum"] == pytest.approx(error.sum().item(), abs=1e-8)
    assert found["size"] == pytest.approx(error.abs().sum().item(), abs=1e-7)
    assert found["root"] == pytest.approx(error.square().sum().sqrt().item(), abs=1e-8)
    assert found["rows_tied"] + found["rows_single"] + found["rows_none"] == pytest.approx(found["sum"], abs=1e-15)
    assert found["rows"] == {"rows_tied": int((ones.sum(-1) > 1).sum()), "rows_none": 0,
                             "rows_single": int((ones.sum(-1) == 1).sum())} and found["rows"]["rows_tied"] >= 20
    assert found["rows_tied"] == pytest.approx(error[ones.sum(-1) > 1].sum().item(), abs=1e-8)
    at_ones = elsewhere = 0.0
    for b in range(B):
        for t in range(T):
            step = torch.diff(bias.prefix_error(pair.pbar[b, t], v[b]), dim=0, prepend=torch.zeros(1, D).double())
            part = (step @ do[b, t].double()) / pair.l[b, t]
            at_ones += part[ones[b, t]].sum().item()
            elsewhere += part[~ones[b, t]].sum().item()
    assert found["at_ones"] == pytest.approx(at_ones, rel=1e-6)
    assert found["elsewhere"] == pytest.approx(elsewhere, rel=1e-6)
    assert found["at_ones"] + found["elsewhere"] + found["rest"] == pytest.approx(found["sum"], abs=1e-15)


def test_tie_rules_and_places():
    """Scores at 0, 0.9e-3, 1.9e-3 and 2e-3 below the maximum: what each rule counts; a planted tie is found where it
    was planted."""
    s = torch.tensor([[[5.0, 5.0, 5 - 0.9e-3, 5 - 1.9e-3, 5 - 2.0e-3, 4.0, -torch.inf]]], dtype=torch.float64)
    assert [int(ties.maxima(s, rule).sum()) for rule in ties.RULES] == [2, 3, 4]
    assert int(ties.maxima(s, "epsilon", epsilon=1.95e-3).sum()) == 4
    with pytest.raises(ValueError, match="rule='near' is not one of exact, epsilon, one"):
        ties.maxima(s, "near")

    draw = torch.Generator().manual_seed(0)
    s = torch.randn(2, 6, 6, generator=draw).double().masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf)
    s[0, 4, [0, 3]] = 9.0
    s[1, 4, [1, 4]] = 9.0
    s[1, 5, [0, 1, 5]] = 9.0
    found = ties.places(ties.maxima(s, "exact"))
    assert found["rows"] == 3 and found["share"] == 0.25 == ties.tied_share(ties.maxima(s, "exact"))
    assert found["first_token"] == pytest.approx(2 / 3) and found["own_token"] == pytest.approx(2 / 3)
    assert found["by_query"] == [0, 0, 0, 0, 1.0, 0.5] and found["by_key"] == [2, 2, 0, 1, 1, 1]
    assert found["by_distance"] == [2, 1, 0, 1, 2, 1]
    assert found["mean_distance"] == pytest.approx((4 + 1 + 3 + 5 + 4) / 7)
    assert ties.places(ties.maxima(s[:, :4, :4], "exact"))["mean_distance"] is None


def test_norms_and_entropy():
    """Against NumPy's SVD, and log D for orthogonal heads, 0 for a planted rank-one form."""
    weight, H = torch.randn(3 * C, C, generator=torch.Generator().manual_seed(0)), 3
    heads = weight.numpy().astype(np.float64).reshape(3, H, C // H, C)
    np.testing.assert_allclose(weights.head_norms(weight, H),
                               np.linalg.svd(heads, compute_uv=False)[..., 0], rtol=1e-9)
    sigma = np.linalg.svd(heads[0].swapaxes(1, 2) @ heads[1], compute_uv=False)[:, :C // H]
    p = sigma / sigma.sum(1, keepdims=True)
    np.testing.assert_allclose(weights.qk_entropy(weight, H), -(p * np.log(p)).sum(1), rtol=1e-9)
    eye = torch.eye(C).repeat(3, 1)
    np.testing.assert_allclose(weights.qk_entropy(eye, H), math.log(C // H), rtol=1e-12)
    eye[: C // H] = 0
    eye[0, 0] = 7.0
    np.testing.assert_allclose(weights.qk_entropy(eye, H)[0], 0, atol=1e-7)
    for shape in ((5, 9), (9, 5)):
        w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        direct = np.linalg.svd(w.double().numpy(), compute_uv=False)[0]
        assert weights.spectral_norm(w) == pytest.approx(direct, rel=1e-9)
    assert weights.spectral_entropy(torch.zeros(3)).item() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite(bad):
    """NaN of their matrix and head alone: neither 0 nor LAPACK's error."""
    weight, H = torch.randn(3 * C, C, generator=torch.Generator().manual_seed(0)), 3
    norms, entropy = weights.head_norms(weight, H), weights.qk_entropy(weight, H)
    weight[C // H, 0] = bad  # head 1's W_Q
    for found, before in ((weights.head_norms(weight, H)[0], norms[0]), (weights.qk_entropy(weight, H), entropy)):
        assert found.isfinite().tolist() == [head != 1 for head in range(H)]
        assert torch.equal(found[::2], before[::2])
    assert math.isnan(weights.spectral_norm(weight[:C])) and math.isfinite(weights.spectral_norm(weight[C:2 * C]))


def test_gradient_error_is_that_of_wq():
    """dW_Q,hp - dW_Q,lp of two backward passes is the weighted sum of rank-1 matrices."""
    q, k, v, do = (x.double() for x in head(4))
    x = torch.randn(B, T, C, generator=torch.Generator().manual_seed(5)).double()
    pair = precision.both(q, k, v, AttentionSpec(tile_k=16), do)
    dp = do @ v.mT
    dwq = [((pair.p * (dp - delta[..., None]) * D**-0.5) @ k).flatten(0, 1).mT @ x.flatten(0, 1)
           for delta in (pair.delta_hp, pair.delta_lp)]
    matrices = coherence.rank_one(pair.p, k, x)
    error = coherence.gradient_error(matrices, pair.delta_error.flatten(), D)
    torch.testing.assert_close(error, dwq[0] - dwq[1], rtol=1e-6, atol=1e-10)
    dense = torch.stack([matrices.matrix(n) for n in range(len(matrices))])
    w = torch.randn(len(matrices), generator=torch.Generator().manual_seed(6)).double()
    torch.testing.assert_close(matrices.weighted_sum(w), (w[:, None, None] * dense).sum(0))
    flat = dense.flatten(1)
    direct = (flat @ flat.T) / (flat.norm(dim=1)[:, None] * flat.norm(dim=1))
    torch.testing.assert_close(matrices.cosines(), direct)
    part = coherence.RankOne(matrices.pk[:7], matrices.x[:7])
    torch.testing.assert_close(part.cosines(matrices), direct[:7])


def test_explained_growth():
    """Norms by NumPy; an update along the error explains all of the growth, one orthogonal to it nothing."""
    draw = torch.Generator().manual_seed(0)
    weight, error, update = (torch.randn(D, C, generator=draw) for _ in range(3))
    found = coherence.explained_growth(error, weight, update)
    w, e, u = (x.double().numpy() for x in (weight, error, update))
    norms = [np.linalg.norm(m, 2) for m in (w, w + u, w + (e * u).sum() / (e * e).sum() * e)]
    assert [found[n] for n in ("before", "after", "along")] == pytest.approx(norms)
    assert found["share"] == pytest.approx((norms[2] - norms[0]) / (norms[1] - norms[0]))
    top = torch.outer(*(torch.linalg.svd(weight)[i][pick] for i, pick in ((0, (slice(None), 0)), (2, 0))))
    assert coherence.explained_growth(3 * top, weight, 0.5 * top)["share"] == pytest.approx(1)
    away = error - (error * top).sum() * top
    assert coherence.explained_growth(away, weight, 0.5 * top)["share"] == pytest.approx(0, abs=1e-6)
    assert coherence.explained_growth(error, weight, -0.1 * weight)["share"] is None


def test_planted_rank_one_error():
    """Errors that share a direction add up to rank one along it; spread ones do not, and signs cancel in the cosine."""
    draw = torch.Generator().manual_seed(0)
    u, w = torch.randn(D, generator=draw).double(), torch.randn(C, generator=draw).double()
    size = torch.rand(40, 1, generator=draw).double() + 0.5
    same = coherence.RankOne(size * u, size * w)
    error = same.weighted_sum(torch.ones(40))
    assert coherence.effective_rank(error) == pytest.approx(1, abs=1e-5)
    assert coherence.top_share(error) == pytest.approx(1)
    assert coherence.summary(same.cosines(), same=True) == pytest.approx(
        {"mean": 1, "mean_size": 1, "share_above_0.9": 1})
    found = coherence.projection(error, 0.3 * torch.outer(u, w))
    assert found == pytest.approx({"cosine": 1, "subspace": 1})
    assert coherence.projection(error, -torch.outer(u, w)) == pytest.approx({"cosine": -1, "subspace": 1})
    orthogonal = torch.outer(u, torch.linalg.qr(torch.stack([w, torch.ones(C).double()], 1)).Q[:, 1])
    assert coherence.projection(error, orthogonal) == pytest.approx({"cosine": 0, "subspace": 0}, abs=1e-12)
    unit = torch.outer(u, w) / (u.norm() * w.norm())
    between = 0.6 * unit + 0.8 * orthogonal / orthogonal.norm()
    assert coherence.projection(error, between) == pytest.approx({"cosine": 0.6, "subspace": 0.36})
    assert coherence.top_share(torch.diag(torch.tensor([2.0, 1.0]))) == pytest.approx(0.8)
    pair = torch.tensor([[1.0, -0.95], [-0.95, 1.0]])
    for same, mean, size in ((True, -0.95, 0.95), (False, 0.025, 0.975)):  # of one set the diagonal says nothing
        assert coherence.summary(pair, same) == pytest.approx({"mean": mean, "mean_size": size, "share_above_0.9": 1})
    spread = coherence.RankOne(*(torch.randn(400, n, generator=draw).double() for n in (D, C)))
    assert coherence.effective_rank(spread.weighted_sum(torch.ones(400))) > 10
    assert abs(coherence.summary(spread.cosines(), same=True)["mean"]) < 0.01
    assert coherence.effective_rank(torch.eye(4)) == pytest.approx(4)
    assert coherence.cosines(torch.zeros(1, 3), torch.ones(1, 3)).item() == 0
