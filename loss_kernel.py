"""The Triton kernel of loss.py: one program a token."""

import triton
import triton.language as tl

from attention.tiles import tanh

BLOCK, WARPS = 4096, 8  # logits of a row in registers at a time


@triton.jit
def softmax_gradient_kernel(p_logits, p_targets, p_losses, stride, V, SOFTCAP: tl.constexpr, GRAD: tl.constexpr,
                            BLOCK: tl.constexpr):
    """loss = log sum exp(s - m) - (s[target] - m), m = max s; d loss / d s = exp(s - m) / sum - [target], in place."""
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * stride
    target = tl.load(p_targets + row)
    # Read before any reduction below, which all threads wait in: so before a thread writes a gradient there.
    own = _score(p_row + tl.maximum(target, 0), True, SOFTCAP)
    m = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        s = _score(p_row + o_v, o_v < V, SOFTCAP)
        m_new = tl.maximum(m, tl.max(s, 0))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(s - m_new), 0)
        m = m_new
    tl.store(p_losses + row, tl.where(target < 0, 0.0, tl.log(total) - (own - m)))
    if GRAD:
        scale = tl.where(target < 0, 0.0, 1.0 / total)
        for start in range(0, V, BLOCK):
            o_v = start + tl.arange(0, BLOCK)
            s = _score(p_row + o_v, o_v < V, SOFTCAP)
            g = tl.exp(s - m) * scale - tl.where(o_v == target, 1.0, 0.0)
            if SOFTCAP != 0.0:
                t = s / SOFTCAP
                g *= 1 - t * t
            tl.store(p_row + o_v, g.to(p_logits.dtype.element_ty), mask=o_v < V)


@triton.jit
def _score(p, mask, SOFTCAP: tl.constexpr):
    s = tl.load(p, mask=mask, other=-float("inf")).to(tl.float32)
    if SOFTCAP != 0.0:
        s = tl.where(mask, SOFTCAP * tanh(s / SOFTCAP), -float("inf"))
    return s
