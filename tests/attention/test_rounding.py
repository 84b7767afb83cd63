"""Rounding, proved bit by bit: against torch's casts, against exact arithmetic, against published vectors."""

import pytest
import torch

from attention import rounding
from attention.rounding import (
    bits,
    explain_addition,
    philox,
    round_bf16,
    round_to,
    stochastic_round_bf16,
)

LOWER_HALVES = [0, 1, 2, 0x3FFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFE, 0xFFFF]  # 0x8000 is a tie


def from_pattern(u):
    """float32 values with these unsigned 32-bit patterns."""
    return torch.where(u >= 1 << 31, u - (1 << 32), u).to(torch.int32).view(torch.float32)


def round_bf16_bits(x):
    """By integer arithmetic: 0x7FFF plus the last kept bit carries into the kept half exactly where nearest-even rounds
    away from zero. A NaN's payload would carry into the sign."""
    u = x.view(torch.int32).to(torch.int64)
    u = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
    return torch.where(x.isnan(), x, from_pattern(u))


def same(a, b):
    """Equal bit for bit where neither is NaN (so -0 is not 0), NaN at the same places."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan].view(torch.int32), b[~nan].view(torch.int32))


def rng(seed=0, layer=0, draw=0):
    return torch.tensor([seed, layer, draw], dtype=torch.int64)


@pytest.mark.parametrize("lower", [*LOWER_HALVES, "random"])
def test_all_upper_halves_round_as_torch_does(lower):
    upper = torch.arange(1 << 16, dtype=torch.int64)
    if lower == "random":
        lower = torch.randint(1 << 16, upper.shape, generator=torch.Generator().manual_seed(0))
    x = from_pattern((upper << 16) | lower)
    expected = x.bfloat16().float()
    assert x.isnan().any() and x.isinf().sum() <= 2
    assert same(round_bf16(x), expected), "the cast in use differs from tensor.bfloat16()"
    assert same(round_bf16_bits(x), expected), "the integer arithmetic differs from tensor.bfloat16()"
    assert same(round_bf16(x.double()).float(), expected), "float64 that holds FP32 values must round alike"
    assert same(round_bf16(x.bfloat16()).float(), expected), "a BF16 tensor is rounded already"


def test_float64_is_rounded_once():
    gen = torch.Generator().manual_seed(1)
    coarse = torch.randint(-255, 256, (20_000,), generator=gen).double()
    ties = coarse + torch.where(coarse < 0, -0.5, 0.5)  # halves of the last place, up to 2^-9 relative
    normal = torch.randn(20_000, generator=gen, dtype=torch.float64)
    x = torch.cat([ties, ties * (1 + 2.0**-40), ties * (1 - 2.0**-40), normal])
    x = x * 2.0 ** torch.randint(-100, 100, x.shape, generator=gen)
    mantissa, exponent = torch.frexp(x)
    expected = torch.ldexp((mantissa * 256).round(), exponent - 8)  # torch.round is to even; exact in float64
    assert torch.equal(round_bf16(x), expected)
    twice = (x.bfloat16().double() != expected).double().mean().item()
    assert twice > 0.05, f"the case must be one that rounding twice gets wrong, but only {twice:.2%} differ"
    special = torch.tensor([float("inf"), -float("inf"), 1e300, -1e300, 1e-320, 0.0, -0.0], dtype=torch.float64)
    assert round_bf16(special).tolist() == [float("inf"), -float("inf"), float("inf"), -float("inf"), 0.0, 0.0, 0.0]
    assert round_bf16(torch.tensor(float("nan"), dtype=torch.float64)).isnan()
    smallest = torch.tensor([2.0**-134 * (1 + 2**-40), 2.0**-134], dtype=torch.float64)  # half the least subnormal
    assert round_bf16(smallest).tolist() == [2.0**-133, 0.0]


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp8_goes_to_the_nearest_and_saturates(format, dtype):
    code = torch.arange(128, dtype=torch.uint8)  # the non-negative half, ascending
    target, largest = rounding.FP8[format]
    grid = code.view(target).to(torch.float64)
    grid = grid[grid.isfinite()]
    assert grid[-1] == largest
    middle = (grid[1:] + grid[:-1]) / 2
    even = torch.where(torch.arange(len(middle)) % 2 == 0, grid[:-1], grid[1:])
    above, below = middle * (1 + 2**-20), middle * (1 - 2**-20)
    for x, expected in [(grid, grid), (middle, even), (above, grid[1:]), (below, grid[:-1])]:
        for sign in (1, -1):
            got = round_to((sign * x).to(dtype), format)
            assert got.dtype == dtype and torch.equal(got.double(), sign * expected)
    out = round_to(torch.tensor([largest * 1.2, 1e30, float("inf"), -float("inf"), float("nan")], dtype=dtype), format)
    assert out[:4].tolist() == [largest, largest, largest, -largest] and out[4].isnan()


def test_round_to_knows_its_formats():
    x = torch.tensor([1 + 2.0**-30, -3.0], dtype=torch.float64)
    assert round_to(x, "fp32").tolist() == [1.0, -3.0] and round_to(x, "fp32").dtype == torch.float64
    assert torch.equal(round_to(x, "bf16"), round_bf16(x))
    with pytest.raises(ValueError, match="format 'fp4' is not one of bf16, fp32, fp8_e4m3, fp8_e5m2"):
        round_to(x, "fp4")
    with pytest.raises(ValueError, match="not in torch"):
        round_bf16(x.half())


PHILOX_VECTORS = [  # Random123's kat_vectors: counter, key, result
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_VECTORS)
def test_philox_known_vectors(counter, key, expected):
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, words)) == expected


def test_stochastic_rounding_is_the_documented_function_of_position():
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(2))
    seed, layer, draw = 7 + (3 << 32), 5, 11 + (1 << 32)  # of the seed the low 32 bits count, of the draw all 64
    index = torch.arange(x.numel()).view(x.shape)
    counter = (index, torch.zeros_like(index), torch.tensor(11), torch.tensor(1))
    word = philox(counter, (torch.tensor(7), torch.tensor(5)))[0]
    pattern = x.view(torch.int32).long() & 0xFFFFFFFF
    expected = from_pattern((pattern + (word & 0xFFFF)) & 0xFFFF0000)
    assert torch.equal(stochastic_round_bf16(x, rng(seed, layer, draw)), expected)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(stochastic_round_bf16(transposed, rng(seed, layer, draw)), expected), "layout must not matter"
    assert torch.equal(stochastic_round_bf16(x.double(), rng(seed, layer, draw)), expected.double())


def test_stochastic_rounding_is_reproducible_and_varies():
    x = torch.rand(4096, generator=torch.Generator().manual_seed(3)) + 1
    base = stochastic_round_bf16(x, rng(1, 2, 3))
    assert torch.equal(base, stochastic_round_bf16(x, rng(1, 2, 3)))
    for other in (rng(2, 2, 3), rng(1, 3, 3), rng(1, 2, 4), rng(1, 2, 3 + (1 << 32)), rng(-1, 2, 3)):
        share = (stochastic_round_bf16(x, other) != base).float().mean().item()
        assert 0.25 < share < 0.42, f"{other.tolist()}: {share:.3f} of the values differ, 1/3 is expected"


@pytest.mark.parametrize("fraction", [1 / 64, 0.25, 0.5, 0.9])
def test_stochastic_rounding_is_unbiased(fraction):
    n, step = 1 << 17, 2.0**-7
    x = torch.full((n,), -(1 + fraction * step))
    y = stochastic_round_bf16(x, rng(5))
    assert set(y.unique().tolist()) == {-1.0, -(1 + step)}, "only the two neighbours may come out"
    bias = (y.double() - x.double()).mean().item()
    error = step * (fraction * (1 - fraction) / n) ** 0.5
    nearest = (round_bf16(x) - x).double().mean().item()
    assert abs(bias) < 4 * error, f"signed mean error {bias:.2e}, standard error {error:.2e}"
    assert abs(nearest) > 20 * error, f"nearest-even is biased here ({nearest:.2e}), or the case shows nothing"


def test_stochastic_rounding_keeps_what_bf16_holds_and_what_is_not_finite():
    x = torch.tensor([0.0, -0.0, 1.5, -2.296875, float("inf"), -float("inf")])
    assert same(stochastic_round_bf16(x, rng(9)), x)
    assert stochastic_round_bf16(torch.full((64,), float("nan")), rng(9)).isnan().all()


def test_the_papers_addition():
    a, b = (torch.tensor(t) for t in rounding.PAPER_ADDITION)
    total = a + b
    assert total.item() == -4.703990459442139
    for rounded in (round_bf16(total), round_bf16_bits(total), total.bfloat16().float()):
        assert rounded.item() == -4.71875 and (rounded - total).item() == -0.014759540557861328
    tie = sum(torch.tensor(t) for t in rounding.PAPER_TIE)
    assert round_bf16(tie).item() == -4.6875 and round_bf16_bits(tie).item() == -4.6875
    assert bits(total.item()) == "1 10000001 00101101000011100010111"  # as printed in section 3.3.2
    assert bits(-4.71875, "bf16") == "1 10000001 0010111"


def test_explain_addition_shows_every_step():
    text = explain_addition(*rounding.PAPER_ADDITION)
    for part in ("1 10000001 00101101000011100010111", "the sum carries: shifted right by 1, exponent 2",
                 "guard bit 1, sticky bits 000011100010111", "away from zero, 1 is added", "-4.71875",
                 "error         -0.014759540557861328"):
        assert part in text, f"{part!r} is missing from\n{text}"
    tie = explain_addition(*rounding.PAPER_TIE)
    assert "a tie, to the even neighbour, towards zero" in tie and "-4.6875" in tie and "error         0.015625" in tie
    assert "no guard bit: less than half" in explain_addition(1.0, 2.0**-10)
    assert "shifted right by 10 to align" in explain_addition(1.0, 2.0**-10)
    assert "away from zero, 1 is added" in explain_addition(1.0 + 2**-7, 2.0**-8), "a tie beside an odd last place"
    for a, b in ((1.0, -1.0), (0.1, 0.2), (float("inf"), 1.0), (float("nan"), 1.0), (0.0, 1.0), (3e38, 3e38)):
        with pytest.raises(ValueError, match="two FP32 values of one sign"):
            explain_addition(a, b)
