"""What the Triton kernels are made of: roundings, products, loads and stores of tiles, and the order of programs.

The interpreter (TRITON_INTERPRET=1) has no BF16 arithmetic. There BF16 values travel in FP32 and are rounded on their
bits, under a compile-time flag that is on nowhere else.
"""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def narrow(x):
    """FP32 rounded to BF16, nearest even, NaN kept: a BF16 tensor (FP32 in the interpreter)."""
    if INTERPRET:
        u = x.to(tl.float32).to(tl.uint32, bitcast=True)
        r = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
        r = tl.where((u & 0x7FFFFFFF) > 0x7F800000, u, r)  # a NaN's payload would carry into the sign
        return r.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):
    """FP32 that carries BF16 values. In pairs: the compiler converts one at a time, at the rate of exp2."""
    if INTERPRET:
        return narrow(x)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def add_bf16(x, y):
    """bf16(x + y) of BF16 tensors, two at a time: one rounding of the exact sum, which FP32 then BF16 equals too."""
    if INTERPRET:
        return narrow(x + y)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }",
            "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def round_fp8(x, FORMAT: tl.constexpr):
    """x >= 0 to FP8, nearest even, saturating: FP32 that carries the value. Adding and taking away `step * 1.5 * 2^23`
    rounds to a multiple of the subnormal step."""
    E4M3: tl.constexpr = FORMAT == "fp8_e4m3"
    DROP: tl.constexpr = 20 if E4M3 else 21  # significand bits of FP32 that the format lacks
    LARGEST: tl.constexpr = 448.0 if E4M3 else 57344.0
    NORMAL: tl.constexpr = 2.0**-6 if E4M3 else 2.0**-14
    MAGIC: tl.constexpr = 1.5 * 2.0**14 if E4M3 else 1.5 * 2.0**7
    x = tl.minimum(x, LARGEST)
    u = x.to(tl.uint32, bitcast=True)
    u = ((u + ((1 << (DROP - 1)) - 1) + ((u >> DROP) & 1)) >> DROP) << DROP
    return tl.where(x < NORMAL, (x + MAGIC) - MAGIC, u.to(tl.float32, bitcast=True))


@triton.jit
def random_words(p_rng, index):
    """Four words of Philox4x32-10 for each int64 index, as rounding.stochastic_round_bf16 draws them."""
    seed = (tl.load(p_rng) & 0xFFFFFFFF) | (tl.load(p_rng + 1) << 32)
    draw = tl.load(p_rng + 2)
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    draw_low, draw_high = (draw & 0xFFFFFFFF).to(tl.uint32), (draw >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, zero + draw_low, zero + draw_high)


@triton.jit
def round_stochastic(x, word):
    """BF16 up or down so that the mean is exact, by a random word: rounding.stochastic_round_bf16."""
    u = x.to(tl.uint32, bitcast=True)
    finite = (u & 0x7FFFFFFF) < 0x7F800000
    rounded = (u + (word & 0xFFFF)) & 0xFFFF0000
    return tl.where(finite, rounded, u).to(tl.float32, bitcast=True)


@triton.jit
def divide_rows(x, y):
    """x / y[:, None], correctly rounded: x times 1 / y, corrected by its exact remainder (Markstein). An element takes
    three instructions; a division takes fifteen, one after the other, together as long as several tiles of scores."""
    if INTERPRET:
        return tl.div_rn(x, y[:, None] + tl.zeros_like(x))
    else:
        r = tl.div_rn(tl.full(y.shape, 1.0, tl.float32), y)[:, None]
        y = y[:, None]
        q = x * r
        return tl.fma(tl.fma(-q, y, x), r, q)


