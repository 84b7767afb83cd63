"""Cheap measurements of a live model: tied rows and W_Q norms by layer and head, and the first non-finite head."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from attention import AttentionLayer, attend


@contextlib.contextmanager
def arguments(modules: Iterable[nn.Module]) -> Iterator[dict[int, tuple[Tensor, ...]]]:
    """Collects the (first three) tensors that each of these modules is called with inside the block, by its number.

    Use the uncompiled model: a compiled one does not run hooks that were added after it was compiled.
    """
    seen: dict[int, tuple[Tensor, ...]] = {}

    def keep(number):
        return lambda _module, args: seen.__setitem__(number, tuple(x.detach() for x in args[:3]))

    hooks = [m.register_forward_pre_hook(keep(i)) for i, m in enumerate(modules)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def attention_inputs(model: nn.Module):
    """`arguments` of each attention layer: its (q, k, v), every one (B, H, T, D)."""
    return arguments(m for m in model.modules() if isinstance(m, AttentionLayer))


def wq_norms(weight: Tensor, n_head: int) -> Tensor:
    """Largest singular value of each head's W_Q, (..., H), from c_attn weights (..., 3 C, C), of which the first C rows
    are read; paper figure 3."""
    wq = weight[..., :weight.shape[-1], :].detach().double().unflatten(-2, (n_head, -1))
    return largest_eigenvalues(wq @ wq.mT).clamp_min(0).sqrt()


def dominant(gram: Tensor) -> Tensor:
    """M = gram^(2^30), scaled to trace 1, of positive semi-definite matrices (..., D, D): power iteration by squaring.

    An eigenvalue that is smaller than the largest by a share d has the weight (1 - d)^(2^30) in M, so M projects on the
    first eigenvector, or on the space of those that are as good as equal. Unlike an eigenvalue routine it never waits
    for the device, keeps no vector that a resumed run would lack, and turns NaN into NaN. 0 stays 0.
    """
    m = gram
    for _ in range(31):  # the first turn only scales
        m = m / m.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(m.dtype).tiny)[..., None, None]
        power, m = m, m @ m
    return power


def largest_eigenvalues(gram: Tensor) -> Tensor:
    """Largest eigenvalue of each positive semi-definite matrix (..., D, D), tr(gram M) with M its `dominant`: exact to
    about 1e-8 relative."""
    return (gram * dominant(gram)).sum((-2, -1))


def key_mean(k: Tensor) -> Tensor:
    """What keys k (..., T, D), or other vectors, have in common, (...): the length of their mean over the root mean
    square length of them less it, in FP32. The mean key adds the same to all scores of a row, so it changes no
    probability and has no gradient of its own but what rounding leaves over."""
    k = k.float()
    common = k.mean(-2, keepdim=True)
    return common.norm(dim=-1).squeeze(-1) / (k - common).square().sum(-1).mean(-1).sqrt()


@torch.no_grad()
def measure(model: nn.Module, idx: Tensor, autocast) -> Tensor:
    """What the paper's figures 3 and 13 show, and what keys have in common, of one batch idx (B, T): (5, n_layer, H)
    float64 on the model's device, which the host need not wait for.

    By layer and head: the share of score rows whose maximum repeats within a key tile (paper Algorithm 3, rs > 1), the
    largest score, the spectral norm of W_Q, and `key_mean` of the sequence where that is the largest (before smooth_k);
    by layer, the same of its normalised inputs X, from which W_K makes the keys.
    """
    training = model.training
    model.eval()
    blocks = [m for m in model.modules() if hasattr(m, "c_attn")]
    try:
        with attention_inputs(model) as inputs, arguments(block.c_attn for block in blocks) as x, autocast:
            model(idx)
    finally:
        model.train(training)
    layers = [m for m in model.modules() if isinstance(m, AttentionLayer)]
    stats = [attend(*inputs[i], layer.spec, layer.rng, stats=True)[1] for i, layer in enumerate(layers)]
    ties, row_max = torch.stack([one.ties for one in stats]), torch.stack([one.row_max for one in stats])
    norms = wq_norms(torch.stack([block.c_attn.weight[:block.c_attn.in_features] for block in blocks]), ties.shape[2])
    shared = key_mean(torch.stack([inputs[i][1] for i in range(len(layers))])).double().amax(1)  # of (layer, B, H)
    common = torch.stack([key_mean(x[i][0]).double().amax() for i in range(len(blocks))])
    return torch.stack([(ties > 1).double().mean((1, 3)), row_max.double().amax((1, 3)), norms, shared,
                        common[:, None].expand_as(shared)])


def as_record(values: list[list[list[float]]]) -> dict[str, float | list[float]]:
    """Flat keys for metrics.jsonl of what `measure` found (`tolist`).

    probe/ties/layer{i}: share of tied rows, and probe/ties_head/layer{i}, the same by head;
    probe/row_max/layer{i}: the largest score;
    probe/wq_norm/layer{i}: the largest spectral norm of a head's W_Q, and probe/wq_norm_head/layer{i}, by head;
    probe/key_mean_head/layer{i}: the mean key over what keys differ from it by, by head;
    probe/input_mean/layer{i}: the same of the inputs that W_Q, W_K and W_V read.
    What is the largest of a layer is NaN where a head's is.
    """
    out: dict[str, float | list[float]] = {}
    for i, (ties, row_max, norms, shared, common) in enumerate(zip(*values, strict=True)):
        out[f"probe/ties/layer{i}"] = sum(ties) / len(ties)
        out[f"probe/ties_head/layer{i}"] = [round(x, 5) for x in ties]
        out[f"probe/row_max/layer{i}"] = max(row_max, key=lambda x: (x != x, x))
        out[f"probe/wq_norm/layer{i}"] = max(norms, key=lambda x: (x != x, x))
        out[f"probe/wq_norm_head/layer{i}"] = [round(x, 4) for x in norms]
        out[f"probe/key_mean_head/layer{i}"] = [float(f"{x:.4g}") for x in shared]
        out[f"probe/input_mean/layer{i}"] = float(f"{common[0]:.4g}")
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
        _, loss = model(idx, idx)  # with targets, whatever they are: a loss of all positions
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
    if not loss.isfinite():
        return "the attention outputs are finite, the logits are not"
    return ""


def nonfinite_gradients(model: nn.Module, limit: int = 3) -> list[str]:
    """Names of the first parameters whose gradient is not finite, in model order."""
    named = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    return [n for n, g in named if not g.isfinite().all()][:limit]
