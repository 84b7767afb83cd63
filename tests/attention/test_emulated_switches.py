"""Each switch of the emulation, in the direction that the paper predicts; ties and stabilizers above all."""

import math

import pytest
import torch
from attention_cases import (
    FLASH,
    INF,
    assert_within,
    bias,
    errors,
    exact,
    inputs,
    materialised,
    run_spec,
    spec,
    with_scores,
)

from attention import attend
from attention.emulated import _new_maximum, emulated, score_gradients, trace
from attention.rounding import round_bf16
from attention.spec import SMALLEST_SHIFT

# Large logits, ties, stabilizers.


@pytest.mark.parametrize("backend", FLASH)
def test_largest_probability_is_exactly_one_at_logits_of_1e4(backend):
    """With a unique maximum far above the rest P is one 1 and zeros: O is a row of V and L the maximum, to the bit."""
    T = 64
    gen = torch.Generator().manual_seed(6)
    scores = torch.stack([torch.randperm(T, generator=gen) for _ in range(T)]) * 64.0 + 6000  # 6000 to 10032
    q, k, v = with_scores(scores, round_bf16(torch.randn(T, T, generator=gen)))
    got = trace(q, k, v, spec(backend, tile_k=16))
    best = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -INF).argmax(-1)
    assert torch.equal(got.unrounded[0, 0], v[0, 0][best])
    assert torch.equal(got.lse, got.row_max) and got.row_max.max() > 9000 and got.ties.max() == 1
    if backend == "flash_fp32":
        x = [t.double() for t in inputs(T=40, D=64, scale=100)]
        s = (x[0] @ x[1].mT) / 8
        assert s.abs().max() > 1e4
        o = run_spec(spec(backend), *(t.float() for t in x))[0]
        assert (o - materialised(*x[:3])).abs().max() < 1e-2, "FP32 scores of 1e4 are off by up to 1e-3"


TIED = {"positive": 20.0, "large positive": 120.0, "negative": -120.0, "slightly negative": -3.0, "zero": 0.0}