@triton.jit
def tanh(x):
    """FP32, within 3 units of the last place: a polynomial where 1 - 2 / (e^2x + 1) would cancel."""
    x2 = x * x
    p = -0.00597207947 * x2 + 0.0208591968
    p = p * x2 - 0.0538015552
    p = p * x2 + 0.133321166
    p = p * x2 - 0.333333045
    far = 1 - 2 / (tl.exp2(tl.abs(x) * 2.885390081777927) + 1)
    return tl.where(x2 < 0.36, x + x * (x2 * p), tl.where(x < 0, -far, far))


@triton.jit
def operand(x, BF16: tl.constexpr):
    """A loaded tile as the products read it. FP32 operands that are stored in BF16 stay so: the values are equal."""
    if BF16:
        return narrow(x)
    elif INTERPRET or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def dot(x, y, acc, DOTS: tl.constexpr):
    """acc + x y with FP32 accumulation; acc may be None. FP32 means FP32: never plain TF32.

    Where one side is BF16, the FP32 side is cut into three BF16 parts, which hold all its 24 bits: products stay exact.
    """
    if x.dtype == y.dtype:
        return tl.dot(x, y, acc, input_precision=DOTS)
    elif DOTS == "ieee":
        return tl.dot(x.to(tl.float32), y.to(tl.float32), acc, input_precision="ieee")
    elif x.dtype == tl.float32:
        x0 = x.to(tl.bfloat16)
        x = x - x0.to(tl.float32)
        x1 = x.to(tl.bfloat16)
        acc = tl.dot((x - x1.to(tl.float32)).to(tl.bfloat16), y, acc)
        acc = tl.dot(x1, y, acc)
        return tl.dot(x0, y, acc)
    else:
        y0 = y.to(tl.bfloat16)
        y = y - y0.to(tl.float32)
        y1 = y.to(tl.bfloat16)
        acc = tl.dot(x, (y - y1.to(tl.float32)).to(tl.bfloat16), acc)
        acc = tl.dot(x, y1, acc)
        return tl.dot(x, y0, acc)


@triton.jit
def load_rows(p, start, stride, T, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHECK: tl.constexpr):
    """b (ROWS, DP): tokens start.. of the head that p points to, zeros past T (where CHECK) and past D."""
    r, d = tl.arange(0, ROWS), tl.arange(0, DP)
    p = p + tl.cast(start, tl.int64) * stride + (r[:, None] * stride + d[None, :])
    if CHECK and D != DP:
        return tl.load(p, mask=(start + r < T)[:, None] & (d < D)[None, :], other=0.0)
    elif CHECK:
        return tl.load(p, mask=(start + r < T)[:, None], other=0.0)
    elif D != DP:
        return tl.load(p, mask=(d < D)[None, :] & (r >= 0)[:, None], other=0.0)
    else:
        return tl.load(p)


@triton.jit
def load_tile(p, d, token, column, start, stride, T, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
              CHECK: tl.constexpr, TMA: tl.constexpr):
    """As `load_rows`, or by the copy engine from d, a descriptor of the (B T, H D) matrix in which the head begins at
    (token, column)."""
    if TMA:
        return d.load([token + start, column])
    else:
        return load_rows(p, start, stride, T, ROWS, D, DP, CHECK)


@triton.jit
def store_rows(p, x, start, stride, T, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    r, d = tl.arange(0, ROWS), tl.arange(0, DP)
    p = p + tl.cast(start, tl.int64) * stride + (r[:, None] * stride + d[None, :])
    tl.store(p, x.to(p.dtype.element_ty), mask=(start + r < T)[:, None] & (d < D)[None, :])


@triton.jit
def assign(blocks, heads, GROUP):
    """(block, head) of this program: heads in groups whose K and V fit in the L2 cache, all heads of a group at one
    block before the next block, so that callers can run long blocks first and leave short ones for the tail."""
    pid = tl.program_id(0)
    group = pid // (GROUP * blocks)
    first = group * GROUP
    size = tl.minimum(heads - first, GROUP)
    rest = pid - first * blocks
    return rest // size, first + rest % size
