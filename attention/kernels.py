"""The Triton kernels: one forward kernel, one that makes delta and dQ, one that makes dK and dV.

Algorithms 1 to 3 of arXiv 2510.04212 with every switch of spec.py as a compile-time argument. A program owns a block
of rows (forward, dQ) or of keys (dK/dV) of one head and walks over the tiles it meets in a fixed order: no atomics,
so the same input gives the same bits. One loop, that branches around the mask where a tile lies below the diagonal, and
is told (tl.assume) that it runs at least once: with a loop for each kind, accumulators reach the second from two
places, and ptxas then waits for every single tensor product; the pipeline of loads would also fill twice.

Units. Scores are kept as x = S / UNIT: UNIT is alpha where leaving the scale out changes no rounding, else 1. P is
exp2((x - m) * LOG2), LOG2 = UNIT * log2(e): subtracted first, so that a row's only maximum gives exactly 1 however
large it is (forward_kernel subtracts in two steps, with the same effect). The other order, a fused
x * LOG2 - (m * LOG2), gives 1.0004 at logits near 1e4.

Names: p_ pointers, b_ tiles; s?b, s?h, s?t the strides of batch, head and token, in elements, of each tensor.
"""

import triton
import triton.language as tl

from attention.spec import LARGEST_CLAMPED_P
from attention.tiles import (
    add_bf16,
    assign,
    count_of_pairs,
    divide_rows,
    dot,
    load_operand,
    load_rows,
    matrix_of,
    max_of_pairs,
    narrow,
    operand,
    pack,
    random_words,
    round_bf16,
    round_fp8,
    round_stochastic,
    store_rows,
    tanh,
    unpack,
)

MASKED = tl.constexpr(-1.0e30)  # a masked score. Finite: a row that a tile masks entirely must not make inf - inf
MASKED_PAIR = tl.constexpr(0xF14AF14A)  # two of it, in BF16
CLAMP = tl.constexpr(LARGEST_CLAMPED_P)


@triton.jit
def scores(b_q, b_k, SCORES: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, DOTS: tl.constexpr,
           LAST: tl.constexpr = True):
    """x = S / UNIT, not masked: Q K^T, or its transpose with the arguments exchanged. SCALE 1 leaves alpha to UNIT.
    LAST: the last rounding to BF16 is made here."""
    x = dot(b_q, tl.trans(b_k), None, DOTS)
    if SCORES == "bf16" and (LAST or SCALE != 1):
        x = round_bf16(x)
    if SCALE != 1:
        x = x * SCALE
        if SCORES == "bf16" and LAST:
            x = round_bf16(x)
    if SOFTCAP != 0:
        x = tanh(x / SOFTCAP) * SOFTCAP
    return x


@triton.jit
def mask(x, rows, first, KEYS: tl.constexpr, FILL: tl.constexpr):
    """x of KEYS keys from `first` on, FILL where a row must not see the key. Comparing a difference with 0 takes a
    third of the instructions of comparing the two positions."""
    return tl.where(((rows - first)[:, None] - tl.arange(0, KEYS)[None, :]) >= 0, x, FILL)


