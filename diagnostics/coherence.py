"""Whether the errors of many tokens point one way: the rank-1 matrices of paper section 3.3.1, never built one by one.

    dW_Q,hp - dW_Q,lp = alpha sum_T (delta_lp - delta_hp)[T] (PK)[T]^T X[T]

so a step's weights move by + learning rate times that sum too far along (PK)^T X.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from diagnostics.weights import spectral_entropy


@dataclass(frozen=True)
class RankOne:
    """N matrices (PK)[T]^T X[T], each (D, C), as their factors: pk (N, D) = P K and x (N, C), float64."""

    pk: Tensor
    x: Tensor

    def __len__(self) -> int:
        return len(self.pk)

    def matrix(self, token: int) -> Tensor:
        """(D, C) of one token; paper figure 4c, f."""
        return torch.outer(self.pk[token], self.x[token])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """sum_T weights[T] (PK)[T]^T X[T], (D, C), in one product."""
        return self.pk.mT @ (weights.double()[:, None] * self.x)

    def cosines(self, other: "RankOne | None" = None) -> Tensor:
        """Cosine (N, M) of every matrix with every one of `other` (itself): the product of the factors' cosines."""
        other = other or self
        return cosines(self.pk, other.pk) * cosines(self.x, other.x)


def rank_one(p: Tensor, k: Tensor, x: Tensor) -> RankOne:
    """From P (B, T, T), K (B, T, D) and the layer's input X (B, T, C): N = B T matrices."""
    return RankOne((p.double() @ k.double()).flatten(0, 1), x.double().flatten(0, 1))


def cosines(a: Tensor, b: Tensor | None = None) -> Tensor:
    """Cosine (N, M) between the rows of a (N, F) and of b (M, F), a itself where b is None; 0 with a zero row."""
    unit = [torch.nn.functional.normalize(y, dim=-1) for y in (a, a if b is None else b)]
    return unit[0] @ unit[1].mT


def summary(cosine: Tensor, same: bool) -> dict[str, float]:
    """Mean and mean size of cosines (N, M), and the share above 0.9 in size; same=True leaves the diagonal out."""
    if same:
        n = len(cosine)
        cosine = cosine[~torch.eye(n, dtype=torch.bool, device=cosine.device)] if n > 1 else cosine
    return {"mean": cosine.mean().item(), "mean_size": cosine.abs().mean().item(),
            "share_above_0.9": (cosine.abs() > 0.9).double().mean().item()}


def gradient_error(matrices: RankOne, delta_error: Tensor, head_size: int) -> Tensor:
    """dW_Q,hp - dW_Q,lp (D, C) that an error of delta, (N,), makes; alpha = 1/sqrt(head_size). Exact where S is
    Q K^T alpha with Q = X W_Q^T: no query norm, no soft cap."""
    return matrices.weighted_sum(delta_error) * head_size**-0.5


def effective_rank(matrix: Tensor) -> float:
    """exp of the spectral entropy (Roy and Vetterli 2007): 1 for rank one, n for n equal singular values."""
    return spectral_entropy(torch.linalg.svdvals(matrix.double())).exp().item()


def top_share(matrix: Tensor) -> float:
    """Share of the squared norm that the first singular direction holds; NaN of what is not finite."""
    if not matrix.isfinite().all():  # LAPACK takes it for a matrix on which it did not converge
        return math.nan
    sigma = torch.linalg.svdvals(matrix.double()).square()
    return (sigma[0] / sigma.sum().clamp_min(torch.finfo(torch.float64).tiny)).item()


def projection(error: Tensor, update: Tensor) -> dict[str, float]:
    """How much of a weight update (D, C) lies along the summed error (D, C).

    cosine: positive where the weights moved the way the error of delta pushes them; its square is the share of the
    update's squared norm on that line. subspace: the share on u v^T of the error's first singular pair, signless.
    """
    error, update = error.double(), update.double()
    u, _, vt = torch.linalg.svd(error, full_matrices=False)
    size = update.norm().clamp_min(torch.finfo(torch.float64).tiny)
    cosine = (error * update).sum() / (size * error.norm().clamp_min(torch.finfo(torch.float64).tiny))
    return {"cosine": cosine.item(), "subspace": ((u[:, 0] @ update @ vt[0]) / size).square().item()}


def explained_growth(error: Tensor, weight: Tensor, update: Tensor) -> dict:
    """How much of the growth of a weight's spectral norm its movement along the summed error explains; all (D, C).

    before, after: |W| and |W + dW|. along: |W + dW_E| with dW_E = <dW, E> / <E, E> E, the part of the update dW on the
    line of the error E. share: (along - before) / (after - before), None where the norm did not grow.
    """
    error, weight, update = error.double(), weight.double(), update.double()
    part = (error * update).sum() / error.square().sum().clamp_min(torch.finfo(torch.float64).tiny) * error
    before, after, along = (torch.linalg.matrix_norm(w, 2).item() for w in (weight, weight + update, weight + part))
    return {"before": before, "after": after, "along": along,
            "share": (along - before) / (after - before) if after > before else None}
