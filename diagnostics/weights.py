"""Spectral norms and the spectral entropy of attention weights, exact; paper figures 3 and 11."""

import torch
from torch import Tensor, nn

from diagnostics.probes import wq_norms


def head_norms(weight: Tensor, n_head: int) -> Tensor:
    """Largest singular values (3, H) of each head's W_Q, W_K and W_V, from a fused c_attn weight (3 C, C); the first
    row is paper figure 3."""
    C = weight.shape[1]
    return torch.stack([wq_norms(weight[i * C:], n_head) for i in range(3)])


def spectral_norm(weight: Tensor) -> float:
    """Largest singular value of any matrix (paper figure 11), by its smaller Gram matrix in float64."""
    w = weight.detach().double()
    gram = w @ w.mT if w.shape[0] <= w.shape[1] else w.mT @ w
    return torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt().item()


def matrix_norms(model: nn.Module) -> dict[str, list[float]]:
    """Spectral norm of every matrix of the blocks, by kind and layer (paper figure 11).

    Keys: W_Q, W_K, W_V (all heads together, (C, C) each), W_O, MLP_up, MLP_down; one value a layer.
    """
    norms: dict[str, list[float]] = {}
    for block in model.transformer.h:
        qkv = block.attn.c_attn.weight.chunk(3)
        matrices = dict(zip(("W_Q", "W_K", "W_V"), qkv, strict=True), W_O=block.attn.c_proj.weight,
                        MLP_up=block.mlp.c_fc.weight, MLP_down=block.mlp.c_proj.weight)
        for name, weight in matrices.items():
            norms.setdefault(name, []).append(spectral_norm(weight))
    return norms


def qk_entropy(weight: Tensor, n_head: int) -> Tensor:
    """Spectral entropy (H,), in nats, of each head's bilinear form W_Q^T W_K (C, C) in the scores x W_Q^T W_K y.

    -sum p log p with p = sigma / sum(sigma): log D where all D directions count alike, 0 where one does, which is what
    growth along one rank-1 direction leads to. exp of it is the effective rank (Roy and Vetterli 2007). Only (D, D)
    matrices are decomposed: the singular values of A B^T are those of R_A R_B^T.
    """
    C = weight.shape[1]
    wq, wk = (w.detach().double().view(n_head, C // n_head, C).mT for w in weight[:2 * C].chunk(2))
    ra, rb = (torch.linalg.qr(w, mode="r").R for w in (wq, wk))
    return spectral_entropy(torch.linalg.svdvals(ra @ rb.mT))


def spectral_entropy(sigma: Tensor) -> Tensor:
    """-sum p log p over the last axis, p = sigma / sum(sigma), in nats; 0 log 0 is 0, and so is an all-zero sigma."""
    p = sigma / sigma.sum(-1, keepdim=True).clamp_min(torch.finfo(sigma.dtype).tiny)
    return -torch.xlogy(p, p).sum(-1) + 0.0
