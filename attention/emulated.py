"""Tiled causal attention in PyTorch with every rounding explicit: the CPU backend, and the oracle of the kernels.

Algorithms 1 (forward), 2 (backward) and 3 (stabilizer) of arXiv 2510.04212, in the notation of spec.py. Key tiles are
looped over, and all rows that can see a tile (rows >= its first key) are computed at once, so nothing larger than
(B, H, T, tile_k) exists; a row never meets a tile that is masked for it entirely. BF16 values are carried in float32,
where their products are exact; float64 inputs are computed in float64 throughout.

Two properties hold whatever the caller has switched on: autocast is off inside, and products on a GPU are made in
float64, because a global flag may allow TF32 there and FP32 must mean FP32. The same input gives the same bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attention.op import NOTHING, differentiable, output_like, rest_like
from attention.rounding import round_bf16, round_to, stochastic_round_bf16
from attention.spec import LARGEST_CLAMPED_P, SMALLEST_SHIFT, AttentionSpec


class Trace(NamedTuple):
    """What a diagnostic needs of one attention call; shapes (B, H, T, D) and (B, H, T).

    unrounded: O = O / l before the rounding that `output` asks for. o: the stored O, its values in FP32.
    lse: L = m + log l. ties, row_max: as in RowStats. delta: as the backward pass uses it, None without dO.
    """

    unrounded: Tensor
    o: Tensor
    lse: Tensor
    ties: Tensor
    row_max: Tensor
    delta: Tensor | None


@torch.no_grad()
def trace(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, do: Tensor | None = None,
          rng: Tensor | None = None) -> Trace:
    """One forward pass (and delta, where dO is given) with the values that the operator does not return.

    q, k, v, do: (B, H, T, D), on any device; rng: int64 (3,) for stochastic rounding, None is (0, 0, 0).
    """
    rng = torch.zeros(3, dtype=torch.int64, device=q.device) if rng is None else rng
    with torch.autocast(q.device.type, enabled=False):
        unrounded, lse, ties, row_max = _tiles_forward(q, k, v, rng, spec, True)
        unrounded = unrounded.view(q.shape)
        o = _rounded_output(unrounded, rng, spec)
        delta = None
        if do is not None:
            delta = _delta(_load(do, spec), _load(q, spec), _load(k, spec), _load(v, spec),
                           o_of_delta(unrounded, o, spec).flatten(0, 1), lse.flatten(0, 1), spec).view(lse.shape)
    return Trace(unrounded, o, lse, ties, row_max, delta)


def forward(q: Tensor, k: Tensor, v: Tensor, rng: Tensor, spec: AttentionSpec,
            want_stats: bool, counted: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, lse, ties, row_max and rest as op.differentiable describes them (paper Algorithm 1)."""
    with torch.autocast(q.device.type, enabled=False):
        unrounded, lse, ties, row_max = _tiles_forward(q, k, v, rng, spec, want_stats)
        unrounded = unrounded.view(q.shape)
        o = _rounded_output(unrounded, rng, spec)
        out = output_like(q, spec.stores_fp32).copy_(o)
        rest = rest_like(out, spec)
        if spec.keeps_rest:
            rest.copy_(_rest(unrounded, o))
    return out, lse, ties[:counted] if want_stats else ties, row_max, rest


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: AttentionSpec,
             rest: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv as op.differentiable describes them (paper Algorithm 2)."""
    with torch.autocast(q.device.type, enabled=False):
        shape = q.shape
        out = [output_like(q, False) for _ in range(3)]
        do, q, k, v = (_load(x, spec) for x in (do, q, k, v))
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        o = o.to(q.dtype) if rest is None else o.to(q.dtype) + rest
        parts = score_gradients(do, q, k, v, o.reshape(q.shape), lse.flatten(0, 1), spec)
        for keys, rows, p, ds, ds_of_q in parts:
            dv[:, keys] = _product(p.mT, do[:, rows])
            dk[:, keys] = _product(ds.mT, q[:, rows])
            dq[:, rows] += _product(ds_of_q, k[:, keys])
        for to, x in zip(out, (dq, dk, dv), strict=True):
            to.copy_(operand(x, spec).view(shape))
    return tuple(out)


def score_gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: AttentionSpec):
    """Keys and rows of each tile, with P and alpha dS there as the products of the backward pass read them: dS of dK,
    and dS of dQ, which is another where delta is corrected after the fact (spec.py).

    do, q, k, v: (B*H, T, D), their values in the operands' format; o: (B*H, T, D), as `o_of_delta`; lse: (B*H, T).
    """
    delta, alpha = _delta(do, q, k, v, o, lse, spec), q.shape[-1] ** -0.5
    first = _of_o(do, o) if spec.delta == "do_o_corrected" else None
    for keys, rows in tiles(q, spec):
        s, p = _probabilities(q[:, rows], k[:, keys], lse[:, rows], spec)
        slope = 1 - (s / spec.softcap).square_() if spec.softcap else None
        dp = _dp(do[:, rows], v[:, keys], spec)
        before = None if first is None else _alpha_ds(dp.clone(), first[:, rows], p, alpha, slope, spec)
        ds = ds_of_q = _alpha_ds(dp, delta[:, rows], p, alpha, slope, spec)
        if first is not None:
            weight = operand(p if slope is None else p * slope, spec)
            ds_of_q = before - weight * ((delta - first)[:, rows, None] * alpha)
        yield keys, rows, operand(p, spec), ds, ds_of_q


def _alpha_ds(dp, delta, p, alpha, slope, spec):
    """alpha dS of a tile as products read it, times the slope of the cap; made in place of dp."""
    ds = dp.sub_(delta[..., None]).mul_(p).mul_(alpha)
    return operand(ds if slope is None else ds.mul_(slope), spec)


emulated = differentiable("lpattn::emulated", forward, backward)


def _tiles_forward(q: Tensor, k: Tensor, v: Tensor, rng: Tensor, spec: AttentionSpec, want_stats: bool):
    """O before its last rounding (B*H, T, D); lse, ties, row_max (B, H, T), statistics empty unless wanted."""
    shape = q.shape[:3]
    q, k, v = _load(q, spec), _load(k, spec), _load(v, spec)
    o = torch.zeros_like(q)
    m = q.new_full(q.shape[:2], -torch.inf)
    l = torch.zeros_like(m)
    ties, row_max = torch.zeros_like(m, dtype=torch.int32), m.clone()
    index = torch.arange(o.numel(), device=o.device).view(o.shape) if spec.pv == "stochastic" else None
    for keys, rows in tiles(q, spec):
        s = mask_future(scores(q[:, rows], k[:, keys], spec), -torch.inf)
        rm = s.amax(-1)
        tied = want_stats or spec.stabilizer in ("paper", "capped")
        rs = (s >= (rm - spec.epsilon)[..., None]).sum(-1) if tied else None
        m_new = _new_maximum(m[:, rows], rm, rs, spec)
        p = s.sub_(m_new[..., None]).exp_()
        if spec.stabilizer == "clamp":
            p.clamp_(max=LARGEST_CLAMPED_P)
        a = torch.exp(m[:, rows] - m_new)
        l[:, rows] = _if(spec.row_sum, l[:, rows] * a + p.sum(-1))
        pv, scaled = _product(_if(spec.probs, p), v[:, keys]), o[:, rows] * a[..., None]
        if spec.pv == "stochastic":  # words 1 to 3 of an index that no other key tile has
            at = index[:, rows] + ((keys.start // (spec.tile_k or shape[2]) + 1) << 40)
            pv, scaled = stochastic_round_bf16(pv, rng, at, 1), stochastic_round_bf16(scaled, rng, at, 2)
            o[:, rows] = stochastic_round_bf16(scaled + pv, rng, at, 3)
        else:
            o[:, rows] = _if(spec.pv, _if(spec.pv, scaled) + _if(spec.pv, pv))
        m[:, rows] = m_new
        if want_stats:
            ties[:, rows] = torch.maximum(ties[:, rows], rs.to(torch.int32))
            row_max[:, rows] = torch.maximum(row_max[:, rows], rm)
    lse = (m + l.log()).view(shape)
    stats = (ties.view(shape), row_max.view(shape)) if want_stats else (ties.new_empty(NOTHING), m.new_empty(NOTHING))
    return o.div_(l[..., None]), lse, *stats


def _new_maximum(m: Tensor, rm: Tensor, rs: Tensor | None, spec: AttentionSpec) -> Tensor:
    """max(m, m') with m' from the row maximum rm of a tile and the number rs of its scores that equal it.

    Paper Algorithm 3 is `paper` with shift_cap=inf: there m' is beta * rm or 0 to the letter, and may underflow P.
    """
    if spec.stabilizer == "lazy_max":
        return torch.where(rm > m + spec.lazy_threshold, rm, m)
    if spec.stabilizer in ("none", "clamp"):
        shifted = rm
    elif spec.stabilizer == "fixed":
        shifted = rm + spec.fixed_shift
    elif spec.shift_cap == torch.inf:
        shifted = torch.where(rm > 0, spec.beta * rm, 0.0)
    else:
        raw = torch.where(rm > 0, (spec.beta - 1) * rm, -rm)
        if spec.stabilizer == "capped":
            raw = raw.clamp_(min=SMALLEST_SHIFT)
        shifted = rm + raw.clamp_(max=spec.shift_cap)
    if spec.stabilizer in ("paper", "capped"):
        shifted = torch.where(rs > 1, shifted, rm)
    return torch.maximum(m, shifted)


def _delta(do, q, k, v, o, lse, spec):
    """delta (B*H, T): rowsum(dO O), or an equivalent that never sees the rounded O (one more pass over the tiles)."""
    if spec.delta in ("do_o", "do_o_exact"):
        return _of_o(do, o)
    if spec.delta == "do_o_recomputed":
        again = torch.zeros_like(q)
        for keys, rows in tiles(q, spec):
            again[:, rows] += _product(_probabilities(q[:, rows], k[:, keys], lse[:, rows], spec)[1], v[:, keys])
        return _of_o(do, again)
    first = _of_o(do, o) if spec.delta == "do_o_corrected" else torch.zeros_like(lse)
    left, total = torch.zeros_like(lse), torch.zeros_like(lse)
    for keys, rows in tiles(q, spec):
        _, p = _probabilities(q[:, rows], k[:, keys], lse[:, rows], spec)
        total[:, rows] += p.sum(-1)
        left[:, rows] += _dp(do[:, rows], v[:, keys], spec).sub_(first[:, rows, None]).mul_(p).sum(-1)
    return left if spec.delta == "dp_p" else first + left / total


def _of_o(do, o):
    return (do * o).sum(-1)


def tiles(q: Tensor, spec: AttentionSpec):
    """Slices (keys of a tile, rows that can see its first key)."""
    T = q.shape[1]
    step = spec.tile_k or T
    for start in range(0, T, step):
        yield slice(start, min(start + step, T)), slice(start, T)


def scores(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """S of one tile, not masked: alpha Q K^T, rounded before and after alpha as `scores` says, then capped in FP32."""
    s = _if(spec.scores, _if(spec.scores, _product(q, k.mT)).mul_(q.shape[-1] ** -0.5))
    return s.div_(spec.softcap).tanh_().mul_(spec.softcap) if spec.softcap else s


def _probabilities(q, k, lse, spec):
    """S of one tile, not masked, and P = exp(S - L), 0 where masked (S there may exceed L by far)."""
    s = scores(q, k, spec)
    p = s - lse[..., None] if spec.softcap else s.sub_(lse[..., None])
    return s, mask_future(p, -torch.inf).exp_()


def _dp(do: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    return _if(spec.scores, _product(do, v.mT))


def mask_future(x: Tensor, value: float) -> Tensor:
    """Fills, in place, what row i of a tile must not see: keys after i. Only its leading square has any."""
    n = x.shape[-1]
    future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu_(1)
    x[:, :n].masked_fill_(future, value)
    return x


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A batched product with at least FP32 accumulation, never TF32."""
    if a.is_cuda:
        return torch.bmm(a.to(torch.float64), b.to(torch.float64)).to(a.dtype)
    return torch.bmm(a, b)


def _load(x: Tensor, spec: AttentionSpec) -> Tensor:
    """(B, H, T, D) -> contiguous (B*H, T, D) in at least FP32, its values in the operands' format."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous().flatten(0, 1)
    return operand(x, spec)


def operand(x: Tensor, spec: AttentionSpec) -> Tensor:
    return _if(spec.operands, x)


def _if(format: str, x: Tensor) -> Tensor:
    """x rounded to a format; "fp32" is no rounding at all, so that float64 stays float64."""
    return x if format == "fp32" else round_to(x, format)


def _rounded_output(o: Tensor, rng: Tensor, spec: AttentionSpec) -> Tensor:
    """O as it is stored, (B, H, T, D) in o's dtype; heads in `output_heads` are left alone."""
    if spec.output == "fp32":
        return o
    rounded = stochastic_round_bf16(o, rng) if spec.output == "stochastic" else round_bf16(o)
    for head in spec.output_heads:
        rounded[:, head] = o[:, head]
    return rounded


def _rest(unrounded: Tensor, o: Tensor) -> Tensor:
    """What O's rounding left over, rounded to BF16 itself."""
    return round_bf16(unrounded - o)


def o_of_delta(unrounded: Tensor, o: Tensor, spec: AttentionSpec) -> Tensor:
    """O as rowsum(dO O) reads it: what is stored and, where it is kept, what that left over."""
    return o + _rest(unrounded, o) if spec.keeps_rest else o
