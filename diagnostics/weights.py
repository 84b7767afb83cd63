"""Spectral norms of weight matrices and the spectral entropy of W_Q^T W_K, exact; paper figures 3 and 11.

What is of a matrix that is not finite is NaN, and of the others what it is without it.
"""

import math

import torch
from torch import Tensor, nn

from diagnostics.probes import dominant, wq_norms

KINDS = ("W_Q", "W_K", "W_V", "W_O", "MLP_up", "MLP_down")


def block_matrices(block: nn.Module) -> dict[str, Tensor]:
    """The weight matrices (outputs, inputs) of a block by kind (`KINDS`); W_Q, W_K and W_V are (C, C), all heads."""
    return dict(zip(KINDS, (*block.attn.c_attn.weight.chunk(3), block.attn.c_proj.weight, block.mlp.c_fc.weight,
                            block.mlp.c_proj.weight), strict=True))


def top_singular(w: Tensor) -> tuple[Tensor, Tensor]:
    """(sigma_1 (...), v_1 (..., n)) of matrices (..., m, n), float32, by the `dominant` of the smaller Gram matrix in
    float64: sigma to better than 1e-6, however close the second one is. A zero matrix has sigma = 0 and v = 0."""
    w = w.double()
    wide = w.shape[-2] <= w.shape[-1]
    power = dominant(w @ w.mT if wide else w.mT @ w)
    tiny = torch.finfo(power.dtype).tiny
    # Every column lies along the eigenvector; the one with the largest diagonal is furthest from 0.
    column = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None].expand(*power.shape[:-1], 1)
    v = torch.nn.functional.normalize(power.gather(-1, column), dim=-2, eps=tiny)
    v = w.mT @ v if wide else v
    v = torch.nn.functional.normalize(v, dim=-2, eps=tiny)
    return (w @ v).norm(dim=(-2, -1)).float(), v[..., 0].float()


def head_norms(weight: Tensor, n_head: int) -> Tensor:
    """Largest singular values (3, H) of each head's W_Q, W_K and W_V, from a fused c_attn weight (3 C, C); the first
    row is paper figure 3."""
    C = weight.shape[1]
    return torch.stack([wq_norms(weight[i * C:], n_head) for i in range(3)])


def spectral_norm(weight: Tensor) -> float:
    """Largest singular value of any matrix (paper figure 11), by its smaller Gram matrix in float64."""
    w = weight.detach().double()
    gram = w @ w.mT if w.shape[0] <= w.shape[1] else w.mT @ w
    if not gram.isfinite().all():  # LAPACK takes it for a matrix on which it did not converge
        return math.nan
    return torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt().item()


def matrix_norms(model: nn.Module) -> dict[str, list[float]]:
    """Spectral norm of every matrix of the blocks, by kind and layer (paper figure 11).

    Keys: W_Q, W_K, W_V (all heads together, (C, C) each), W_O, MLP_up, MLP_down; one value a layer.
    """
    norms: dict[str, list[float]] = {}
    for block in model.transformer.h:
        for name, weight in block_matrices(block).items():
            norms.setdefault(name, []).append(spectral_norm(weight))
    return norms


