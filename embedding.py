"""Embedding lookup whose gradient torch.compile leaves to torch's own kernel.

The compiler turns the gradient into an accumulating index_put. With deterministic algorithms that becomes a kernel that
adds the gradients of one token's positions one after the other, and the commonest token of a text has a twentieth of
all positions. torch's embedding kernel sorts too, and sums in parts: as deterministic, without that tail.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("lpattn::embedding", mutates_args=())
def embedding(idx: Tensor, weight: Tensor) -> Tensor:
    """weight[idx]. idx: (...) int64; weight: (V, C); returns (..., C)."""
    return F.embedding(idx, weight)


@embedding.register_fake
def _(idx, weight):
    return weight.new_empty((*idx.shape, weight.shape[1]))


@torch.library.custom_op("lpattn::embedding_backward", mutates_args=())
def _backward(grad: Tensor, idx: Tensor, rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, idx, rows, -1, False)


@_backward.register_fake
def _(grad, idx, rows):
    return grad.new_empty((rows, grad.shape[-1]))


def _setup(ctx, inputs, output):
    idx, weight = inputs
    ctx.save_for_backward(idx)
    ctx.rows = weight.shape[0]


embedding.register_autograd(lambda ctx, grad: (None, _backward(grad, *ctx.saved_tensors, ctx.rows)),
                            setup_context=_setup)
