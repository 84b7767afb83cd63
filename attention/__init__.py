"""Pluggable causal attention: `attend(q, k, v, AttentionSpec(backend="flash_bf16"))`.

A new backend is one function run(q, k, v, rng, spec_key, want_stats, counted) -> (o, lse, ties, row_max), as `sdpa` of
standard.py is one for an attention that autograd differentiates and `op.differentiable` makes one of a forward and a
backward pass; one `case` below, before those of the kernels; a preset in spec.py, and its name in NO_SWITCHES there if
it reads no switch; and its name in config.py's Backend.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attention.layers import changed, layer_specs, same_numerics, specs_of
from attention.op import check_inputs, smooth_keys
from attention.spec import BACKENDS, NO_SWITCHES, AttentionSpec

__all__ = ["BACKENDS", "AttentionLayer", "AttentionSpec", "RowStats", "attend", "changed", "kernel_for", "layer_specs",
           "same_numerics", "specs_of"]


class RowStats(NamedTuple):
    """What a monitor needs of each score row.

    ties: (B, H, T) int32, or of fewer sequences, where that was asked for: the largest count in any key tile of
        unmasked scores within `epsilon` of that tile's row maximum, which is what the stabilizer sees (paper Algorithm
        3, rs); a row is tied where ties > 1.
    row_max: (B, H, T) FP32, the maximum of S over the whole row, before any stabilizer.
    """

    ties: Tensor
    row_max: Tensor


def kernel_for(spec: AttentionSpec, device: torch.device | str) -> str:
    """Which code computes this spec on this device: "torch", "triton" or "emulated".

    Errors: ValueError where kernel=triton is asked for without a GPU (or the interpreter).
    """
    if spec.backend in NO_SWITCHES:
        return "torch"
    if spec.kernel != "auto":
        if spec.kernel == "triton":
            from attention import flash

            flash.check_available(torch.device(device))
        return spec.kernel
    return "triton" if torch.device(device).type == "cuda" else "emulated"


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, rng: Tensor | None = None,
           stats: bool = False, counted: int | None = None) -> Tensor | tuple[Tensor, RowStats]:
    """Causal attention O = softmax(Q K^T / sqrt(D)) V with the roundings of `spec`.

    q, k, v: (B, H, T, D), any strides; BF16 values may travel in float32 tensors (they do on the CPU).
    rng: int64 (3,) = seed, layer, draw, for stochastic rounding; None is (0, 0, 0).
    counted: the sequences, from the first, whose ties stats=True counts, which costs time; None is all, and row_max is
        of all sequences anyway.
    Returns (B, H, T, D): q's dtype, or float32 where the spec keeps O in FP32; with stats=True also RowStats.
    Errors: ValueError for shapes, dtypes and devices it does not accept, the same for every backend.
    """
    check_inputs(q, k, v, spec)
    if counted is not None and not (isinstance(counted, int) and counted >= 0):
        raise ValueError(f"counted={counted!r} must be a number of sequences, or None for all of them")
    match spec.backend, kernel_for(spec, q.device):
        case "sdpa", _:
            from attention.standard import sdpa as run
        case "standard", _:
            from attention.standard import standard as run
        case _, "emulated":
            from attention.emulated import emulated as run
        case _, "triton":
            from attention.flash import flash as run
    if rng is None:
        rng = torch.zeros(3, dtype=torch.int64, device=q.device)
    counted = -1 if counted is None else min(counted, q.shape[0])
    k = smooth_keys(k, spec.smooth_k)
    o, _, ties, row_max, *_ = run(q, k, v, rng, spec.key, stats, counted)
    return (o, RowStats(ties, row_max)) if stats else o


class AttentionLayer(nn.Module):
    """The attention of one layer as a callable, so that a model knows no backend.

    `rng` is seed, layer and draw of stochastic rounding; the training loop sets the draw before each micro-batch
    to a number that does not depend on the world size. It is derived, so it is not part of the state dict.
    """

    def __init__(self, spec: AttentionSpec, layer: int, seed: int = 0):
        super().__init__()
        self.spec = spec
        self.register_buffer("rng", torch.tensor([seed, layer, 0], dtype=torch.int64), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, stats: bool = False, counted: int | None = None):
        return attend(q, k, v, self.spec, self.rng, stats, counted)

    def extra_repr(self) -> str:
        return self.spec.describe()