def qk_entropy(weight: Tensor, n_head: int) -> Tensor:
    """Spectral entropy (H,), in nats, of each head's bilinear form W_Q^T W_K (C, C) in the scores x W_Q^T W_K y.

    -sum p log p with p = sigma / sum(sigma): log D where all D directions count alike, 0 where one does, which is what
    growth along one rank-1 direction leads to. exp of it is the effective rank (Roy and Vetterli 2007). Only (D, D)
    matrices are decomposed: the singular values of A B^T are those of R_A R_B^T. `entropy_of_grams` is cheaper on a GPU
    and less exact.
    """
    C = weight.shape[1]
    wq, wk = (w.detach().double().view(n_head, C // n_head, C).mT for w in weight[:2 * C].chunk(2))
    ra, rb = (torch.linalg.qr(w, mode="r").R for w in (wq, wk))
    product = ra @ rb.mT
    finite = product.isfinite().all(-1).all(-1)
    sigma = torch.linalg.svdvals(torch.where(finite[:, None, None], product, 0))
    return torch.where(finite, spectral_entropy(sigma), torch.nan)


def entropy_of_grams(q: Tensor, k: Tensor) -> Tensor:
    """`qk_entropy` (...) from W_Q W_Q^T and W_K W_K^T of each head, (..., D, D) float64, without an eigenvalue routine,
    which takes a GPU 0.3 ms a head, one after the other.

    With Cholesky factors L_Q and L_K, W_Q^T W_K has the singular values of F = L_Q^T L_K. To the diagonals 1e-12 of the
    trace is added, as a head may lack a direction: singular values below about 1e-6 of the largest are not resolved.
    """
    finite = (q.isfinite() & k.isfinite()).all(-1).all(-1)
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    factors = []
    for gram in (q, k):
        gram = torch.where(finite[..., None, None], gram, eye)
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        factors.append(torch.linalg.cholesky_ex(gram + (1e-12 * trace + torch.finfo(q.dtype).tiny) * eye).L)
    return torch.where(finite, factor_entropy(factors[0].mT @ factors[1]), torch.nan)


def factor_entropy(f: Tensor, low: float = -34.0, high: float = 14.0, h: float = 1.2) -> Tensor:
    """`spectral_entropy` (...) of the singular values sigma of matrices F (..., D, D), float64, to about 1e-6 nats, by
    batched Cholesky factorisations alone. 0 where F is.

    With R(u) = tr(F F^T (e^u + F F^T)^-1) = sum sigma^2 / (e^u + sigma^2),

        sum sigma           = 1/pi   integral of e^(u/2) R(u) du
        sum sigma log sigma = 1/(2 pi) integral of u e^(u/2) R(u) du

    (the integral of the fractional power lambda^s = sin(pi s)/pi int e^(s u) lambda / (e^u + lambda) du at s = 1/2, and
    its derivative by s there). The trapezoidal rule with step h errs by a share of e^(-2 pi^2 / h), as the poles lie at
    distance pi from the axis. With F scaled to |F| = 1, R is constant below `low` but for sigma < e^(low/2) and
    falls like e^-u above `high`: what is beyond the ends are geometric series.
    """
    scale = f.square().sum((-2, -1), keepdim=True)
    f = f * scale.clamp_min(torch.finfo(f.dtype).tiny).rsqrt()
    u = torch.arange(low, high, h, dtype=f.dtype, device=f.device)
    gram, eye = f @ f.mT, torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
    resolvent = []
    for part in u.exp().split(8):  # nodes at a time: (8, ..., D, D) exists three times
        lower = torch.linalg.cholesky_ex(gram + part.view(-1, *[1] * f.dim()) * eye).L
        resolvent.append(torch.linalg.solve_triangular(lower, f.expand_as(lower), upper=False).square().sum((-2, -1)))
    weight, moment = (u / 2).exp(), u * (u / 2).exp()
    q = math.exp(-h / 2)  # each step beyond an end has q times the weight of the one before
    for end, sign in ((0, -1), (-1, 1)):
        moment[end] = weight[end] * (u[end] / (1 - q) + sign * h * q / (1 - q) ** 2)
        weight[end] = weight[end] / (1 - q)
    total, logs = (torch.tensordot(w, torch.cat(resolvent), 1) * h / math.pi for w in (weight, moment / 2))
    return torch.where(scale[..., 0, 0] == 0, 0, total.log() - logs / total)


def spectral_entropy(sigma: Tensor) -> Tensor:
    """-sum p log p over the last axis, p = sigma / sum(sigma), in nats; 0 log 0 is 0, and so is an all-zero sigma."""
    p = sigma / sigma.sum(-1, keepdim=True).clamp_min(torch.finfo(sigma.dtype).tiny)
    return -torch.xlogy(p, p).sum(-1) + 0.0
