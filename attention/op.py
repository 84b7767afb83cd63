"""A differentiable custom operator from a forward and a backward function.

Opaque to torch.compile on purpose: a compiler that fuses or drops a cast changes the very roundings this
project studies. So compiled and eager runs execute the same code, bit for bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from attention.spec import AttentionSpec, from_key

NOTHING = (0,)  # shape of a statistic that was not asked for
Three = tuple[Tensor, Tensor, Tensor]
Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def smooth_keys(k: Tensor, share: float) -> Tensor:
    """k (..., T, D) less a share of its mean over the tokens, in FP32 at least, in k's dtype; for 0 it is k itself."""
    if not share:
        return k
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    return (wide - share * wide.mean(-2, keepdim=True)).to(k.dtype)


def output_like(q: Tensor, fp32: bool) -> Tensor:
    """An empty (B, H, T, D) tensor laid out (B, T, H, D), so that joining the heads afterwards is a view."""
    B, H, T, D = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32) if fp32 else q.dtype
    return torch.empty(B, T, H, D, device=q.device, dtype=dtype).transpose(1, 2)


def rest_like(o: Tensor, spec: AttentionSpec) -> Tensor:
    """An empty BF16 tensor, laid out as O, for what its rounding leaves over: of shape (0,) if that is not kept."""
    return torch.empty_like(o if spec.keeps_rest else o.new_empty(NOTHING), dtype=torch.bfloat16)


def differentiable(name: str, forward: Callable, backward: Callable) -> Callable:
    """Registers `name` and returns op(q, k, v, rng, spec_key, want_stats, counted=-1) -> (o, lse, ties, row_max, rest).

    forward(q, k, v, rng, spec, want_stats, counted) -> o (B, H, T, D) as `output_like`; lse (B, H, T) FP32;
        ties (counted, H, T) int32 of the first sequences (-1 in op: of all) and row_max (B, H, T) FP32, or both of
        shape (0,) unless want_stats; rest as `rest_like`: O before its rounding less the stored O.
    backward(do, q, k, v, o, lse, spec, rest) -> dq, dk, dv, each as `output_like` in q's dtype; rest is None unless
        the spec keeps it.
    rng: int64 (3,) = seed, layer, draw; read only where something is rounded stochastically.
    """

    @torch.library.custom_op(f"{name}_forward", mutates_args=())
    def op(q: Tensor, k: Tensor, v: Tensor, rng: Tensor, spec: str, want_stats: bool, counted: int = -1) -> Five:
        return forward(q, k, v, rng, from_key(spec), want_stats, counted if counted >= 0 else q.shape[0])

    @op.register_fake
    def _(q, k, v, rng, spec, want_stats, counted=-1):
        B, H, T, _ = q.shape
        rows, tied = ((B, H, T), (counted if counted >= 0 else B, H, T)) if want_stats else (NOTHING, NOTHING)
        acc, o = torch.promote_types(q.dtype, torch.float32), output_like(q, from_key(spec).stores_fp32)
        return (o, q.new_empty((B, H, T), dtype=acc), q.new_empty(tied, dtype=torch.int32),
                q.new_empty(rows, dtype=acc), rest_like(o, from_key(spec)))

    @torch.library.custom_op(f"{name}_backward", mutates_args=())
    def op_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: str,
                    rest: Tensor | None = None) -> Three:
        return backward(do, q, k, v, o, lse, from_key(spec), rest)

    @op_backward.register_fake
    def _(do, q, k, v, o, lse, spec, rest=None):
        return output_like(q, False), output_like(q, False), output_like(q, False)

    def setup(ctx, inputs, output):
        q, k, v, _, ctx.spec, *_ = inputs
        o, lse, ties, row_max, rest = output
        ctx.save_for_backward(q, k, v, o, lse, *([rest] if from_key(ctx.spec).keeps_rest else []))
        ctx.mark_non_differentiable(lse, ties, row_max, rest)
        ctx.set_materialize_grads(False)  # or the backward pass begins by filling a gradient of L with zeros

    def grad(ctx, do, *_):
        if do is None:  # not even O has a gradient
            return (None,) * 7
        q, k, v, o, lse, *rest = ctx.saved_tensors
        return (*op_backward(do, q, k, v, o, lse, ctx.spec, *rest), None, None, None, None)

    op.register_autograd(grad, setup_context=setup)
    return op


def check_inputs(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
    """The one place that says what attention accepts, the same for every backend.

    Errors: ValueError with the value at fault.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be (B, H, T, D), got shape {tuple(x.shape)}")
        if x.shape != q.shape:
            raise ValueError(f"q, k and v must share one shape, got q {tuple(q.shape)} and {name} {tuple(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"q, k and v must share dtype and device, got q {q.dtype} on {q.device} and "
                             f"{name} {x.dtype} on {x.device}")
    if min(q.shape) == 0:
        raise ValueError(f"attention over an empty shape {tuple(q.shape)}: B, H, T and D must be at least 1")
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"attention takes float64, float32, bfloat16 or float16 tensors, got {q.dtype}")
    if q.dtype == torch.float16 and spec.rounds_bf16:
        raise ValueError(f"{spec.backend} rounds to BF16 but its inputs are float16; with dtype=float16 use "
                         "standard, sdpa or flash_fp32")
    if any(head >= q.shape[1] for head in spec.output_heads):
        raise ValueError(f"output_heads={spec.output_heads} names a head past the last of {q.shape[1]} heads")
