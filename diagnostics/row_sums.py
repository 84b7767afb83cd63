"""Do the rows of dS add up to zero? Of any attention that autograd can differentiate, without a look into its kernel.

Exactly, dS = P * (dP - delta) with delta = rowsum(dP * P) adds up to zero in every row, and so what all keys have in
common has no part in dQ = dS K. A kernel that takes delta = rowsum(dO * O) of the O that it stores leaves over
rowsum(dO * (O - O_stored)). What that does to training: results/mini/why.md.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def row_sums(attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor,
             do: Tensor) -> tuple[Tensor, Tensor]:
    """What each row of dS adds up to (B, H, T), and O (B, H, T, D), of a causal attention(q, k, v) with scores
    q k / sqrt(D), at its own gradient do of O.

    q, k, v, do: (B, H, T, D), k and v of fewer heads if attention takes that; the last feature is not used. There
    queries are 0 and keys 1, which adds 0 to every score, so the gradient of a query's 0 is the sum over j of dS_ij
    times 1, over sqrt(D). It comes as the kernel rounds its dQ, for BF16 to 2^-9 of itself.

    Errors: ValueError for an attention that is not causal: the first row of its O is not that of v.
    """
    with torch.inference_mode(False), torch.enable_grad():
        q, k, v = (x.detach().clone().requires_grad_() for x in _with_ones(q, k, v))
        o = attention(q, k, v)
        (dq,) = torch.autograd.grad(o, q, do.to(o.dtype))
    o, first = o.detach(), _heads_of(q, v)[..., 0, :].detach()
    if (o[..., 0, :] - first).norm() > 0.1 * first.norm():
        raise ValueError("attention is not causal: O of the first query is not the first value")
    return dq[..., -1].float() * math.sqrt(q.shape[-1]), o


def exact_rows(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
    """float64, of the same: the sum of sizes of each row of dS (B, H, T), and O (B, H, T, D)."""
    q, k, v, do = (x.double() for x in (*_with_ones(q, k, v), do))
    k, v = _heads_of(q, k), _heads_of(q, v)
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    p = ((q @ k.mT) / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf).softmax(-1)
    dp = do @ v.mT
    return (p * (dp - (p * dp).sum(-1, keepdim=True))).abs().sum(-1), p @ v


def _with_ones(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    zero = torch.arange(q.shape[-1], device=q.device) == q.shape[-1] - 1
    return q.masked_fill(zero, 0), k.masked_fill(zero, 1), v


def _heads_of(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values, each head as often as heads of queries share it."""
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)
