"""Kernels in which a warp group of its own copies and two others compute; `bench_attention.py --tune` alone runs them.

tl.range(warp_specialize=True) of Triton 3.6 on Hopper. What it builds limits what may be written: loads in the loop by
descriptors, no `if` and no tl.assume, 4 warps, tiles that it halves into 64 rows for each computing group. It halves
the loads of such a tile too, but cannot halve the box of a descriptor that the host made: the copy engine would then
deliver twice the bytes that a barrier waits for, and the kernel never ends. So descriptors of halved tiles are made in
the kernel (they need triton.set_allocator), those of the loop come from the host. Only what the tuner compares is here:
BF16 operands, T a multiple of 128, D = 64 or 128, delta = rowsum(dO O), and the rules and roundings of
flash_fa2, flash_bf16 and stabilized.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from attention import flash
from attention.kernels import (
    MASKED,
    add_tile,
    cast_p,
    count_ties,
    gradient_of_scores,
    mask,
    new_maximum,
    probabilities,
    scores,
)
from attention.op import output_like
from attention.tiles import assign, divide_rows, load_rows, narrow, operand, round_bf16, store_rows


class Tile(NamedTuple):
    """As flash.Tile; `mode` is how its loop is made."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int
    mode: str

    def __str__(self):
        return str(flash.Tile(*self[:5])) + "/" + self.mode


@triton.jit
def load_halved(p, first, col, stride, ROWS: tl.constexpr, D: tl.constexpr):
    """Tokens first.. of the (tokens, H D) matrix at p, columns col.. on, by a descriptor made here."""
    d = tl.make_tensor_descriptor(p, [first + ROWS, col + D], [stride, 1], [ROWS, D])
    return d.load([first, col])


