"""Cross-entropy of a linear head, a chunk of tokens at a time: the (tokens, vocabulary) logits never exist at once.

With the gradient of a mean known but for one factor, forward makes it too: d loss / d logits of a chunk takes the place
of its logits, is multiplied into dX and dW, and is gone. Backward multiplies both by the factor. So nothing is computed
twice, and a chunk's logits are the only ones in memory, in the format of autocast; FP32 exists in registers alone.

What is rounded is what autocast rounds on the plain path: logits and d loss / d logits to BF16 (FP16), dX to BF16. Two
things differ. dW is summed in FP32 over all chunks, where the plain path rounds it to BF16. And d loss / d logits is
rounded before it is multiplied by 1 / tokens and whatever else scales the loss: the same bits where that is a power of
two, and in FP16 no probability is lost below its range for want of a loss scale.

Opaque to torch.compile, like attention: compiled and eager runs compute the same.
"""

import torch
from torch import Tensor

IGNORED = -1  # a target that does not count


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, softcap: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats of softmax(x W^T) against the targets, FP32 (float64 for float64 inputs).

    x: (..., C); weight: (V, C); targets: (...) int64 in 0 .. V - 1, or -1 for a token that is left out of the mean.
    chunk: tokens whose logits exist at a time. softcap c: logits are c tanh(logits / c); 0 is off. Products follow
    autocast. A mean over no token is NaN, as torch's is.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    loss, _, _, _ = _op(x.flatten(0, -2), weight, targets.flatten(), dtype, chunk, softcap, torch.is_grad_enabled())
    return loss


@torch.library.custom_op("lpattn::linear_cross_entropy", mutates_args=())
def _op(x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, chunk: int, softcap: float,
        grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss; without the factor 1 / count: dx (N, C) in `dtype` and dw (V, C) in FP32, both empty unless `grad`; and
    count, the number of targets that count."""
    acc = torch.promote_types(dtype, torch.float32)
    rows = softmax_gradient_triton if x.is_cuda else softmax_gradient
    with torch.autocast(x.device.type, enabled=False):
        w, losses = weight.to(dtype), torch.empty(x.shape[0], dtype=acc, device=x.device)
        dx = x.new_empty(x.shape if grad else 0, dtype=dtype)
        dw = w.new_zeros(w.shape if grad else 0, dtype=acc)
        for at in range(0, x.shape[0], chunk):
            part = slice(at, at + chunk)
            xs = x[part].to(dtype)
            logits = xs @ w.t()
            losses[part] = rows(logits, targets[part], softcap, grad)
            if grad:
                torch.mm(logits, w, out=dx[part])
                _add_product(dw, logits.t(), xs)
    count = (targets != IGNORED).sum().to(acc)
    return losses.sum() / count, dx, dw, count


@_op.register_fake
def _(x, weight, targets, dtype, chunk, softcap, grad):
    acc = torch.promote_types(dtype, torch.float32)
    return (x.new_empty((), dtype=acc), x.new_empty(x.shape if grad else 0, dtype=dtype),
            weight.new_empty(weight.shape if grad else 0, dtype=acc), x.new_empty((), dtype=acc))


def _setup(ctx, inputs, output):
    x, weight, *_ = inputs
    _, dx, dw, count = output
    ctx.save_for_backward(dx, dw, count)
    ctx.dtypes = x.dtype, weight.dtype
    ctx.mark_non_differentiable(dx, dw, count)
    ctx.set_materialize_grads(False)  # or the backward pass begins by filling gradients of dx and dw with zeros


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 7
    dx, dw, count = ctx.saved_tensors
    scale = grad / count
    x, weight = ctx.dtypes  # first the format, usually FP32, then the factor
    return dx.to(x) * scale, dw.to(weight) * scale, None, None, None, None, None


_op.register_autograd(_backward, setup_context=_setup)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, summed in the format of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # products of BF16 or FP16 values are exact in FP32
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def softmax_gradient(logits: Tensor, targets: Tensor, softcap: float, grad: bool) -> Tensor:
    """Cross-entropy (n,) of each row of logits (n, V); if `grad`, its gradient in their place. FP32, rounded once."""
    s = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    counts, at = targets[:, None] != IGNORED, targets.clamp_min(0)[:, None]
    losses = torch.where(counts, -s.log_softmax(-1).gather(-1, at), 0)
    if grad:
        p = s.softmax(-1)
        p.scatter_add_(-1, at, torch.full_like(losses, -1))
        if softcap:
            p *= 1 - (s / softcap).square_()
        logits.copy_(torch.where(counts, p, 0))
    return losses[:, 0]


def softmax_gradient_triton(logits: Tensor, targets: Tensor, softcap: float, grad: bool) -> Tensor:
    """As `softmax_gradient`, reading each row twice, the second time from the cache, and writing it once."""
    from loss_kernel import BLOCK, WARPS, softmax_gradient_kernel

    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    softmax_gradient_kernel[(logits.shape[0],)](logits, targets, losses, logits.stride(0), logits.shape[1],
                                                SOFTCAP=softcap, GRAD=grad, BLOCK=BLOCK, num_warps=WARPS)
    return losses
