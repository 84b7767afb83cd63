"""Runs the Triton kernels on the CPU in a process of its own.

Triton decides once, when it is imported, whether it interprets; a worker keeps that decision out of the process in
which other tests compile models and expect kernel=triton to be refused without a GPU.
"""

import concurrent.futures
import multiprocessing
import os


def start() -> concurrent.futures.ProcessPoolExecutor:
    """One worker that interprets. It inherits the environment of the moment it is spawned."""
    pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool.submit(_settle).result()
    finally:
        del os.environ["TRITON_INTERPRET"]
    return pool


def _settle() -> None:
    import torch

    from determinism import settle_math

    settle_math()
    torch.set_num_threads(1)


def run(which: str, q, k, v, do, rng, spec_key: str, stats: bool, counted: int = -1) -> dict:
    """Forward and backward of "flash" or "emulated": o, lse, ties, row_max, rest, dq, dk, dv."""
    import torch

    from attention.emulated import emulated
    from attention.flash import flash

    xs = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse, ties, row_max, rest = {"flash": flash, "emulated": emulated}[which](*xs, rng, spec_key, stats, counted)
    dq, dk, dv = torch.autograd.grad(o, xs, do)
    return {"o": o.detach(), "lse": lse, "ties": ties, "row_max": row_max, "rest": rest, "dq": dq, "dk": dk, "dv": dv}


def run_with_descriptors(*args) -> dict:
    """`run` of "flash", every load of Q, K, V and dO by a descriptor."""
    from unittest.mock import patch

    from attention import flash

    with patch.object(flash, "fitted", lambda tile, *tensors: tile._replace(tma=True)):
        return run("flash", *args, False)


def call(name: str, *args):
    """A function of attention.flash by name."""
    import attention.flash

    return getattr(attention.flash, name)(*args)


def kernel_helper(name: str, x, *args):
    """A rounding or math helper of tiles.py applied to a float32 tensor, through one small kernel."""
    import torch
    from interpreted_helpers import elementwise

    out = torch.empty_like(x)
    elementwise[(1,)](x, out, x.numel(), name, *args)
    return out


def product(x, y, acc, *switches):
    """tiles.dot of square float32 tensors; acc may be None."""
    import torch
    from interpreted_helpers import product

    out = torch.empty_like(x)
    product[(1,)](x, y, acc, out, len(x), *switches)
    return out
