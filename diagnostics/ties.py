"""Which scores of a row count as its maximum, by three rules, and where the rows sit that have several."""

import torch
from torch import Tensor

from attention.rounding import round_bf16

RULES = ("exact", "epsilon", "one")


def maxima(s: Tensor, rule: str, epsilon: float = 1e-3) -> Tensor:
    """Which entries of s (..., rows, keys; -inf where masked) count as the row's maximum rm; bool, s's shape.

    exact: S = rm. epsilon: S >= rm - epsilon, the stabilizer's rule (paper Algorithm 3, over the whole row rather than
    a tile). one: exp(S - rm), in FP32, rounds to 1 in BF16 (paper section 3.3.2: P = 1), which S > rm - 1.955e-3 does.
    """
    rm = s.amax(-1, keepdim=True)
    match rule:
        case "exact":
            return s == rm
        case "epsilon":
            return s >= rm - epsilon
        case "one":
            return round_bf16(torch.exp((s - rm).float())) == 1
    raise ValueError(f"rule={rule!r} is not one of {', '.join(RULES)}")


def tied_share(mask: Tensor) -> float:
    """Share of rows with more than one maximum (paper figure 13 counts them)."""
    return (mask.sum(-1) > 1).double().mean().item()


def places(mask: Tensor) -> dict:
    """Where ties sit. mask: (B, T, T) of `maxima`. Only rows with more than one maximum count.

    rows: how many; by_query (T,): share of sequences whose row is tied at this query; by_key (T,): number of tied rows
    in which this key is a maximum; by_distance (T,): maxima of tied rows by query minus key; first_token: share of
    tied rows in which key 0 is a maximum; own_token: in which the query's own position is; mean_distance: tokens.
    """
    B, T, _ = mask.shape
    tied = mask.sum(-1) > 1
    repeated = mask & tied[..., None]
    query, key = repeated.nonzero(as_tuple=True)[1:]
    rows = int(tied.sum())
    diagonal = repeated.diagonal(dim1=-2, dim2=-1)
    return {"rows": rows, "share": rows / (B * T), "first_token": int(repeated[..., 0].sum()) / max(rows, 1),
            "own_token": int(diagonal.sum()) / max(rows, 1),
            "mean_distance": (query - key).double().mean().item() if rows else None,
            "by_query": tied.double().mean(0).tolist(), "by_key": repeated.sum((0, 1)).tolist(),
            "by_distance": torch.bincount(query - key, minlength=T).tolist()}
