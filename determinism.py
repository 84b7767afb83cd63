"""Every seed and flag that decides whether two runs are the same run, one reason each."""

import os
import random

import numpy as np
import torch

_WORKSPACES = (":4096:8", ":16:8")  # the two values for which cuBLAS promises equal results on every call
_MASK = (1 << 64) - 1


def set_determinism(seed: int, deterministic: bool) -> None:
    """Seeds every generator and sets the precision and algorithm flags. Call once, before the first CUDA call.

    With `deterministic`, a run repeats bit for bit on the same machine and versions, or raises where an operation has
    no deterministic form. Without it, the fastest algorithms are allowed; precision is the same either way.
    Raises ValueError if cuBLAS can no longer be made deterministic.
    """
    if deterministic:
        _pin_cublas_workspace()
    settle_math()
    random.seed(seed)  # libraries that shuffle or name things
    np.random.seed(seed % (1 << 32))  # numpy takes 32 bits; our own draws never use its global generator
    torch.manual_seed(seed)  # initial weights; dropout is seeded again for every micro-batch, below

    # FP32 products in FP32. TF32 keeps 10 of 23 bits, which would round the high-precision arms behind their back.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    # On by default, these let cuBLAS sum the parts of a split product in BF16 or FP16: roundings outside attention, in
    # every linear layer, chosen by shape. A study of which BF16 rounding kills a run cannot have unnamed ones.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    # Benchmarking picks a kernel by timing, so two runs may pick differently.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = deterministic
    # Atomic sums (embedding backward, index_add, fused attention) are replaced, or raise where that is impossible.
    torch.use_deterministic_algorithms(deterministic)
    # On by default with the line above: it fills every new tensor with NaN first, a pass over memory for nothing here,
    # where each kernel writes all of its output.
    torch.utils.deterministic.fill_uninitialized_memory = False


def settle_math() -> None:
    """Has the CPU's math library make its first exponential and logarithm alone.

    Made by several threads at once, the first exponentials of a process came out wrong by 1.5e-4 of themselves in 3 of
    203 processes on two busy cores (torch 2.13.0+cpu), and in none of 87 after this.
    """
    one = torch.ones(1)
    for function in (torch.exp, torch.exp2, torch.log):
        function(one)


def seed_microbatch(seed: int, index: int) -> None:
    """Makes dropout a pure function of (seed, index), index = the global micro-batch number over steps and ranks.

    So neither a resume, nor an evaluation in between, nor the number of ranks changes a mask, and a checkpoint needs no
    generator state. Eager kernels and compiled graphs both read torch's default generators, on CPU and GPU; the masks
    of a compiled graph differ from eager ones, but repeat.
    """
    # splitmix64 of both: neighbouring indices get unrelated seeds, and (seed, index + 1) is not (seed + 1, index).
    mixed = _mix(_mix(seed & _MASK) ^ (index & _MASK))
    # Not torch.manual_seed: before CUDA starts, and so on a CPU for ever, it queues a stack trace at every call.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)  # of the current device, the one this rank trains on


def _mix(x: int) -> int:
    """The splitmix64 step (Steele, Lea, Flood, 2014): a bijection of 64-bit integers that spreads every bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _pin_cublas_workspace() -> None:
    """cuBLAS reads the variable when its first handle is made; with several streams sharing workspaces it may else
    choose another algorithm from one call to the next."""
    value = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if value is None and torch.cuda.is_initialized():
        raise ValueError("deterministic=True came after the first CUDA call, too late for cuBLAS; "
                         "set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment")
    if value is not None and value not in _WORKSPACES:
        raise ValueError(f"deterministic=True needs CUBLAS_WORKSPACE_CONFIG={' or '.join(_WORKSPACES)}, "
                         f"but the environment says {value!r}; unset it or use one of them")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
