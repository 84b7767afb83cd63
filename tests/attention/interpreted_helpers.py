"""A kernel that applies one helper of attention/tiles.py to every element; its own file, as Triton needs a source."""

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
        else:
            y = tiles.tanh(x)
        tl.store(p_out + i, y, mask=i < n)