@triton.jit
def mask_pairs(pairs, rows, first, KEYS: tl.constexpr):
    """As `mask`, of packed scores. Where the left one of a pair is masked, the right one is."""
    ahead = (rows - first)[:, None] - tl.arange(0, KEYS // 2)[None, :]
    pairs = tl.where(ahead >= KEYS // 2, pairs, (pairs & 0xFFFF) | (MASKED_PAIR & 0xFFFF0000))
    return tl.where(ahead >= 0, pairs, MASKED_PAIR)


@triton.jit
def new_maximum(m, rm, rs, RULE: tl.constexpr, BETA: tl.constexpr, CAP: tl.constexpr, LEAST: tl.constexpr,
                SHIFT: tl.constexpr):
    """max(m, m') of each row (paper Algorithm 3 and its variants, spec.py), everything in units of UNIT.

    CAP 0 is no cap, the paper's rule to the letter. A row that the tile masks entirely keeps its m.
    """
    if RULE == "lazy_max":
        m_new = tl.where(rm > m + SHIFT, rm, m)
    else:
        shifted = rm
        if RULE == "fixed":
            shifted = rm + SHIFT
        elif RULE == "paper" or RULE == "capped" or RULE == "unconditional":
            if CAP == 0:
                shifted = tl.where(rm > 0, BETA * rm, 0.0)
            else:
                raw = tl.where(rm > 0, (BETA - 1) * rm, -rm)
                if RULE == "capped":
                    raw = tl.maximum(raw, LEAST)
                shifted = rm + tl.minimum(raw, CAP)
            if RULE == "unconditional":
                shifted = tl.where(rm > 0.5 * MASKED, shifted, rm)
            else:
                shifted = tl.where(rs > 1, shifted, rm)
        m_new = tl.maximum(m, shifted)
    return m_new


@triton.jit
def element_index(head, rows, T, D: tl.constexpr, DP: tl.constexpr):
    """Row-major index of O's elements, (B, H, T, D), int64: what stochastic rounding draws by."""
    return (tl.cast(head, tl.int64) * T + rows)[:, None] * D + tl.arange(0, DP)[None, :]


@triton.jit
def add_tile(acc, pv, a, p_rng, index, tile, PV: tl.constexpr):
    """O a + P V. pv=bf16 rounds P V, O a and their sum; O is then a BF16 value.
    pv=stochastic rounds them by words 1, 2 and 3 of an index that no other key tile has."""
    if PV == "bf16":
        return add_bf16(acc * a[:, None], pv)
    elif PV == "stochastic":
        _, first, second, third = random_words(p_rng, index + (tl.cast(tile + 1, tl.int64) << 40))
        return round_stochastic(round_stochastic(acc * a[:, None], second) + round_stochastic(pv, first), third)
    else:
        return acc * a[:, None] + pv


@triton.jit
def probabilities(x, RULE: tl.constexpr):
    """P = 2^x of x in units of log 2, below 1 where stabilizer=clamp."""
    b_p = tl.exp2(x)
    if RULE == "clamp":
        b_p = tl.minimum(b_p, CLAMP)
    return b_p


@triton.jit
def cast_p(b_p, PROBS: tl.constexpr):
    """P as P V reads it."""
    if PROBS == "fp32":
        return b_p
    elif PROBS == "bf16":
        return narrow(b_p)
    else:
        return narrow(round_fp8(b_p, PROBS))


@triton.jit
def scores_and_maximum(b_q, b_k, rows, first, below, KEYS: tl.constexpr, SCORES: tl.constexpr, SCALE: tl.constexpr,
                       SOFTCAP: tl.constexpr, DOTS: tl.constexpr):
    """x; the same as `count_ties` takes it, in pairs where PAIRS; and the maximum of each row."""
    PAIRS: tl.constexpr = SCORES == "bf16" and SOFTCAP == 0  # scores are BF16 values, two in a register
    x = scores(b_q, b_k, SCORES, SCALE, SOFTCAP, DOTS, not PAIRS)
    if PAIRS:
        pairs = pack(x)
        if first >= below:
            pairs = mask_pairs(pairs, rows, first, KEYS)
        rm = max_of_pairs(pairs)
        return unpack(pairs), pairs, rm
    else:
        if first >= below:
            x = mask(x, rows, first, KEYS, MASKED)
        return x, x, tl.max(x, 1)


@triton.jit
def count_ties(x, above, floor, rm, KEYS: tl.constexpr):
    """rs: how many scores of each row are within epsilon of its maximum rm, not below floor = rm - epsilon: by x if it
    is in pairs, or KEYS less the sign bits of above = x - floor. 0 where the tile masks the whole row."""
    if x.dtype == tl.uint32:
        return count_of_pairs(x, tl.maximum(floor, 0.5 * MASKED))
    else:
        rs = KEYS + tl.sum(above.to(tl.int32, bitcast=True) >> 31, 1)
        return tl.where(rm > 0.5 * MASKED, rs, 0)


@triton.jit
def wide_steps(b_q, k, v, m, l, acc, ties, row_max, rows, end, TILE, counted, p_rng, index, BLOCK_N: tl.constexpr,
               D: tl.constexpr, DP: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, LOG2: tl.constexpr,
               SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BF16: tl.constexpr, SCORES: tl.constexpr,
               PROBS: tl.constexpr, ROW_SUM: tl.constexpr, PV: tl.constexpr, RULE: tl.constexpr, BETA: tl.constexpr,
               CAP: tl.constexpr, LEAST: tl.constexpr, SHIFT: tl.constexpr, EPSILON: tl.constexpr, STATS: tl.constexpr,
               DOTS: tl.constexpr):
    """m, l, acc, ties and row_max after all keys, in steps of TILE (up to the whole row), each in parts of BLOCK_N: m
    and rs of the step are found first, then P V is summed over the parts in FP32 and rounded once."""
    TIED: tl.constexpr = RULE == "paper" or RULE == "capped"
    for tile in range(0, end, TILE):
        stop = tl.minimum(tile + TILE, end)
        rm = tl.full(m.shape, MASKED, tl.float32)
        rs = tl.zeros(m.shape, tl.int32)
        for n in range(tile, stop, BLOCK_N):
            b_k = load_operand(k, n, BLOCK_N, D, DP, EVEN, TMA, BF16)
            x = mask(scores(b_q, b_k, SCORES, SCALE, SOFTCAP, DOTS), rows, n, BLOCK_N, MASKED)
            rm = tl.maximum(rm, tl.max(x, 1))
        if TIED or STATS:
            floor = rm - EPSILON
            last = stop if TIED else tl.where(counted, stop, tile)
            for n in range(tile, last, BLOCK_N):
                b_k = load_operand(k, n, BLOCK_N, D, DP, EVEN, TMA, BF16)
                x = mask(scores(b_q, b_k, SCORES, SCALE, SOFTCAP, DOTS), rows, n, BLOCK_N, MASKED)
                rs += count_ties(x, x - floor[:, None], floor, rm, BLOCK_N)
        m_new = new_maximum(m, rm, rs, RULE, BETA, CAP, LEAST, SHIFT)
        pv = tl.zeros(acc.shape, tl.float32)
        row_sum = tl.zeros(m.shape, tl.float32)
        for n in range(tile, stop, BLOCK_N):
            b_k = load_operand(k, n, BLOCK_N, D, DP, EVEN, TMA, BF16)
            b_v = load_operand(v, n, BLOCK_N, D, DP, EVEN, TMA, BF16)
            x = mask(scores(b_q, b_k, SCORES, SCALE, SOFTCAP, DOTS), rows, n, BLOCK_N, MASKED)
            b_p = probabilities((x - m_new[:, None]) * LOG2, RULE)
            row_sum += tl.sum(b_p, 1)
            pv = dot(cast_p(b_p, PROBS), b_v, pv, DOTS, True)
        a = tl.exp2((m - m_new) * LOG2)
        acc = add_tile(acc, pv, a, p_rng, index, tile // TILE, PV)
        l = l * a + row_sum
        if ROW_SUM == "bf16":
            l = round_bf16(l)
        m = m_new
        ties, row_max = tl.maximum(ties, rs), tl.maximum(row_max, rm)
    return m, l, acc, ties, row_max


@triton.jit
def round_output(o, index, h, p_rng, OUTPUT: tl.constexpr, FP32_HEADS: tl.constexpr):
    """O as it is stored. Bit h of FP32_HEADS: head h stays FP32."""
    rounded = o
    if OUTPUT == "stochastic":
        word, _, _, _ = random_words(p_rng, index)
        rounded = round_stochastic(o, word)
    elif OUTPUT == "bf16":
        rounded = round_bf16(o)
    if FP32_HEADS != 0:
        rounded = tl.where(((FP32_HEADS >> tl.cast(h, tl.int64)) & 1) != 0, o, rounded)
    return rounded


@triton.jit(do_not_specialize=["counted", "H", "TILE", "HEADS", "GROUP"])
def forward_kernel(p_q, p_k, p_v, d_q, d_k, d_v, p_o, p_rest, p_lse, p_ties, p_row_max, p_rng, counted,
                   sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot, H, T, TILE, HEADS, GROUP,
                   D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
                   UNIT: tl.constexpr, LOG2: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
                   BF16: tl.constexpr, SCORES: tl.constexpr, PROBS: tl.constexpr, ROW_SUM: tl.constexpr,
                   PV: tl.constexpr, OUTPUT: tl.constexpr, FP32_HEADS: tl.constexpr, RULE: tl.constexpr,
                   BETA: tl.constexpr, CAP: tl.constexpr, LEAST: tl.constexpr, SHIFT: tl.constexpr,
                   EPSILON: tl.constexpr, STATS: tl.constexpr, WIDE: tl.constexpr, DOTS: tl.constexpr,
                   TMA: tl.constexpr):
    """O, L and row statistics of one block of rows (paper Algorithm 1); ties in the first `counted` heads alone.
    Where p_rest is not None, BF16 of what O's rounding left over goes there, laid out as O.

    A tile of BLOCK_N keys is one step of the online softmax. WIDE: a step is TILE keys, by `wide_steps`.
    """
    TIED: tl.constexpr = RULE == "paper" or RULE == "capped"  # rules that count ties anyway
    blocks = tl.cdiv(T, BLOCK_M)
    block, head = assign(blocks, HEADS, GROUP)
    start = (blocks - 1 - block) * BLOCK_M  # long rows first
    b, h = tl.cast(head // H, tl.int64), head % H
    q = matrix_of(b, h, T, p_q, d_q, sqb, sqh, sqt)
    k = matrix_of(b, h, T, p_k, d_k, skb, skh, skt)
    v = matrix_of(b, h, T, p_v, d_v, svb, svh, svt)
    p_o += b * sob + tl.cast(h, tl.int64) * soh
    rows = start + tl.arange(0, BLOCK_M)
    end = tl.minimum(start + BLOCK_M, T)

    b_q = load_operand(q, start, BLOCK_M, D, DP, EVEN, TMA, BF16)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DP), tl.float32)
    ties, row_max = tl.zeros((BLOCK_M,), tl.int32), m
    index = element_index(head, rows, T, D, DP) if PV == "stochastic" else None

    if WIDE:
        m, l, acc, ties, row_max = wide_steps(
            b_q, k, v, m, l, acc, ties, row_max, rows, end, TILE, head < counted, p_rng, index, BLOCK_N, D, DP, EVEN,
            TMA, LOG2, SCALE, SOFTCAP, BF16, SCORES, PROBS, ROW_SUM, PV, RULE, BETA, CAP, LEAST, SHIFT, EPSILON, STATS,
            DOTS)
    else:
        below = (start + 1) // BLOCK_N * BLOCK_N  # tiles before this key have no mask in any row of the block
        tl.assume(end > 0)
        for n in range(0, end, BLOCK_N):
            b_k = load_operand(k, n, BLOCK_N, D, DP, EVEN, TMA, BF16)
            x, pairs, rm = scores_and_maximum(b_q, b_k, rows, n, below, BLOCK_N, SCORES, SCALE, SOFTCAP, DOTS)
            floor = rm - EPSILON  # P by way of it: ties are then sign bits of a difference that is there anyway
            above = x - floor[:, None]
            rs = count_ties(pairs, above, floor, rm, BLOCK_N) if TIED else None
            if STATS:
                row_max = tl.maximum(row_max, rm)
                if TIED:
                    ties = tl.maximum(ties, rs)
                elif head < counted:
                    ties = tl.maximum(ties, count_ties(pairs, above, floor, rm, BLOCK_N))
            m_new = new_maximum(m, rm, rs, RULE, BETA, CAP, LEAST, SHIFT)
            b_p = probabilities(above * LOG2 + ((floor - m_new) * LOG2)[:, None], RULE)
            a = tl.exp2((m - m_new) * LOG2)
            l = l * a + tl.sum(b_p, 1)
            if ROW_SUM == "bf16":
                l = round_bf16(l)
            b_v = load_operand(v, n, BLOCK_N, D, DP, EVEN, TMA, BF16)
            b_p = cast_p(b_p, PROBS)
            if PV == "fp32":
                acc = dot(b_p, b_v, acc * a[:, None], DOTS, True)
            else:
                acc = add_tile(acc, dot(b_p, b_v, None, DOTS, True), a, p_rng, index, n // BLOCK_N, PV)
            m = m_new

    p_rows = tl.cast(head, tl.int64) * T + rows
    tl.store(p_lse + p_rows, m * UNIT + tl.log(l), mask=rows < T)
    if STATS:
        tl.store(p_ties + p_rows, ties, mask=(rows < T) & (head < counted))
        tl.store(p_row_max + p_rows, row_max * UNIT, mask=rows < T)
    unrounded = divide_rows(acc, l)
    b_o = round_output(unrounded, element_index(head, rows, T, D, DP), h, p_rng, OUTPUT, FP32_HEADS)
    if p_rest is not None:
        rest = narrow(unrounded - b_o)
        store_rows(p_rest + b * sob + tl.cast(h, tl.int64) * soh, rest, start, sot, T, BLOCK_M, D, DP)
    store_rows(p_o, b_o, start, sot, T, BLOCK_M, D, DP)


@triton.jit
def gradient_of_scores(b_p, dp, delta, x, ALPHA: tl.constexpr, SOFTCAP: tl.constexpr):
    """alpha dS = P (alpha dP - delta), times the slope of the cap; delta arrives multiplied by alpha."""
    b_ds = b_p * (dp * ALPHA - delta)
    if SOFTCAP != 0:
        x = x / SOFTCAP
        b_ds = b_ds * (1 - x * x)
    return b_ds


@triton.jit
def delta_over_keys(b_q, b_do, k, v, m, rows, end, BLOCK_N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                    EVEN: tl.constexpr, TMA: tl.constexpr, LOG2: tl.constexpr, SCALE: tl.constexpr,
                    SOFTCAP: tl.constexpr, BF16: tl.constexpr, SCORES: tl.constexpr, DELTA: tl.constexpr,
                    DOTS: tl.constexpr):
    """By one more pass over the keys: rowsum(dP P), that over rowsum(P), or rowsum(dO (P V)), which is the first with a
    dP that was not rounded."""
    delta = tl.zeros(m.shape, tl.float32)
    total = tl.zeros(m.shape, tl.float32)
    for n in range(0, end, BLOCK_N):
        b_k = load_operand(k, n, BLOCK_N, D, DP, EVEN, TMA, BF16)
        b_v = load_operand(v, n, BLOCK_N, D, DP, EVEN, TMA, BF16)
        x = mask(scores(b_q, b_k, SCORES, SCALE, SOFTCAP, DOTS), rows, n, BLOCK_N, MASKED)
        dp = dot(b_do, tl.trans(b_v), None, DOTS)
        if SCORES == "bf16" and DELTA != "do_o_recomputed":
            dp = round_bf16(dp)
        b_p = tl.exp2((x - m[:, None]) * LOG2)
        delta += tl.sum(dp * b_p, 1)
        if DELTA == "dp_p_normalized":
            total += tl.sum(b_p, 1)
    return delta / total if DELTA == "dp_p_normalized" else delta


@triton.jit(do_not_specialize=["H", "HEADS", "GROUP"])
def dq_kernel(p_q, p_k, p_v, d_q, d_k, d_v, d_do, p_o, p_rest, p_do, p_lse, p_delta, p_dq,
              sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot, sgb, sgh, sgt,
              sxb, sxh, sxt, H, T, HEADS, GROUP,
              D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
              ALPHA: tl.constexpr, UNIT: tl.constexpr, LOG2: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
              BF16: tl.constexpr, SCORES: tl.constexpr, DELTA: tl.constexpr, DOTS: tl.constexpr, TMA: tl.constexpr):
    """dQ = dS K of one block of rows (paper Algorithm 2), and alpha * delta of each row.

    dO is read here anyway, so delta costs one read of O and, where p_rest is not None, of what its rounding left over.
    do_o_corrected sums P K beside dQ, one more product: what the rows of dS added up to is taken off dQ, and added to
    delta, when it is known. The other rules: see `delta_over_keys`.
    """
    CORRECTED: tl.constexpr = DELTA == "do_o_corrected"
    blocks = tl.cdiv(T, BLOCK_M)
    block, head = assign(blocks, HEADS, GROUP)
    start = (blocks - 1 - block) * BLOCK_M
    b, h = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
    q = matrix_of(b, h, T, p_q, d_q, sqb, sqh, sqt)
    k = matrix_of(b, h, T, p_k, d_k, skb, skh, skt)
    v = matrix_of(b, h, T, p_v, d_v, svb, svh, svt)
    do = matrix_of(b, h, T, p_do, d_do, sgb, sgh, sgt)
    rows = start + tl.arange(0, BLOCK_M)
    end = tl.minimum(start + BLOCK_M, T)
    below = (start + 1) // BLOCK_N * BLOCK_N
    p_rows = tl.cast(head, tl.int64) * T + rows

    b_q = load_operand(q, start, BLOCK_M, D, DP, EVEN, TMA, BF16)
    b_do = load_operand(do, start, BLOCK_M, D, DP, EVEN, TMA, BF16)
    m = tl.load(p_lse + p_rows, mask=rows < T, other=0.0) * (1 / UNIT)
    if DELTA == "do_o" or DELTA == "do_o_exact" or CORRECTED:
        b_o = load_rows(p_o + b * sob + h * soh, start, sot, T, BLOCK_M, D, DP, not EVEN).to(tl.float32)
        if p_rest is not None:
            b_o += load_rows(p_rest + b * sob + h * soh, start, sot, T, BLOCK_M, D, DP, not EVEN).to(tl.float32)
        # By pointers: of a dO by descriptors the compiler sums CORRECTED's in another order than of one by pointers.
        if CORRECTED:
            b_g = operand(load_rows(p_do + b * sgb + h * sgh, start, sgt, T, BLOCK_M, D, DP, not EVEN), BF16)
        else:
            b_g = b_do
        delta = tl.sum(b_g.to(tl.float32) * b_o, 1)
    else:
        delta = delta_over_keys(b_q, b_do, k, v, m, rows, end, BLOCK_N, D, DP, EVEN, TMA, LOG2, SCALE, SOFTCAP, BF16,
                                SCORES, DELTA, DOTS)
    delta = delta * ALPHA
    acc = tl.zeros((BLOCK_M, DP), tl.float32)
    if CORRECTED:
        pk, left, total = acc, tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    else:
        tl.store(p_delta + p_rows, delta, mask=rows < T)

    tl.assume(end > 0)
    for n in range(0, end, BLOCK_N):
        b_k = load_operand(k, n, BLOCK_N, D, DP, EVEN, TMA, BF16)
        b_v = load_operand(v, n, BLOCK_N, D, DP, EVEN, TMA, BF16)
        x = scores(b_q, b_k, SCORES, SCALE, SOFTCAP, DOTS)
        dp = dot(b_do, tl.trans(b_v), None, DOTS)
        b_p = tl.exp2((x - m[:, None]) * LOG2)
        if n >= below:
            b_p = mask(b_p, rows, n, BLOCK_N, 0.0)
        if SCORES == "bf16":
            dp = round_bf16(dp)
        b_ds = gradient_of_scores(b_p, dp, delta[:, None], x, ALPHA, SOFTCAP)
        acc = dot(operand(b_ds, BF16), b_k, acc, DOTS, True)
        if CORRECTED:
            left += tl.sum(b_p * (dp * ALPHA - delta[:, None]), 1)
            total += tl.sum(b_p, 1)
            pk = dot(operand(gradient_of_scores(b_p, 0.0, -1.0, x, 1.0, SOFTCAP), BF16), b_k, pk, DOTS, True)
    if CORRECTED:
        left = left / total
        acc -= left[:, None] * pk
        tl.store(p_delta + p_rows, delta + left, mask=rows < T)
    if BF16:
        acc = round_bf16(acc)
    store_rows(p_dq + b * sxb + h * sxh, acc, start, sxt, T, BLOCK_M, D, DP)


@triton.jit
def load_both(p_x, p_y, rows, T, EVEN: tl.constexpr, TOGETHER: tl.constexpr):
    """x and y, FP32, of these rows, 0 past T. TOGETHER: by one load of two rows of pointers. Where loads are pipelined
    two a tile cost up to 18 % of the kernel's time; where they are not, one takes more instructions than two."""
    if TOGETHER:
        rows = rows[None, :]
        both = tl.where(tl.arange(0, 2) == 0, p_x, p_y)[:, None] + rows
        both = tl.load(both) if EVEN else tl.load(both, mask=rows < T, other=0.0)
        return tl.split(tl.trans(both))
    elif EVEN:
        return tl.load(p_x + rows), tl.load(p_y + rows)
    else:
        return tl.load(p_x + rows, mask=rows < T, other=0.0), tl.load(p_y + rows, mask=rows < T, other=0.0)


@triton.jit(do_not_specialize=["H", "HEADS", "GROUP"])
def dkdv_kernel(p_q, p_k, p_v, d_q, d_k, d_v, d_do, p_do, p_lse, p_delta, p_dk, p_dv,
                sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sgb, sgh, sgt, sxb, sxh, sxt, H, T, HEADS, GROUP,
                D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
                ALPHA: tl.constexpr, UNIT: tl.constexpr, LOG2: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
                BF16: tl.constexpr, SCORES: tl.constexpr, DOTS: tl.constexpr, TMA: tl.constexpr):
    """dV = P^T dO and dK = dS^T Q of one block of BLOCK_N keys, over tiles of BLOCK_M rows (paper Algorithm 2).

    Everything is computed transposed, S^T = K Q^T, so that P^T and dS^T feed the next product from registers. Which
    product is made first changes nothing but time: at D = 64 S first is up to 5 % faster, at D = 128 dP first 2 to 3 %.
    Rows past T read dO = 0 and delta = 0 and add nothing.
    """
    DP_FIRST: tl.constexpr = BF16 and DP > 64
    block, head = assign(tl.cdiv(T, BLOCK_N), HEADS, GROUP)
    start = block * BLOCK_N  # early keys have the most rows: long blocks first
    b, h = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
    q = matrix_of(b, h, T, p_q, d_q, sqb, sqh, sqt)
    k = matrix_of(b, h, T, p_k, d_k, skb, skh, skt)
    v = matrix_of(b, h, T, p_v, d_v, svb, svh, svt)
    do = matrix_of(b, h, T, p_do, d_do, sgb, sgh, sgt)
    p_lse += tl.cast(head, tl.int64) * T
    p_delta += tl.cast(head, tl.int64) * T
    keys = start + tl.arange(0, BLOCK_N)
    first = start // BLOCK_M * BLOCK_M
    below = tl.minimum(tl.cdiv(start + BLOCK_N - 1, BLOCK_M) * BLOCK_M, T)  # rows from here on see every key

    b_k = load_operand(k, start, BLOCK_N, D, DP, EVEN, TMA, BF16)
    b_v = load_operand(v, start, BLOCK_N, D, DP, EVEN, TMA, BF16)
    b_dk, b_dv = tl.zeros((BLOCK_N, DP), tl.float32), tl.zeros((BLOCK_N, DP), tl.float32)
    tl.assume(first < T)
    for r in range(first, T, BLOCK_M):
        b_q = load_operand(q, r, BLOCK_M, D, DP, EVEN, TMA, BF16)
        b_do = load_operand(do, r, BLOCK_M, D, DP, EVEN, TMA, BF16)
        m, delta = load_both(p_lse, p_delta, r + tl.arange(0, BLOCK_M), T, EVEN, BF16)
        m = m * (1 / UNIT)
        if DP_FIRST:
            dp = dot(b_v, tl.trans(b_do), None, DOTS)
        x = scores(b_k, b_q, SCORES, SCALE, SOFTCAP, DOTS)
        b_p = tl.exp2((x - m[None, :]) * LOG2)
        if r < below:  # as in `mask`
            b_p = tl.where((tl.arange(0, BLOCK_M)[None, :] - (keys - r)[:, None]) >= 0, b_p, 0.0)
        b_dv = dot(operand(b_p, BF16), b_do, b_dv, DOTS, True)
        if not DP_FIRST:
            dp = dot(b_v, tl.trans(b_do), None, DOTS)
        if SCORES == "bf16":
            dp = round_bf16(dp)
        b_ds = gradient_of_scores(b_p, dp, delta[None, :], x, ALPHA, SOFTCAP)
        b_dk = dot(operand(b_ds, BF16), b_q, b_dk, DOTS, True)
    if BF16:
        b_dk, b_dv = round_bf16(b_dk), round_bf16(b_dv)
    store_rows(p_dk + b * sxb + h * sxh, b_dk, start, sxt, T, BLOCK_N, D, DP)
    store_rows(p_dv + b * sxb + h * sxh, b_dv, start, sxt, T, BLOCK_N, D, DP)