@triton.jit
def load_vector(p, start, ROWS: tl.constexpr):
    """FP32 (ROWS,). In inline PTX: the compiler would hand a plain load to the copying warps, which can pass on only
    what descriptors load."""
    p += start + tl.arange(0, ROWS)
    return tl.inline_asm_elementwise("ld.global.f32 $0, [$1];", "=f,l", [p.to(tl.int64, bitcast=True)],
                                     dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def step(acc, m, l, b_q, d_k, d_v, row, k_col, v_col, rows, n, BLOCK_N: tl.constexpr, LOG2: tl.constexpr,
         SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SCORES: tl.constexpr, PROBS: tl.constexpr, PV: tl.constexpr,
         RULE: tl.constexpr, BETA: tl.constexpr, CAP: tl.constexpr, LEAST: tl.constexpr, SHIFT: tl.constexpr,
         EPSILON: tl.constexpr, DOTS: tl.constexpr, MASK: tl.constexpr):
    """As the loop of kernels.forward_kernel, one tile."""
    x = scores(b_q, d_k.load([row + n, k_col]), SCORES, SCALE, SOFTCAP, DOTS)
    if MASK:
        x = mask(x, rows, n, BLOCK_N, MASKED)
    rm = tl.max(x, 1)
    floor = rm - EPSILON
    above = x - floor[:, None]
    rs = count_ties(above, rm, BLOCK_N) if RULE == "capped" else None
    m_new = new_maximum(m, rm, rs, RULE, BETA, CAP, LEAST, SHIFT)
    b_p = probabilities(above * LOG2 + ((floor - m_new) * LOG2)[:, None], RULE)
    a = tl.exp2((m - m_new) * LOG2)
    l = l * a + tl.sum(b_p, 1)
    pv = tl.dot(cast_p(b_p, PROBS), d_v.load([row + n, v_col]))
    if PV == "bf16":
        acc = add_tile(acc, pv, a, PV)
    else:
        acc = tl.fma(acc, tl.broadcast_to(a[:, None], acc.shape), pv)
    return acc, m_new, l


@triton.jit(do_not_specialize=["H", "HEADS", "GROUP"])
def forward_kernel(p_q, d_k, d_v, p_o, p_lse, sqb, sqh, sqt, skh, svh, sob, soh, sot, H, T, HEADS, GROUP,
                   D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
                   LOG2: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SCORES: tl.constexpr,
                   PROBS: tl.constexpr, PV: tl.constexpr, RULE: tl.constexpr, BETA: tl.constexpr, CAP: tl.constexpr,
                   LEAST: tl.constexpr, SHIFT: tl.constexpr, EPSILON: tl.constexpr, DOTS: tl.constexpr,
                   LOOPS: tl.constexpr):
    """O and L. LOOPS: 1 masks every tile; 2 walks the tiles below the diagonal without a mask first."""
    blocks = tl.cdiv(T, BLOCK_M)
    block, head = assign(blocks, HEADS, GROUP)
    start = (blocks - 1 - block) * BLOCK_M
    b, h = tl.cast(head // H, tl.int64), head % H
    row, rows = head // H * T, start + tl.arange(0, BLOCK_M)
    b_q = load_halved(p_q + b * sqb, start, h * sqh, sqt, BLOCK_M, D)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    if PV == "bf16":
        acc = narrow(acc)
    below = (start + 1) // BLOCK_N * BLOCK_N if LOOPS == 2 else 0
    if LOOPS == 2:
        for n in tl.range(0, below, BLOCK_N, warp_specialize=True):
            acc, m, l = step(acc, m, l, b_q, d_k, d_v, row, h * skh, h * svh, rows, n, BLOCK_N, LOG2, SCALE, SOFTCAP,
                             SCORES, PROBS, PV, RULE, BETA, CAP, LEAST, SHIFT, EPSILON, DOTS, False)
    for n in tl.range(below, start + BLOCK_M, BLOCK_N, warp_specialize=True):
        acc, m, l = step(acc, m, l, b_q, d_k, d_v, row, h * skh, h * svh, rows, n, BLOCK_N, LOG2, SCALE, SOFTCAP,
                         SCORES, PROBS, PV, RULE, BETA, CAP, LEAST, SHIFT, EPSILON, DOTS, True)
    tl.store(p_lse + tl.cast(head, tl.int64) * T + rows, m * UNIT + tl.log(l))
    o = round_bf16(divide_rows(acc.to(tl.float32), l))
    store_rows(p_o + b * sob + tl.cast(h, tl.int64) * soh, o, start, sot, T, BLOCK_M, D, D)


@triton.jit(do_not_specialize=["H"])
def delta_kernel(p_o, p_do, p_delta, sob, soh, sot, sgb, sgh, sgt, H, T, D: tl.constexpr, ALPHA: tl.constexpr):
    """alpha * rowsum(dO O), which dq_kernel cannot make on the way."""
    blocks = T // 64
    head, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * 64
    b, h = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
    o = load_rows(p_o + b * sob + h * soh, start, sot, T, 64, D, D, False).to(tl.float32)
    do = load_rows(p_do + b * sgb + h * sgh, start, sgt, T, 64, D, D, False).to(tl.float32)
    tl.store(p_delta + tl.cast(head, tl.int64) * T + start + tl.arange(0, 64), tl.sum(do * o, 1) * ALPHA)


@triton.jit(do_not_specialize=["H", "HEADS", "GROUP"])
def dq_kernel(p_q, p_do, d_k, d_v, p_lse, p_delta, p_dq, sqb, sqh, sqt, skh, svh, sgb, sgh, sgt, sxb, sxh, sxt,
              H, T, HEADS, GROUP, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALPHA: tl.constexpr,
              UNIT: tl.constexpr, LOG2: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SCORES: tl.constexpr,
              DOTS: tl.constexpr):
    blocks = tl.cdiv(T, BLOCK_M)
    block, head = assign(blocks, HEADS, GROUP)
    start = (blocks - 1 - block) * BLOCK_M
    b, h = tl.cast(head // H, tl.int64), head % H
    row, rows = head // H * T, start + tl.arange(0, BLOCK_M)
    b_q = load_halved(p_q + b * sqb, start, h * sqh, sqt, BLOCK_M, D)
    b_do = load_halved(p_do + b * sgb, start, h * sgh, sgt, BLOCK_M, D)
    m = load_vector(p_lse + tl.cast(head, tl.int64) * T, start, BLOCK_M) * (1 / UNIT)
    delta = load_vector(p_delta + tl.cast(head, tl.int64) * T, start, BLOCK_M)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for n in tl.range(0, start + BLOCK_M, BLOCK_N, warp_specialize=True):
        b_k = d_k.load([row + n, h * skh])
        x = scores(b_q, b_k, SCORES, SCALE, SOFTCAP, DOTS)
        dp = tl.dot(b_do, tl.trans(d_v.load([row + n, h * svh])))
        b_p = mask(tl.exp2((x - m[:, None]) * LOG2), rows, n, BLOCK_N, 0.0)
        if SCORES == "bf16":
            dp = round_bf16(dp)
        acc = tl.dot(operand(gradient_of_scores(b_p, dp, delta[:, None], x, ALPHA, SOFTCAP), True), b_k, acc)
    store_rows(p_dq + b * sxb + tl.cast(h, tl.int64) * sxh, round_bf16(acc), start, sxt, T, BLOCK_M, D, D)


@triton.jit(do_not_specialize=["H", "HEADS", "GROUP"])
def dkdv_kernel(p_k, p_v, d_q, d_do, p_lse, p_delta, p_dk, p_dv, sqh, skb, skh, skt, svb, svh, svt, sgh, sxb, sxh, sxt,
                H, T, HEADS, GROUP, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALPHA: tl.constexpr,
                UNIT: tl.constexpr, LOG2: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
                SCORES: tl.constexpr, DOTS: tl.constexpr):
    block, head = assign(tl.cdiv(T, BLOCK_N), HEADS, GROUP)
    start = block * BLOCK_N
    b, h = tl.cast(head // H, tl.int64), head % H
    row, keys = head // H * T, start + tl.arange(0, BLOCK_N)
    p_lse += tl.cast(head, tl.int64) * T
    p_delta += tl.cast(head, tl.int64) * T
    b_k = load_halved(p_k + b * skb, start, h * skh, skt, BLOCK_N, D)
    b_v = load_halved(p_v + b * svb, start, h * svh, svt, BLOCK_N, D)
    b_dk, b_dv = tl.zeros((BLOCK_N, D), tl.float32), tl.zeros((BLOCK_N, D), tl.float32)
    for r in tl.range(start // BLOCK_M * BLOCK_M, T, BLOCK_M, warp_specialize=True):
        b_q = d_q.load([row + r, h * sqh])
        m = tl.load(p_lse + r + tl.arange(0, BLOCK_M)) * (1 / UNIT)
        delta = tl.load(p_delta + r + tl.arange(0, BLOCK_M))
        x = scores(b_k, b_q, SCORES, SCALE, SOFTCAP, DOTS)
        b_p = tl.exp2((x - m[None, :]) * LOG2)
        b_p = tl.where((tl.arange(0, BLOCK_M)[None, :] - (keys - r)[:, None]) >= 0, b_p, 0.0)
        b_do = d_do.load([row + r, h * sgh])
        b_dv = tl.dot(operand(b_p, True), b_do, b_dv)
        dp = tl.dot(b_v, tl.trans(b_do))
        if SCORES == "bf16":
            dp = round_bf16(dp)
        b_dk = tl.dot(operand(gradient_of_scores(b_p, dp, delta[None, :], x, ALPHA, SOFTCAP), True), b_q, b_dk)
    x_offset = b * sxb + tl.cast(h, tl.int64) * sxh
    store_rows(p_dk + x_offset, round_bf16(b_dk), start, sxt, T, BLOCK_N, D, D)
    store_rows(p_dv + x_offset, round_bf16(b_dv), start, sxt, T, BLOCK_N, D, D)


def forward(tile, spec, q, k, v):
    """o and lse. tile.mode "ws1" masks every tile in one loop, "ws2" takes two loops."""
    (B, H, T, D), o = q.shape, output_like(q, False)
    lse = torch.empty((B, H, T), device=q.device, dtype=torch.float32)
    loops = dict(LOOPS=1 if tile.mode == "ws1" else 2)
    options = _options(forward_kernel, tile, D, flash._switches(spec, D) | flash._forward_switches(spec, D) | loops)
    forward_kernel[(B * H * (T // tile.rows),)](
        q, flash.descriptor(k, tile.keys), flash.descriptor(v, tile.keys), o, lse, *q.stride()[:3], k.stride(1),
        v.stride(1), *o.stride()[:3], H, T, B * H, flash._group(k, B * H), **options)
    return o, lse


def backward(kernel, tile, spec, do, q, k, v, o, lse):
    """dq, dk, dv, of which `kernel`, "dq" or "dkdv", makes its part here and the preset's kernel the rest."""
    (B, H, T, D), launch = q.shape, flash.launch_for(spec, q.shape[3], q.device)[1]
    dq, dk, dv = (output_like(q, False) for _ in range(3))
    delta, group = torch.empty_like(lse), flash._group(k, B * H)
    switches = flash._switches(spec, D) | dict(ALPHA=D**-0.5)
    if kernel == "dq":
        delta_kernel[(B * H * (T // 64),)](o, do, delta, *o.stride()[:3], *do.stride()[:3], H, T, D=D, ALPHA=D**-0.5)
        dq_kernel[(B * H * (T // tile.rows),)](
            q, do, flash.descriptor(k, tile.keys), flash.descriptor(v, tile.keys), lse, delta, dq, *q.stride()[:3],
            k.stride(1), v.stride(1), *do.stride()[:3], *dq.stride()[:3], H, T, B * H, group,
            **_options(dq_kernel, tile, D, switches))
        flash.launch_dkdv(launch.dkdv, spec, do, q, k, v, lse, delta, dk, dv)
    else:
        flash.launch_dq(launch.dq, spec, do, q, k, v, o, lse, delta, dq)
        dkdv_kernel[(B * H * (T // tile.keys),)](
            k, v, flash.descriptor(q, tile.rows), flash.descriptor(do, tile.rows), lse, delta, dk, dv, q.stride(1),
            *k.stride()[:3], *v.stride()[:3], do.stride(1), *dk.stride()[:3], H, T, B * H, group,
            **_options(dkdv_kernel, tile, D, switches))
    return dq, dk, dv


def _options(kernel, tile, D, switches):
    """A kernel's compile-time arguments; and the memory for the descriptors that it makes."""
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    sizes = dict(D=D, BLOCK_M=tile.rows, BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages)
    registers = dict(maxnreg=tile.registers) if tile.registers else {}
    return {name: x for name, x in switches.items() if name in kernel.arg_names} | sizes | registers
