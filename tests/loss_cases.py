"""The loss that the model computes with loss_chunk=0, which the loss in chunks is compared with."""

import torch
import torch.nn.functional as F


def plain(x, w, targets, softcap=0.0):
    """x (..., C), w (V, C), targets (...), -1 where left out: the mean cross-entropy in nats."""
    logits = F.linear(x, w)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1)
