"""Cheap measurements of a live model: tied rows and W_Q norms by layer and head, and the first non-finite head."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from attention import AttentionLayer, attend


@contextlib.contextmanager
def attention_inputs(model: nn.Module) -> Iterator[dict[int, tuple[Tensor, Tensor, Tensor]]]:
    """Collects each attention layer's (q, k, v), every one (B, H, T, D), from the forward passes inside the block.

    Use the uncompiled model: a compiled one does not run hooks that were added after it was compiled.
    """
    layers = [m for m in model.modules() if isinstance(m, AttentionLayer)]
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def keep(layer):
        return lambda _module, args: seen.__setitem__(layer, tuple(x.detach() for x in args[:3]))

    hooks = [m.register_forward_pre_hook(keep(i)) for i, m in enumerate(layers)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def wq_norms(weight: Tensor, n_head: int) -> Tensor:
    """Largest singular value of each head's W_Q, (H,), from a fused c_attn weight (3 C, C); paper figure 3.

    By the eigenvalues of the (D, D) Gram matrix in float64: exact to about 1e-8 relative, and D is small.
    """
    C = weight.shape[1]
    wq = weight[:C].detach().double().view(n_head, C // n_head, C)
    return torch.linalg.eigvalsh(wq @ wq.mT)[:, -1].clamp_min(0).sqrt()


@torch.no_grad()
def probe(model: nn.Module, idx: Tensor, autocast) -> dict[str, float | list[float]]:
    """What the paper's figures 3 and 13 show, of one batch idx (B, T): flat keys for metrics.jsonl.

    probe/ties/layer{i}: share of score rows whose maximum repeats within a key tile (paper Algorithm 3, rs > 1),
        and probe/ties_head/layer{i}, the same by head; probe/row_max/layer{i}: the largest score;
    probe/wq_norm/layer{i}: the largest spectral norm of a head's W_Q, and probe/wq_norm_head/layer{i}, by head.
    """
    training = model.training
    model.eval()
    with attention_inputs(model) as inputs, autocast:
        model(idx)
    model.train(training)
    blocks = [m for m in model.modules() if hasattr(m, "c_attn")]
    layers = [m for m in model.modules() if isinstance(m, AttentionLayer)]
    out: dict[str, float | list[float]] = {}
    for i, (block, layer) in enumerate(zip(blocks, layers, strict=True)):
        q, k, v = inputs[i]
        _, stats = attend(q, k, v, layer.spec, layer.rng, stats=True)
        ties = (stats.ties > 1).float().mean((0, 2))
        norms = wq_norms(block.c_attn.weight, q.shape[1])
        out[f"probe/ties/layer{i}"] = ties.mean().item()
        out[f"probe/ties_head/layer{i}"] = [round(x, 5) for x in ties.tolist()]
        out[f"probe/row_max/layer{i}"] = stats.row_max.max().item()
        out[f"probe/wq_norm/layer{i}"] = norms.max().item()
        out[f"probe/wq_norm_head/layer{i}"] = [round(x, 4) for x in norms.tolist()]
    return out


def explain_nonfinite(model: nn.Module, batches: Iterable[Tensor], autocast) -> str:
    """Where a step over `batches`, each idx (B, T), left the finite numbers, in words for an error message: in the
    first forward pass that does, else in the backward pass; and parameters whose gradient is not finite."""
    places = (first_nonfinite(model, idx, autocast) for idx in batches)
    place = next(filter(None, places), "the forward pass is finite, the backward pass is not")
    return f"{place}; gradients that are not finite: {', '.join(nonfinite_gradients(model)) or 'none'}"


@torch.no_grad()
def first_nonfinite(model: nn.Module, idx: Tensor, autocast) -> str:
    """Where a forward pass of idx (B, T) first leaves the finite numbers, in words; "" where it does not."""
    with attention_inputs(model) as inputs, autocast:
        logits, _ = model(idx, idx)  # with targets, whatever they are: the logits of all positions
    layers = [m for m in model.modules() if isinstance(m, AttentionLayer)]
    for i, layer in enumerate(layers):
        q, k, v = inputs[i]
        if not all(x.isfinite().all() for x in (q, k, v)):
            return f"the input of layer {i}'s attention is already non-finite (weights or activations before it)"
        o, stats = attend(q, k, v, layer.spec, layer.rng, stats=True)
        bad = (~o.isfinite()).any(-1)  # (B, H, T)
        if bad.any():
            b, head, row = bad.nonzero()[0].tolist()
            return (f"layer {i}, head {head}, row {row}: {layer.spec.backend} turned finite inputs into a non-finite "
                    f"output; row maximum {stats.row_max[b, head, row].item():.6g}, {int(bad.sum())} rows so; "
                    f"numerics: {layer.spec.describe()}")
    if not logits.isfinite().all():
        return "the attention outputs are finite, the logits are not"
    return ""


def nonfinite_gradients(model: nn.Module, limit: int = 3) -> list[str]:
    """Names of the first parameters whose gradient is not finite, in model order."""
    named = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    return [n for n, g in named if not g.isfinite().all()][:limit]
