"""One head's attention twice from the same scores: as the backend rounds it (lp), and in float64 (hp).

lp and hp share Q, K, V, dO as the backend reads them, and S: each score is the very FP32 number that lp has, BF16
rounding included where scores=bf16. From S on, hp is float64 throughout and lp follows the spec: exp in FP32, the cast
of P (`probs`), the rounding of P V and of the running O by key tile (`pv`), the row sum, and the rounding of O
(`output`). So O_lp - O_hp is what those do, and nothing else. A stabilizer is part of lp alone: it changes no exact
value. With stochastic rounding lp draws other random numbers than the run did. Heads come as (B, T, D): B sequences.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from attention import emulated
from attention.spec import AttentionSpec


class Pair(NamedTuple):
    """float64; (B, T, T), (B, T), or (B, T, D).

    s: scores, -inf where masked. pbar: exp(S - rowmax), hp (paper: P with a bar). l: its row sums.
    o_hp: P V. o_lp: O as stored. unrounded: O of lp before its last rounding.
    delta_lp, delta_hp: rowsum(dO O) of each, lp as `delta` says, with do_o_exact from nearly the unrounded O; None
    without dO. lse: L of lp, FP32 values.
    """

    s: Tensor
    pbar: Tensor
    l: Tensor
    o_hp: Tensor
    o_lp: Tensor
    unrounded: Tensor
    lse: Tensor
    delta_lp: Tensor | None
    delta_hp: Tensor | None

    @property
    def p(self) -> Tensor:
        """P = softmax(S), hp."""
        return self.pbar / self.l[..., None]

    @property
    def o_error(self) -> Tensor:
        """O_lp - O_hp (paper figure 5c)."""
        return self.o_lp - self.o_hp

    @property
    def pv_error(self) -> Tensor:
        """(Pbar V)_lp - (Pbar V)_hp (paper section 3.3.2) before the division and the last rounding, for P = 1 at the
        row maximum: lp's O before its rounding, times hp's row sum. The FP32 row sum adds about 1e-7 relative; a
        BF16 one (row_sum=bf16) is in it too."""
        return (self.unrounded - self.o_hp) * self.l[..., None]

    @property
    def delta_error(self) -> Tensor:
        """delta_lp - delta_hp by token (paper figure 12; its sum is figure 5a)."""
        return self.delta_lp - self.delta_hp


def head_spec(spec: AttentionSpec, head: int) -> AttentionSpec:
    """The spec of one head alone: output_heads resolved for it."""
    if head not in spec.output_heads:
        return dataclasses.replace(spec, output_heads=())
    delta = "do_o" if spec.keeps_rest else spec.delta  # an FP32 O leaves nothing over
    return dataclasses.replace(spec, output="fp32", output_heads=(), delta=delta)


def operand(x: Tensor, spec: AttentionSpec) -> Tensor:
    """x as the products read it: FP32 that carries the values of the operands' format."""
    return emulated.operand(x.float(), spec)


@torch.no_grad()
def scores(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """S (B, T, T) of one head, -inf where masked: the FP32 values that the emulated backend has, tile by tile."""
    q, k = operand(q, spec), operand(k, spec)
    s = q.new_full((*q.shape[:2], q.shape[1]), -torch.inf)
    for keys, rows in emulated.tiles(q, spec):
        s[:, rows, keys] = emulated.mask_future(emulated.scores(q[:, rows], k[:, keys], spec), -torch.inf)
    return s


@torch.no_grad()
def both(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, do: Tensor | None = None,
         rng: Tensor | None = None) -> Pair:
    """Both precisions of one head. q, k, v, do: (B, T, D); spec: of this head (`head_spec`), and for standard and sdpa
    what their presets say they round; rng: as `emulated.trace`. Memory: a few (B, T, T) tensors in float64."""
    q, k, v = (operand(x, spec) for x in (q, k, v))
    do = None if do is None else operand(do, spec)
    lp = emulated.trace(*(x[:, None] for x in (q, k, v)), spec, None if do is None else do[:, None], rng)
    lp = type(lp)(*(None if x is None else x[:, 0].double() for x in lp))
    s = scores(q, k, spec).double()
    pbar = torch.exp(s - s.amax(-1, keepdim=True))
    l = pbar.sum(-1)
    o_hp = pbar @ v.double() / l[..., None]
    delta_hp = None if do is None else (do.double() * o_hp).sum(-1)
    return Pair(s, pbar, l, o_hp, lp.o, lp.unrounded, lp.lse, lp.delta, delta_hp)


@torch.no_grad()
def score_gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, pair: Pair, spec: AttentionSpec) -> Tensor:
    """alpha dS of lp (B, T, T) in float64, as its product with K, dQ, reads it; arguments as `both`'s, whose result
    `pair` is. Before the last cast its rows add up to 0 where delta is the P-weighted mean of the dP that it is
    subtracted from, as in the exact gradient and with delta=dp_p_normalized and do_o_corrected (with dp_p as far as P
    adds up to 1, which FP32's L decides), and else to what the roundings of O and of dP leave over."""
    q, k, v, do = (operand(x, spec) for x in (q, k, v, do))
    ds = torch.zeros_like(pair.s)
    o = emulated.o_of_delta(pair.unrounded.float(), pair.o_lp.float(), spec)
    for keys, rows, *_, part in emulated.score_gradients(do, q, k, v, o, pair.lse.float(), spec):
        ds[:, rows, keys] = part.double()
    return ds
