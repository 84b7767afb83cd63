"""Kernels around helpers of attention/tiles.py: one of every element, one of a product of two tiles.

In a file of their own, as Triton needs the source."""

import triton
import triton.language as tl

from attention import tiles


@triton.jit
def elementwise(p_x, p_out, n, HELPER: tl.constexpr, ARGUMENT: tl.constexpr = ""):
    for start in range(0, n, 1024):
        i = start + tl.arange(0, 1024)
        x = tl.load(p_x + i, mask=i < n, other=0.0)
        if HELPER == "round_bf16":
            y = tiles.round_bf16(x)
        elif HELPER == "narrow":
            y = tiles.narrow(x).to(tl.float32)
        elif HELPER == "round_fp8":
            y = tiles.round_fp8(x, ARGUMENT)
        elif HELPER == "add_bf16":
            y = tiles.add_bf16(x, x * ARGUMENT)
        elif HELPER == "large":
            y, _ = tiles.split_tf32(x)
        elif HELPER == "small":
            _, y = tiles.split_tf32(x)
        else:
            y = tiles.tanh(x)
        tl.store(p_out + i, y, mask=i < n)


@triton.jit
def product(p_x, p_y, p_acc, p_out, N: tl.constexpr, DOTS: tl.constexpr, COMPUTED: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    acc = tl.load(p_acc + i) if p_acc is not None else None
    tl.store(p_out + i, tiles.dot(tl.load(p_x + i), tl.load(p_y + i), acc, DOTS, COMPUTED))
