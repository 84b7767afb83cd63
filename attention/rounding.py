"""Rounding to the formats of arXiv 2510.04212, and the bits of a value for a reader.

A rounded value stays in the tensor it came in: "BF16 in float32" is a float32 tensor whose values BF16 can hold. The
casts here are for eager code (a compiler may fuse a pair of casts away; the custom operators are opaque to it).
Imports torch alone.
"""

import struct

import torch
from torch import Tensor

FP8 = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}  # format, largest value
FORMATS = ("bf16", "fp32", *FP8)
MASK32 = 0xFFFFFFFF
PHILOX_A, PHILOX_B = 0xD2511F53, 0xCD9E8D57  # multipliers of Philox4x32 (Salmon et al. 2011, Random123)
PHILOX_KEY_A, PHILOX_KEY_B = 0x9E3779B9, 0xBB67AE85

# Paper section 3.3.2: the running O and the P V that is added to it, of one token and feature. The first value carries
# a residual below BF16's last place, which turns a tie into a round away from zero; without it the same sum goes the
# other way.
PAPER_ADDITION = (-2.4071154594421387, -2.296875)
PAPER_TIE = (-2.40625, -2.296875)


def round_bf16(x: Tensor) -> Tensor:
    """x rounded once to BF16 (nearest, ties to even), in x's own dtype: float32, float64 or bfloat16.

    Overflow gives inf, NaN stays NaN. Errors: ValueError for another dtype.
    """
    if x.dtype == torch.bfloat16:
        return x
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"BF16 values travel in float32, float64 or bfloat16, not in {x.dtype}")
    return _to_float32(x).bfloat16().to(x.dtype)


def round_to(x: Tensor, format: str) -> Tensor:
    """x rounded once to bf16, fp32, fp8_e4m3 or fp8_e5m2 (nearest even), in x's own dtype.

    The FP8 formats saturate at 448 and 57344, inf too: e4m3 has no inf, and a cast would make it NaN.
    Errors: ValueError for another format.
    """
    if format == "bf16":
        return round_bf16(x)
    if format == "fp32":
        return x.to(torch.float32).to(x.dtype)
    if format in FP8:
        dtype, largest = FP8[format]
        return _to_float32(x).clamp(-largest, largest).to(dtype).to(x.dtype)
    raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")


def stochastic_round_bf16(x: Tensor, rng: Tensor, index: Tensor | None = None, word: int = 0) -> Tensor:
    """x rounded to one of its two BF16 neighbours with probabilities that make the mean exact, in x's own dtype.

    x: any shape; float64 is rounded to float32 first. rng: int64 (3,) = seed, layer, draw. The element with
    index i (row-major, or int64 of x's shape) takes one word r, the first, of Philox4x32-10 under key (seed, layer) and
    counter (i, draw), each of the latter as two 32-bit words, low first: bits(x) + (r mod 2^16) with the low half
    cleared. Hence a value depends on its position alone, not on device, layout or launch. Inf and NaN stay.
    """
    seed, layer, draw = rng.to(x.device).unbind()
    index = torch.arange(x.numel(), device=x.device).view(x.shape) if index is None else index
    counter = (index & MASK32, index >> 32, draw & MASK32, (draw >> 32) & MASK32)
    word = philox(counter, (seed & MASK32, layer & MASK32))[word]
    single = x.to(torch.float32).contiguous()
    u = single.view(torch.int32).to(torch.int64) + (word & 0xFFFF)
    return torch.where(single.isfinite(), _from_bits(u & 0xFFFF0000), single).to(x.dtype)


