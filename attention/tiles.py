"""What the Triton kernels are made of: roundings, products, loads and stores of tiles, and the order of programs.

The interpreter (TRITON_INTERPRET=1) has no BF16 arithmetic. There BF16 values travel in FP32 and are rounded on their
bits, under a compile-time flag that is on nowhere else.
"""

from collections import namedtuple

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
INVERSE = tl.constexpr(0xAF5EBF7F)  # 65537 / 127 modulo 2^32


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
    """bf16(bf16(x) + bf16(y)), FP32 that carries BF16 values. The sum of two is rounded once, which is what FP32 and
    then BF16 give too."""
    if INTERPRET:
        return narrow(narrow(x) + narrow(y))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x, y, one; cvt.rn.bf16x2.f32 x, $3, $2; cvt.rn.bf16x2.f32 y, $5, $4; mov.b32 one, 0x3F803F80; "
            "fma.rn.bf16x2 x, x, one, y; shl.b32 $0, x, 16; and.b32 $1, x, 0xffff0000; }",
            "=r,=r,r,r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=2)


# Two BF16 values in one register: entries of the left and of the right half of a tile's columns. One thread holds both,
# so halving and joining a tile move nothing and keep the order of a thread's entries, and with it that of its sums.

@triton.jit
def halves(x):
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def joined(left, right):
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def pack(x):
    """The halves of FP32 x, rounded to BF16 as by `narrow`: uint32."""
    left, right = halves(x)
    if INTERPRET:
        left, right = narrow(left).to(tl.uint32, bitcast=True), narrow(right).to(tl.uint32, bitcast=True)
        return (left >> 16) | right
    else:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [left, right], dtype=tl.uint32,
                                         is_pure=True, pack=1)


@triton.jit
def unpack(pairs):
    """FP32 that carries the BF16 values."""
    return joined((pairs << 16).to(tl.float32, bitcast=True), (pairs & 0xFFFF0000).to(tl.float32, bitcast=True))


@triton.jit
def larger_pair(x, y):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def max_of_pairs(pairs):
    """The largest value of each row. A maximum of three pairs is one instruction."""
    if INTERPRET:
        return tl.max(unpack(pairs), 1)
    else:
        most = tl.reduce(pairs, 1, larger_pair)
        return tl.maximum((most << 16).to(tl.float32, bitcast=True), (most & 0xFFFF0000).to(tl.float32, bitcast=True))


@triton.jit
def count_of_pairs(pairs, least):
    """How many values of each row are not below `least`, FP32. A comparison gives 0x3F80 = 127 * 128, 1.0 in BF16, in
    either half; the sum, L and R of them, is 127 * 128 (L + 65536 R) mod 2^32. Times 65537 / 127 mod 2^32 it is
    2^23 (L + R) + 128 L, of no more than 256 columns. Adding integers takes three at a time."""
    if INTERPRET:
        return tl.sum((unpack(pairs) >= least[:, None]).to(tl.int32), 1)
    else:
        u = least.to(tl.int32, bitcast=True)
        u = ((u + (~(u >> 31) & 0xFFFF)) >> 16).to(tl.uint32, bitcast=True)  # the next BF16 value that is not smaller
        least = (u & 0xFFFF) | (u << 16)
        found = tl.inline_asm_elementwise("set.ge.bf16x2.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, least[:, None]],
                                          dtype=tl.uint32, is_pure=True, pack=1)
        return ((tl.sum(found, 1) * INVERSE) >> 23).to(tl.int32)


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
def split_tf32(x):
    """FP32 x as its nearest value of TF32, 11 bits, and the rest: 2^12 of the last place of x at most, so that the
    tensor core, which cuts factors to TF32, takes one last place from it at most; rounding it would move it as far.
    NaN, Inf and what rounds to Inf stay: x - large is NaN or Inf, whatever the addition made of the bits."""
    large = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return large, x - large


@triton.jit
def in_order_of_registers(x, y):
    """x y is the same sum with each eight columns of x and rows of y in the order 0, 2, 4, 6, 1, 3, 5, 7. In that order
    the threads that computed x hold what a product of TF32 reads from them."""
    M: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    N: tl.constexpr = y.shape[1]
    x = tl.reshape(tl.permute(tl.reshape(x, (M, K // 8, 4, 2)), (0, 1, 3, 2)), (M, K))
    return x, tl.reshape(tl.permute(tl.reshape(y, (K // 8, 4, 2, N)), (0, 2, 1, 3)), (K, N))


@triton.jit
def dot(x, y, acc, DOTS: tl.constexpr, COMPUTED: tl.constexpr = False):
    """acc + x y with FP32 accumulation; acc may be None. FP32 means FP32: never plain TF32. COMPUTED: x was computed
    here, and not loaded.

    FP32 factors are cut into two TF32 parts each; the product of the small ones, 2^-22 of it at most, is left out. acc
    is added afterwards, because the tensor core rounds its sums towards zero, at every eight terms: an acc that passes
    through it three times a tile is off by 7 times as much. Triton's own "tf32x3" makes the same sums, and looks for
    NaN in every part besides. Where one side is BF16, the FP32 side is cut into three BF16 parts, which hold all its 24
    bits: products stay exact.
    """
    if x.dtype == y.dtype and x.dtype == tl.float32 and DOTS == "tf32x3":  # BF16 in the interpreter has DOTS "bf16"
        if COMPUTED:
            x, y = in_order_of_registers(x, y)
        x, x1 = split_tf32(x)
        y, y1 = split_tf32(y)
        xy = tl.dot(x, y1, tl.dot(x1, y, input_precision="tf32"), input_precision="tf32")
        xy = tl.dot(x, y, xy, input_precision="tf32")
        return xy if acc is None else acc + xy
    elif x.dtype == y.dtype:
        return tl.dot(x, y, acc, input_precision="ieee")
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


# One head of a (B, H, T, D) tensor: T rows from p on, `stride` elements apart. The copy engine loads by the descriptor
# of a (B T, H D) matrix, in which the head begins at (token, h sh). Triton turns constants in a tuple into tensors, and
# fails on None: sizes stay arguments, and p takes the place of a descriptor that there is not.
Matrix = namedtuple("Matrix", "p stride T descriptor token h sh")


@triton.jit
def matrix_of(b, h, T, p, d, sb, sh, st):
    p += tl.cast(b, tl.int64) * sb + tl.cast(h, tl.int64) * sh
    return Matrix(p, st, T, p if d is None else d, tl.cast(b, tl.int32) * T, tl.cast(h, tl.int32), sh)


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
def load_operand(x, start, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, EVEN: tl.constexpr,
                 TMA: tl.constexpr, BF16: tl.constexpr):
    """As `load_rows`, or by the copy engine (TMA), as the products read it."""
    if TMA:
        return operand(x.descriptor.load([x.token + start, x.h * x.sh]), BF16)
    else:
        return operand(load_rows(x.p, start, x.stride, x.T, ROWS, D, DP, not EVEN), BF16)


@triton.jit
def store_rows(p, x, start, stride, T, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """x (ROWS, DP) to tokens start.. of the head that p points to, in p's format; not past T, nor past D."""
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
