"""The two references a user already has: materialised softmax attention, and torch's fused kernel.

`standard` is nanoGPT's attention without flash, rounded where a GPU's autocast rounds it (on a CPU autocast leaves the
softmax in BF16 as well; here it is FP32 everywhere). `sdpa` is torch.nn.functional.scaled_dot_product_attention.
Which format they round to follows from the tensors:

    bfloat16  BF16
    float32   BF16 too: the values, not the container, are what an arm of an experiment is made of, and a CPU carries
              BF16 in float32 (its BF16 products are about 100 times slower)
    float16   FP16
    float64   none, so that both can serve as an oracle
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.op import NOTHING, differentiable, output_like, rest_like
from attention.rounding import round_bf16
from attention.spec import AttentionSpec, from_key

STATS_ROWS = 128  # query rows per chunk of scores when statistics are made beside a fused kernel


class _Format:
    """How values of the format that `like` implies are carried: natively on a GPU, where every operation then
    rounds by itself; elsewhere in float32, `cast` rounding after every operation."""

    def __init__(self, like: Tensor):
        native = torch.float16 if like.dtype == torch.float16 else torch.bfloat16
        self.exact = like.dtype == torch.float64
        self.carry = torch.float64 if self.exact else native if like.is_cuda else torch.float32
        self.native = native

    def cast(self, x: Tensor) -> Tensor:
        return x.to(self.carry) if self.exact else x.to(self.native).to(self.carry)


def _scores(q: Tensor, k: Tensor, spec: AttentionSpec, f: _Format) -> tuple[Tensor, Tensor | None]:
    """S (B, H, T, T) as carried, masked, and tanh(S / c) where there is a softcap."""
    s = f.cast(f.cast(q @ k.mT) * q.shape[-1] ** -0.5)
    t = None
    if spec.softcap:
        t = f.cast(f.cast(s / spec.softcap).tanh())
        s = f.cast(t * spec.softcap)
    future = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    return s.masked_fill_(future, -torch.inf), t


def _softmax(s: Tensor) -> Tensor:
    return torch.softmax(s, -1, dtype=torch.promote_types(s.dtype, torch.float32))


def forward(q: Tensor, k: Tensor, v: Tensor, rng: Tensor, spec: AttentionSpec,
            want_stats: bool, counted: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, lse, ties, row_max and an empty rest as op.differentiable describes them; statistics see the full row."""
    with torch.autocast(q.device.type, enabled=False):
        f = _Format(q)
        out = output_like(q, False)
        q, k, v = f.cast(q), f.cast(k), f.cast(v)
        s, _ = _scores(q, k, spec, f)
        p = _softmax(s)
        out.copy_(f.cast(f.cast(p) @ v))
        row_max = _row_max(s)
        lse = row_max - p.amax(-1).log()  # the largest P of a row is 1 / l
        if want_stats:
            ties = _ties(s, row_max, spec.epsilon)[:counted]
        else:
            ties, row_max = q.new_empty(NOTHING, dtype=torch.int32), row_max.new_empty(NOTHING)
    return out, lse, ties, row_max, rest_like(out, spec)


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: AttentionSpec,
             rest: None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv as autograd makes them of `forward` under autocast: P anew, delta = rowsum(dP P) in FP32."""
    with torch.autocast(q.device.type, enabled=False):
        f = _Format(q)
        out = [output_like(q, False) for _ in range(3)]
        do, q, k, v = f.cast(do), f.cast(q), f.cast(k), f.cast(v)
        s, t = _scores(q, k, spec, f)
        p = _softmax(s)
        dv = f.cast(p).mT @ do
        dp = f.cast(do @ v.mT).to(p.dtype)
        ds = f.cast(torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype))  # P (dP - rowsum(dP P))
        if spec.softcap:
            ds = f.cast(f.cast(torch.ops.aten.tanh_backward(f.cast(ds * spec.softcap), t)) / spec.softcap)
        ds = f.cast(ds * q.shape[-1] ** -0.5)
        for to, x in zip(out, (ds @ k, ds.mT @ q, dv), strict=True):
            to.copy_(f.cast(x))
    return tuple(out)


standard = differentiable("lpattn::standard", forward, backward)


def sdpa(q: Tensor, k: Tensor, v: Tensor, rng: Tensor, spec_key: str,
         want_stats: bool, counted: int = -1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """torch's fused attention; returns o (B, H, T, D), an empty lse, ties and row_max (both empty unless asked for).

    float32 tensors: on a GPU the BF16 kernel runs on their rounded values. Elsewhere torch's FP32 kernel does, on
    rounded Q, K, V, dO and with O and the gradients rounded; P and P V then stay in FP32, unlike a BF16 kernel's.
    bfloat16 tensors run torch's BF16 kernel everywhere.
    """
    dtype = q.dtype
    if dtype == torch.float32:
        q, k, v = (x.bfloat16() if x.is_cuda else _bf16_values(x) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if dtype == torch.float32:
        o = o.to(dtype) if o.is_cuda else _bf16_values(o)
    acc = torch.promote_types(dtype, torch.float32)
    if want_stats:
        ties, row_max = _statistics(q.detach(), k.detach(), spec_key)
        ties = ties[:counted] if counted >= 0 else ties
    else:
        ties, row_max = q.new_empty(NOTHING, dtype=torch.int32), q.new_empty(NOTHING, dtype=acc)
    return o, q.new_empty(NOTHING, dtype=acc), ties, row_max


@torch.library.custom_op("lpattn::bf16_values", mutates_args=())
def _bf16_values(x: Tensor) -> Tensor:
    """x and, in the backward pass, its gradient rounded to BF16. Opaque: a compiler removes a plain pair of casts."""
    return round_bf16(x).clone(memory_format=torch.contiguous_format)


@_bf16_values.register_fake
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_bf16_values.register_autograd(lambda ctx, grad: _bf16_values(grad))


@torch.library.custom_op("lpattn::sdpa_statistics", mutates_args=())
def _statistics(q: Tensor, k: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    """ties and row_max (B, H, T) over full rows of S = alpha Q K^T in FP32, a chunk of rows at a time."""
    epsilon, T, chunks = from_key(spec).epsilon, q.shape[2], []
    acc = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, T, STATS_ROWS):
            stop = min(start + STATS_ROWS, T)
            s = (q[:, :, start:stop].to(acc) @ k[:, :, :stop].to(acc).mT).mul_(q.shape[-1] ** -0.5)
            future = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(start + 1)
            row_max = _row_max(s.masked_fill_(future, -torch.inf))
            chunks.append((_ties(s, row_max, epsilon), row_max))
    return tuple(torch.cat(x, -1) for x in zip(*chunks, strict=True))


@_statistics.register_fake
def _(q, k, spec):
    rows = q.shape[:3]
    return q.new_empty(rows, dtype=torch.int32), q.new_empty(rows, dtype=torch.promote_types(q.dtype, torch.float32))


def _row_max(s: Tensor) -> Tensor:
    """The maximum of each row; masked scores are -inf."""
    return s.amax(-1).to(torch.promote_types(s.dtype, torch.float32))


def _ties(s: Tensor, row_max: Tensor, epsilon: float) -> Tensor:
    """How many scores of a row are within epsilon of its maximum."""
    return (s >= (row_max - epsilon)[..., None]).sum(-1, dtype=torch.int32)