def philox(counter: tuple, key: tuple, rounds: int = 10) -> tuple:
    """The four words of Philox4x32, all of them int64 tensors that hold unsigned 32-bit numbers.

    A product wraps around in int64, which keeps its bits; the masks make its halves unsigned again.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        left, right = c0 * PHILOX_A, c2 * PHILOX_B
        c0, c1 = ((right >> 32) & MASK32) ^ c1 ^ k0, right & MASK32
        c2, c3 = ((left >> 32) & MASK32) ^ c3 ^ k1, left & MASK32
        k0, k1 = (k0 + PHILOX_KEY_A) & MASK32, (k1 + PHILOX_KEY_B) & MASK32
    return c0, c1, c2, c3


def _to_float32(x: Tensor) -> Tensor:
    """float64 to float32 by rounding to odd, so that a later rounding to a shorter format is as if done at once.

    Plain float64 -> float32 -> BF16 rounds twice: 1 + 2^-8 + 2^-40 would become a tie and go down.
    """
    if x.dtype != torch.float64:
        return x.to(torch.float32)
    near = x.to(torch.float32).contiguous()
    back = near.to(torch.float64)
    u = near.view(torch.int32)
    odd = (u - (back.abs() > x.abs()).to(torch.int32)) | 1  # towards zero first; sign and size are separate fields
    return torch.where((back == x) | x.isnan(), near, odd.view(torch.float32))


def _from_bits(u: Tensor) -> Tensor:
    """float32 from unsigned 32-bit patterns in int64."""
    return torch.where(u >= 1 << 31, u - (1 << 32), u).to(torch.int32).view(torch.float32)


def bits(x: float, format: str = "fp32") -> str:
    """Sign, exponent and significand fields of one value: "1 10000000 00110100000111001011110".

    format "bf16" shows the upper half of the FP32 pattern, so a value BF16 cannot hold is cut, not rounded.
    """
    pattern = f"{struct.unpack('>I', struct.pack('>f', float(x)))[0]:032b}"
    return f"{pattern[0]} {pattern[1:9]} {pattern[9 : 32 if format == 'fp32' else 16]}"


def explain_addition(a: float, b: float) -> str:
    """How BF16(a + b) comes about, line by line: alignment, carry, guard and sticky bits, rounding (paper section 3.3).

    a, b: values FP32 can hold, of one sign, with a normal finite sum. Errors: ValueError otherwise.
    """
    values = torch.tensor([a, b], dtype=torch.float64)
    total = values.sum()
    if not torch.equal(round_to(values, "fp32"), values) or a * b <= 0 or not 2.0**-126 <= abs(total) < 2.0**127:
        raise ValueError(f"explain_addition takes two FP32 values of one sign with a normal sum, got {a} and {b}")
    single = total.to(torch.float32)
    rounded = round_bf16(single).item()
    ea, eb, es = (int(torch.frexp(t).exponent) - 1 for t in (*values, single))
    upper, lower = bits(single.item(), "bf16"), bits(single.item()).split()[2][7:]
    guard, sticky, odd = lower[0] == "1", "1" in lower[1:], upper[-1] == "1"
    away = guard and (sticky or odd)
    reason = ("a guard bit and a sticky bit: more than half, away from zero" if guard and sticky else
              f"a guard bit alone: a tie, to the even neighbour, {'away from' if odd else 'towards'} zero" if guard else
              "no guard bit: less than half, towards zero")
    rows = [("a", a, bits(a)), ("b", b, bits(b)), ("a + b in FP32", single.item(), bits(single.item())),
            ("kept by BF16", None, upper), ("BF16(a + b)", rounded, bits(rounded, "bf16"))]
    lines = [f"{name:<14}{pattern:<36}{'' if value is None else repr(value)}".rstrip() for name, value, pattern in rows]
    lines[2:2] = [f"  the smaller operand is shifted right by {abs(ea - eb)} to align exponents {ea} and {eb}",
                  f"  the sum carries: shifted right by 1, exponent {es}" if es > max(ea, eb) else
                  "  the sum does not carry"]
    lines[6:6] = [f"  cut off: guard bit {lower[0]}, sticky bits {lower[1:]}",
                  f"  {reason}{', 1 is added to the last kept bit' if away else ''}"]
    return "\n".join([*lines, f"error         {rounded - single.item()!r}"])
