"""The emulation against one row at a time: the algorithm once more, as plain loops in float64 with the same roundings.

FP32 and float64 sums differ by about 2^-24, which moves a BF16 rounding in one place of some ten thousand; a rounding
that is missing, doubled or in the wrong place moves a large part of them.
"""

import math

import pytest
import torch
from attention_cases import INF, inputs, run_spec, spec

from attention import attend
from attention.rounding import round_to
from attention.spec import SMALLEST_SHIFT

T, D, TILE = 40, 48, 16  # 1/sqrt(48) is not exact, so that rounding before and after alpha shows


def r(format, x):
    return x if format == "fp32" else round_to(x, format)


def shifted(rm, rs, m, s):
    """The new running maximum by the stabilizer's rule, for one row of one tile."""
    tied, raw = rs > 1, (s.beta - 1) * rm if rm > 0 else -rm
    match s.stabilizer:
        case "none" | "clamp":
            new = rm
        case "paper":
            new = rm + min(raw, s.shift_cap) if tied else rm
        case "unconditional":
            new = rm + min(raw, s.shift_cap)
        case "capped":
            new = rm + min(max(raw, SMALLEST_SHIFT), s.shift_cap) if tied else rm
        case "fixed":
            new = rm + s.fixed_shift
        case "lazy_max":
            return rm if rm > m + s.lazy_threshold else m
    return max(m, new)


def by_row(q, k, v, do, s):
    """o, dq, dk, dv and ties of one head, (T, D) and (T,), in float64."""
    q, k, v, do = (r(s.operands, x[0, 0].double()) for x in (q, k, v, do))
    out, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    ties = torch.zeros(T, dtype=torch.int32)
    for i in range(T):
        m, l, o = -INF, 0.0, torch.zeros(D, dtype=torch.float64)
        scores = r(s.scores, r(s.scores, k[: i + 1] @ q[i]) * D**-0.5)
        if s.softcap:
            scores = s.softcap * torch.tanh(scores / s.softcap)
        for start in range(0, i + 1, TILE):
            tile = slice(start, min(start + TILE, i + 1))
            rm = scores[tile].max().item()
            rs = int((scores[tile] >= rm - s.epsilon).sum())
            ties[i] = max(int(ties[i]), rs)
            m_new = shifted(rm, rs, m, s)
            p = torch.exp(scores[tile] - m_new)
            if s.stabilizer == "clamp":
                p = p.clamp(max=0.99609375)
            a = math.exp(m - m_new)
            l = r(s.row_sum, l * a + p.sum())
            pv = r(s.pv, r(s.probs, p) @ v[tile])
            o = r(s.pv, r(s.pv, o * a) + pv)
            m = m_new
        out[i] = r(s.output, o / l)
        read = out[i] + r("bf16", o / l - out[i])
        p = torch.exp(scores - (m + math.log(l)))
        dp = r(s.scores, v[: i + 1] @ do[i])
        delta = {"do_o": do[i] @ out[i], "do_o_exact": do[i] @ read, "dp_p": p @ dp,
                 "dp_p_normalized": p @ dp / p.sum(), "do_o_corrected": p @ dp / p.sum(),
                 "do_o_recomputed": do[i] @ (p @ v[: i + 1])}[s.delta]
        slope = 1 - (scores / s.softcap) ** 2 if s.softcap else 1
        ds = ds_of_q = r(s.operands, p * (dp - delta) * D**-0.5 * slope)
        if s.delta == "do_o_corrected":
            first = do[i] @ out[i]
            ds_of_q = r(s.operands, p * (dp - first) * D**-0.5 * slope)
            ds_of_q = ds_of_q - (delta - first) * D**-0.5 * r(s.operands, p * slope)
        p = r(s.operands, p)
        dq[i] = ds_of_q @ k[: i + 1]
        dk[: i + 1] += torch.outer(ds, q[i])
        dv[: i + 1] += torch.outer(p, do[i])
    return [out, *(r(s.operands, x) for x in (dq, dk, dv))], ties


CASES = [dict(backend=b) for b in ("flash_bf16", "flash_fa2", "flash_fp32", "stabilized")]
CASES += [dict(stabilizer=x) for x in ("paper", "clamp", "fixed", "unconditional", "lazy_max")]
CASES += [dict(delta="do_o_exact"), dict(delta="do_o_exact", backend="flash_fa2"),
          dict(delta="dp_p"), dict(delta="dp_p_normalized"), dict(delta="do_o_recomputed"), dict(output="fp32"),
          dict(row_sum="bf16"), dict(stabilizer="clamp", delta="dp_p_normalized"),
          dict(delta="do_o_corrected"), dict(delta="do_o_corrected", backend="flash_fa2", softcap=3.0),
          dict(row_sum="bf16", pv="fp32"), dict(probs="fp32"), dict(probs="fp8_e4m3"), dict(probs="fp8_e5m2"),
          dict(scores="fp32"), dict(pv="fp32"), dict(softcap=3.0), dict(softcap=3.0, scores="fp32", delta="dp_p"),
          dict(operands="fp32", scores="fp32", probs="fp32"), dict(stabilizer="capped", epsilon=0.5, beta=1.5),
          dict(stabilizer="paper", shift_cap=0.5), dict(stabilizer="lazy_max", lazy_threshold=1.0)]


@pytest.mark.parametrize("switches", CASES, ids=str)
def test_every_rounding_is_where_it_should_be(switches):
    s = spec(**switches, tile_k=TILE)
    q, k, v, do = inputs(H=1, T=T, D=D, scale=1.5, seed=11, bf16=False)
    k[:, :, 3:9] = k[:, :, 2:3]  # six equal keys in one tile, so that maxima tie in many rows
    k[:, :, 20] = k[:, :, 18]
    want, ties = by_row(q, k, v, do, s)
    assert (ties > 1).sum() >= 5
    assert torch.equal(attend(q, k, v, s, stats=True)[1].ties[0, 0], ties)
    for name, got, w in zip(("o", "dq", "dk", "dv"), run_spec(s, q, k, v, do), want, strict=True):
        got = got[0, 0].double()
        error = (got - w).abs()
        far = (error > 2e-6 * w.abs().max()).sum().item()  # FP32 noise is no difference, a BF16 step is
        allowed = 4 if s.operands == "bf16" or s.pv == "bf16" else 0
        assert far <= allowed, (f"{name}: {far} of {w.numel()} values differ, largest {error.max():.2e}, "
                                f"signed mean error {(got - w).mean():.2e}")


@pytest.mark.parametrize(("gap", "ties"), [(0.0, 2), (0.9e-3, 2), (1.2e-3, 1)])
def test_scores_within_epsilon_count_as_equal(gap, ties):
    q, k = torch.ones(1, 1, 2, 16), torch.zeros(1, 1, 2, 16)
    k[0, 0, :, 0] = torch.tensor([4.0, 4.0 - 4 * gap])  # alpha = 1/4: S = 1 and 1 - gap
    s = spec("flash_fp32", epsilon=1e-3)
    assert attend(q, k, k, s, stats=True)[1].ties[0, 0].tolist() == [1, ties]