@pytest.mark.parametrize("level", TIED.values(), ids=TIED)
@pytest.mark.parametrize("shift_cap", [12.0, INF])
@pytest.mark.parametrize("stabilizer", ["none", "paper", "capped", "clamp", "fixed", "unconditional", "lazy_max"])
def test_tied_maxima(stabilizer, shift_cap, level):
    """All scores equal: O is a mean of V whatever the shift, unless the paper's uncapped rule underflows to 0 / 0."""
    if stabilizer == "capped" and shift_cap == INF:
        with pytest.raises(ValueError, match="finite shift_cap"):
            spec(stabilizer=stabilizer, shift_cap=shift_cap)
        return
    T = 64
    v = round_bf16(torch.randn(T, T, generator=torch.Generator().manual_seed(7)))
    q, k, v = with_scores(torch.full((T, T), level), v)
    s = spec(stabilizer=stabilizer, shift_cap=shift_cap, tile_k=16)
    got = trace(q, k, v, s)
    want = materialised(*(t.double() for t in (q, k, v)))
    # -120 -> m' = 0 and 120 -> m' = 240 both give P = exp(-120), which FP32 does not hold
    underflows = shift_cap == INF and abs(level) == 120 and stabilizer in ("paper", "unconditional")
    lost = torch.full((T,), underflows)
    lost[0] &= stabilizer == "unconditional"  # one key alone is no tie
    o = got.unrounded[0, 0]
    assert torch.equal(o.isnan().all(-1), lost) and torch.equal(o.isnan().any(-1), lost)
    error = (o - want[0, 0])[~lost]
    allowed = 4 * 3 * 2**-9 * v.abs().max()  # four tiles, in each three roundings
    assert (error.abs() < allowed).all(), f"{error.abs().max():.2e}, signed mean {error.mean():.2e}"
    if not lost.any():
        assert all(t.isfinite().all() for t in run_spec(s, q, k, v, torch.ones_like(v)))
        if stabilizer != "clamp":
            torch.testing.assert_close(got.lse[0, 0], level + torch.arange(1, T + 1.0).log(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("level, switches, least, most", [
    (40.0, dict(stabilizer="none"), -4.5e-3, -3e-3),
    (0.25, dict(stabilizer="none"), -4.5e-3, -3e-3),
    (40.0, dict(stabilizer="capped"), -5e-4, 5e-4),  # meets the cap
    (0.25, dict(stabilizer="capped"), -5e-4, 5e-4),  # below the smallest shift
    (40.0, dict(stabilizer="capped", shift_cap=12.0), 1.5e-3, 2.5e-3),
    (40.0, dict(stabilizer="capped", shift_cap=17 * math.log(2)), -4.5e-3, -3e-3),
    (4.0, dict(stabilizer="fixed"), 4e-3, 5.5e-3),
    (4.0, dict(stabilizer="fixed", fixed_shift=math.log(2)), -4.5e-3, -3e-3),
    (4.0, dict(stabilizer="fixed", fixed_shift=SMALLEST_SHIFT), -5e-4, 5e-4),
], ids=str)
def test_a_shift_that_rows_share_adds_no_bias_and_removes_the_papers(level, switches, least, most):
    """Signed mean error of O before its last rounding, in section 3.3's situation, against float64. A shift of 1 or 12
    has P that BF16 rounds down in every row, one of n log 2 leaves the bias of P = 1 as it is."""
    q, k, v, _ = paper_inputs(ones=2, level=level)
    got = trace(q, k, v, spec(tile_k=0, **switches)).unrounded[0, 0, 32:].double()
    found = (got - materialised(*(t.double() for t in (q, k, v)))[0, 0, 32:]).mean().item()
    assert least < found < most, f"signed mean error of O {found:+.2e}"


def new_maximum(stabilizer, rm, rs, m=-INF, **switches):
    s = spec(stabilizer=stabilizer, **switches)
    return _new_maximum(torch.tensor([m]), torch.tensor([rm]), torch.tensor([rs]), s).item()


def test_what_replaces_the_row_maximum():
    letter = dict(shift_cap=INF)
    assert new_maximum("none", 20.0, 9) == 20
    assert new_maximum("clamp", 20.0, 9) == 20
    for rs, positive, negative in ((2, 40.0, 0.0), (1, 20.0, -120.0)):
        assert new_maximum("paper", 20.0, rs, **letter) == positive
        assert new_maximum("paper", -120.0, rs, **letter) == negative
    assert new_maximum("unconditional", 20.0, 1, **letter) == 40
    assert new_maximum("unconditional", -3.0, 1, **letter) == 0
    assert new_maximum("paper", 20.0, 2, shift_cap=12.0) == 32
    assert new_maximum("paper", -120.0, 2, shift_cap=12.0) == -108
    assert new_maximum("paper", 5.0, 2) == 10 and new_maximum("paper", -3.0, 2) == 0
    assert new_maximum("paper", 0.0, 2) == 0, "the paper's rule leaves a maximum of 0, and so P = 1, alone"
    assert new_maximum("paper", 5.0, 2, beta=3.0) == 15
    assert new_maximum("capped", 0.0, 2) == pytest.approx(SMALLEST_SHIFT)
    assert new_maximum("capped", 0.25, 2) == pytest.approx(0.25 + SMALLEST_SHIFT)
    assert new_maximum("capped", 20.0, 2, shift_cap=12.0) == 32 and new_maximum("capped", 0.0, 1) == 0
    assert new_maximum("fixed", -7.0, 1, fixed_shift=2.5) == -4.5
    assert new_maximum("lazy_max", 3.0, 1) == 3 and new_maximum("lazy_max", 8.0, 1, m=3.0) == 3
    assert new_maximum("lazy_max", 9.0, 1, m=3.0) == 9 and new_maximum("lazy_max", 2.0, 1, m=3.0) == 3
    assert new_maximum("none", 2.0, 1, m=3.0) == 3, "a maximum never falls"


def test_ties_are_counted_per_tile_and_never_where_masked():
    T = 64
    equal = attend(*with_scores(torch.full((T, T), 4.0)), spec(tile_k=16), stats=True)[1]
    rows = torch.arange(T)
    assert equal.ties.dtype == torch.int32 and torch.equal(equal.ties[0, 0].long(), (rows + 1).clamp(max=16))
    full = attend(*with_scores(torch.full((T, T), 4.0)), spec(tile_k=0), stats=True)[1]
    assert torch.equal(full.ties[0, 0].long(), rows + 1)
    falling = -torch.arange(float(T)).expand(T, T)
    unique = attend(*with_scores(falling), spec(tile_k=16), stats=True)[1]
    assert (unique.ties == 1).all() and (unique.row_max == 0).all()
    rising = attend(*with_scores(-falling), spec(tile_k=16), stats=True)[1]
    assert (rising.ties == 1).all() and torch.equal(rising.row_max[0, 0], rows.float())
    apart = falling.clone()
    apart[:, 20] = 0  # a second maximum, in the second tile
    q, k, v = with_scores(apart)
    assert attend(q, k, v, spec(tile_k=16), stats=True)[1].ties.max() == 1, "a tile sees its own ties only"
    assert torch.equal(attend(q, k, v, spec(tile_k=0), stats=True)[1].ties[0, 0], 1 + (rows >= 20).int())


# Each switch, in the direction that the paper predicts.


def paper_inputs(ones, sign=-1.0, level=4.0):
    """q, k, v and dO (1, 1, T, T) in the situation of section 3.3.

    `ones` keys share the maximum, `level`; V is negative and of one binade, so that a sum of two carries and is half
    the time a tie of BF16; the other keys have P = exp(-13), which leaves a residual far below BF16's last place.
    """
    T = 64
    gen = torch.Generator().manual_seed(8)
    scores = torch.full((T, T), level - 13)
    scores[:, :ones] = level
    q, k, v = with_scores(scores, round_bf16(-2 - 0.9 * torch.rand(T, T, generator=gen)))
    return q, k, v, sign * round_bf16(torch.rand(1, 1, T, T, generator=gen) + 0.5)


def paper_rows(ones, stabilizer="none", delta="do_o", sign=-1.0):
    """Signed mean errors of O and delta from pv=bf16 there."""
    q, k, v, do = paper_inputs(ones, sign)
    low, high = (trace(q, k, v, spec(pv=pv, stabilizer=stabilizer, tile_k=0, delta=delta, output="fp32"), do)
                 for pv in ("bf16", "fp32"))  # the same P in both, so that its cast does not enter
    later = (slice(None), slice(None), slice(32, None))  # rows with a residual to speak of
    return bias(low.unrounded[later], high.unrounded[later]), bias(low.delta[later], high.delta[later])


def test_repeated_ones_and_negative_values_bias_o_and_delta():
    """Claim 3: the bias of O is negative, and where dO is negative too, that of delta is positive."""
    o_bias, delta_bias = paper_rows(ones=2)
    assert o_bias < -1e-3, f"signed mean error of O {o_bias:.2e}"
    assert delta_bias > 0.05, f"signed mean error of delta {delta_bias:.2e}"
    flipped = paper_rows(ones=2, sign=1.0)[1]
    assert flipped < -0.05, f"with positive dO delta must err downwards, got {flipped:.2e}"
    for name, switches in {"no tie": dict(ones=1), "capped": dict(ones=2, stabilizer="capped"),
                           "paper": dict(ones=2, stabilizer="paper")}.items():
        o_cured, delta_cured = paper_rows(**switches)
        assert abs(o_cured) < 0.25 * abs(o_bias), f"{name}: signed mean error of O {o_cured:.2e}, uncured {o_bias:.2e}"
        assert abs(delta_cured) < 0.25 * delta_bias, f"{name}: of delta {delta_cured:.2e}, uncured {delta_bias:.2e}"
    for delta in ("dp_p", "do_o_recomputed"):
        blind = paper_rows(ones=2, delta=delta)[1]
        assert blind == 0, f"{delta} never sees the rounded O, but its delta moved by {blind:.2e}"


def test_row_sum_in_bf16_loses_the_257th_key():
    T = 1024  # l = 256 + 1 is a tie and goes to 256; P V is kept in FP32, so O = 257 / 256
    q, k, v = with_scores(torch.zeros(T, T))
    q, k, v = q[:, :, :257], k[:, :, :257], v[:, :, :257]
    for row_sum, o, total in (("bf16", 257 / 256, 256), ("fp32", 1.0, 257)):
        got = trace(q, k, v, spec(row_sum=row_sum, pv="fp32", tile_k=256))
        assert (got.unrounded[0, 0, 256] == o).all()
        assert got.lse[0, 0, 256].item() == pytest.approx(math.log(total), rel=1e-6)


def test_probs_in_fp8_drop_small_probabilities():
    T = 16
    scores = torch.full((T, T), -8.0)  # P = 3.4e-4: below half of e4m3's least value 2^-9, above e5m2's 2^-16
    scores[:, 0] = 0
    v = torch.ones(T, T)
    v[0] = 0
    o = {p: trace(*with_scores(scores, v), spec(probs=p, pv="fp32")).unrounded[0, 0, -1, 0].item()
         for p in ("fp32", "bf16", "fp8_e4m3", "fp8_e5m2")}
    want = 15 * math.exp(-8) / (1 + 15 * math.exp(-8))
    assert o["fp8_e4m3"] == 0
    error = {p: abs(x / want - 1) for p, x in o.items()}
    assert error["fp32"] < 1e-6 < error["bf16"] < 2**-8 and error["bf16"] < error["fp8_e5m2"] < 2**-2, error


def test_scores_in_bf16_make_ties():
    q, k = torch.zeros(1, 1, 16, 64), torch.zeros(1, 1, 16, 64)
    q[..., :2] = 1
    k[..., 0] = 128.0
    k[:, :, ::2, 0] = 160.0
    k[:, :, ::4, 1] = 0.25  # S = 20.03 in four keys, 20 in four more: one value in BF16
    ties = {s: attend(q, k, torch.ones_like(q), spec("flash_fa2", scores=s), stats=True)[1].ties[0, 0, -1].item()
            for s in ("fp32", "bf16")}
    assert ties == {"fp32": 4, "bf16": 8}


def test_softcap_bounds_the_scores():
    x = inputs(T=40, scale=4)
    uncapped, capped = (attend(*x[:3], spec("flash_fp32", softcap=c), stats=True)[1].row_max.max() for c in (0.0, 5.0))
    assert capped <= 5 < uncapped
    assert_within(errors(run_spec(spec("flash_fp32", softcap=5.0), *x), exact(*x, 5.0)), [(1e-5, 0.0)] * 4, "softcap")


def test_output_switch_and_fp32_heads():
    q, k, v, do = inputs(H=3, T=64, D=32)
    full = trace(q, k, v, spec()).unrounded
    o = attend(q, k, v, spec(output_heads=(0, 2)))
    assert torch.equal(o[:, ::2], full[:, ::2]), "the named heads keep O as it was before the rounding"
    assert torch.equal(o[:, 1], round_bf16(full)[:, 1]) and not torch.equal(o[:, 0], round_bf16(o[:, 0]))
    assert torch.equal(attend(q, k, v, spec(output="fp32")), full)
    assert torch.equal(attend(q, k, v, spec()), round_bf16(full))
    # delta is made from what was stored: it moves with `output`, and dp_p does not
    near, stored = (trace(q, k, v, spec("flash_fa2", output=x), do).delta for x in ("fp32", "bf16"))
    assert not torch.equal(near, stored)
    assert torch.equal(*(trace(q, k, v, spec("flash_fa2", output=x, delta="dp_p"), do).delta for x in ("fp32", "bf16")))


@pytest.mark.parametrize("scale", [0.5, 2, 10])
@pytest.mark.parametrize("switches", [dict(backend="flash_fp32", output="bf16"),
                                      dict(backend="flash_fa2", probs="fp32")], ids=str)
def test_delta_of_what_was_left_over_is_exact_where_nothing_but_o_is_rounded(switches, scale):
    """Root mean square error against float64: 1/50 of do_o's at most (1/405 to 1/694 measured), neither with a sign."""
    x = inputs(B=2, H=4, T=256, D=64, scale=scale)
    q, k, v, do = (t.double() for t in x)
    want = (do * materialised(q, k, v)).sum(-1)
    size = {}
    for delta in ("do_o", "do_o_exact"):
        error = trace(*x[:3], spec(**switches, delta=delta), x[3]).delta.double() - want
        size[delta] = error.square().mean().sqrt().item()
        mean = error.mean().item()
        assert abs(mean) < 4 * size[delta] / error.numel() ** 0.5, f"{delta}: {mean:+.2e} of {size[delta]:.2e}"
    assert size["do_o_exact"] < size["do_o"] / 50, size


def test_what_o_leaves_over():
    """The model gets the O that it gets without it, and delta one that has lost 2^-16 of it, of a stochastically
    rounded O, whose error is twice as large, 2^-15. So delta is that of output=fp32, P's cast and P V's rounding
    included, which no O holds back: flash_fa2's error falls to a third here, not to a fiftieth."""
    q, k, v, do = inputs(H=4, T=256, D=64, scale=4)
    rng = torch.tensor([3, 0, 7])
    for switches, lost in ((dict(backend="flash_fa2"), 2**-16), (dict(), 2**-16), (dict(pv="stochastic"), 2**-16),
                           (dict(output="stochastic"), 2**-15), (dict(output_heads=(1,)), 2**-16)):
        plain, s = spec(**switches), spec(**switches, delta="do_o_exact")
        o, *_, rest = emulated(q, k, v, rng, s.key, False)
        unrounded = trace(q, k, v, s, rng=rng).unrounded
        assert torch.equal(o, attend(q, k, v, plain, rng)) and rest.dtype == torch.bfloat16
        assert rest.stride() == o.stride()
        assert ((o + rest - unrounded).abs() <= lost * unrounded.abs()).all()
        for head in range(4):
            assert rest[:, head].any() == (head not in s.output_heads)
        whole = trace(q, k, v, spec(**switches | dict(output="fp32", output_heads=())), do, rng).delta
        found, near = (trace(q, k, v, x, do, rng).delta for x in (s, plain))
        allowed = 2 * lost * (do * unrounded).abs().sum(-1)
        assert ((found - whole).abs() <= allowed).all()
        assert (near - whole).abs().mean() > 50 * (found - whole).abs().mean()
    want = (do.double() * materialised(*(t.double() for t in (q, k, v)))).sum(-1)
    before, after = (trace(q, k, v, spec("flash_fa2", delta=x), do).delta - want for x in ("do_o", "do_o_exact"))
    assert 3 < before.norm() / after.norm() < 10


def test_stochastic_output_is_unbiased_and_differs_by_layer_and_draw():
    q, k, v, do = inputs(H=8, T=128, D=64)
    v = v.abs()  # one sign, so that a bias would not cancel
    full = trace(q, k, v, spec()).unrounded
    seen = []
    for layer, draw in ((0, 0), (0, 0), (1, 0), (0, 1)):
        o = attend(q, k, v, spec(output="stochastic"), rng=torch.tensor([3, layer, draw]))
        assert torch.equal(o, round_bf16(o))
        error = (o - full).double()
        standard_error = error.std().item() / error.numel() ** 0.5
        mean = error.mean().item()
        assert abs(mean) < 4 * standard_error, f"signed mean error {mean:.2e}, standard error {standard_error:.2e}"
        seen.append(o)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[3])
    got = trace(q, k, v, spec(output="stochastic"), do, rng=torch.tensor([3, 0, 0]))
    assert torch.equal(got.o, seen[0]) and torch.equal(got.delta, (do * seen[0]).sum(-1))


def test_stochastic_pv_has_the_size_of_bf16_without_its_sign():
    """Two keys that tie for every row and V of one sign: rounding to the nearest pushes P V one way, section 3.3.2."""
    q, k, _, _ = inputs(H=8, T=128, D=64)
    q[:], k[:] = 4.0, 0.0
    k[:, :, ::64] = 1.0  # so P = 1 at keys 0 and 64, e^-32 elsewhere
    v = -2 - torch.rand(q.shape, generator=torch.Generator().manual_seed(0)) * 0.25
    exact = trace(q, k, v, spec(pv="fp32", output="fp32", tile_k=32)).unrounded
    errors = {pv: (trace(q, k, v, spec(pv=pv, output="fp32", tile_k=32), rng=torch.tensor([3, 0, 7])).unrounded
                   - exact)[:, :, 64:].double() for pv in ("bf16", "stochastic")}
    mean = {pv: error.mean().item() / (error.std().item() / error.numel() ** 0.5) for pv, error in errors.items()}
    assert abs(mean["stochastic"]) < 4 < abs(mean["bf16"]), mean
    size = {pv: error.square().mean().sqrt().item() for pv, error in errors.items()}
    assert 0.5 < size["bf16"] / size["stochastic"] < 1.5, size


def test_stochastic_pv_draws_anew_for_every_tile_layer_and_draw():
    q, k, v, _ = inputs(H=2, T=128, D=16)
    base = attend(q, k, v, spec(pv="stochastic", tile_k=32), rng=torch.tensor([3, 0, 0]))
    assert torch.equal(base, attend(q, k, v, spec(pv="stochastic", tile_k=32), rng=torch.tensor([3, 0, 0])))
    for rng in ([4, 0, 0], [3, 1, 0], [3, 0, 1]):
        assert not torch.equal(base, attend(q, k, v, spec(pv="stochastic", tile_k=32), rng=torch.tensor(rng)))
    assert not torch.equal(base, attend(q, k, v, spec(pv="stochastic", tile_k=64), rng=torch.tensor([3, 0, 0])))


def test_pv_is_rounded_once_a_tile():
    q, k, v, do = inputs(H=4, T=256, D=64)
    want = materialised(*(t.double() for t in (q, k, v)))
    size = {(pv, tile): (trace(q, k, v, spec("flash_fa2", pv=pv, tile_k=tile)).unrounded - want).abs().mean().item()
            for pv in ("bf16", "fp32") for tile in (16, 0)}
    assert size["bf16", 16] > 1.5 * size["bf16", 0] > 1.5 * size["fp32", 0], size
    assert size["fp32", 16] < 1.1 * size["fp32", 0], size
    for a, b in zip(run_spec(spec(tile_k=256), q, k, v, do), run_spec(spec(tile_k=0), q, k, v, do), strict=True):
        assert torch.equal(a, b), "one tile that holds the sequence is no tiling"


@pytest.mark.parametrize("largest, left", [
    (20, dict(do_o=2e-3, dp_p=3e-7, dp_p_normalized=3e-7, do_o_corrected=3e-7)),
    (2e4, dict(do_o=2e-3, dp_p=1e-3, dp_p_normalized=3e-7, do_o_corrected=3e-7))])
def test_rows_of_ds_sum_to_zero(largest, left):
    """What rowsum(dS) leaves over, of dK and of dQ, of rowsum(|P dP|). O's rounding leaves 2^-9 in it; L's, which FP32
    holds to 2^-11 at scores of 2e4, leaves as much of delta, unless delta is divided by what P adds up to."""
    q, k, v, do = inputs(H=1, T=256, D=64, seed=5)
    k[:, :, 1::2] = k[:, :, ::2]  # rows see two keys alike and are not saturated
    q *= largest / (q @ k.mT * 64**-0.5).max()
    for delta, bound in left.items():
        s = spec("flash_fp32", output="bf16", delta=delta)
        done = trace(q, k, v, s)
        parts = score_gradients(*(x[0] for x in (do, q, k, v, done.o.float())), done.lse[0], s)
        total, size = torch.zeros(2, 256), torch.zeros(256)
        for keys, rows, p, *both in parts:
            total[:, rows] += torch.stack([ds[0].sum(-1) for ds in both])
            size[rows] += (p * (do[0][:, rows] @ v[0][:, keys].mT)).abs()[0].sum(-1) * 64**-0.5
        for over in (total.square().mean(-1) / size.square().mean()).sqrt().tolist():
            assert bound / 30 < over < bound, f"{delta} at scores of {largest:g}: {over:.1e}"
