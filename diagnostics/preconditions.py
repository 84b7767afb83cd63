"""What the paper's failure needs of a decoder, measured in any: rank-1 directions that resemble each other (figure 8)
and rows whose maximum repeats in BF16 (figure 9). Tensors of one layer; grouped-query heads; positions are in q and k.

H query heads, G key heads (query head h reads key head h // (H / G)), T tokens, D features a head, C input features.
"""

import torch
from torch import Tensor

from attention.rounding import round_bf16
from diagnostics.coherence import cosines
from diagnostics.ties import RULES, maxima

ALIKE = 0.999  # cosines above it count as one direction: what the paper reports for Llama-3.1-8B (figure 8)


def bf16_scores(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """S (H, T, T), -inf where masked, as scores=bf16 rounds them: BF16(scaling BF16(q k^T)) of BF16 q (H, T, D) and
    k (G, T, D), with the dot products in float64."""
    q, k = (round_bf16(x.float()).double() for x in (q, k))
    k = k.repeat_interleave(len(q) // len(k), 0)
    s = round_bf16(round_bf16(q @ k.mT) * scaling)
    return s.masked_fill_(torch.ones_like(s[0], dtype=torch.bool).triu_(1), -torch.inf)


def attention_weighted_keys(s: Tensor, k: Tensor) -> Tensor:
    """P K (H, T, D) in float64: row T of a head is the mean of its keys under P = softmax(S)."""
    return torch.softmax(s.double(), -1) @ k.double().repeat_interleave(len(s) // len(k), 0)


def tied_rows(s: Tensor, epsilon: float = 1e-3) -> dict:
    """Rows with two or more maxima, by each of `ties.RULES`.

    counts: rule -> tied rows of each head, of T. rows: [head, query, {rule: maxima}, keys], of every row that is tied
    by any rule; keys are those that P = 1 or epsilon makes a maximum.
    """
    masks = {rule: maxima(s, rule, epsilon) for rule in RULES}
    number = {rule: mask.sum(-1) for rule, mask in masks.items()}
    tied = torch.stack([n > 1 for n in number.values()]).any(0)
    wide = masks["one"] | masks["epsilon"]
    return {"counts": {rule: (n > 1).sum(-1).tolist() for rule, n in number.items()},
            "rows": [[h, t, {rule: int(n[h, t]) for rule, n in number.items()}, wide[h, t].nonzero()[:, 0].tolist()]
                     for h, t in tied.nonzero().tolist()]}


def similarity(pk: Tensor, x: Tensor) -> dict[str, list[float]]:
    """How alike (PK)[T]^T X[T] is from token to token, by head. pk: (H, T, D), x: (T, C), float64.

    Column j of that matrix is PK[T] X[T, j]. So its cosine between tokens T and U is, for every j,
    cos(PK[T], PK[U]) times the sign of X[T, j] X[U, j]: `columns`, without the sign, is the number that the paper's
    figure 8 prints over its columns. `matrices` is the cosine of the whole matrices, cos(PK[T], PK[U]) cos(X[T], X[U]).
    Each for neighbours U = T + 1 (next) and over all pairs of tokens (all): mean, and share above ALIKE in size. Token
    0 is left out: its row of P is 1 by definition.
    """
    pk, x = pk[:, 1:], x[1:]
    unit = torch.nn.functional.normalize(pk, dim=-1)
    columns, inputs = unit @ unit.mT, cosines(x)
    pairs = torch.ones_like(inputs, dtype=torch.bool).triu_(1)
    found = {}
    for name, cosine in (("columns", columns), ("matrices", columns * inputs)):
        for which, values in (("next", cosine.diagonal(1, -2, -1)), ("all", cosine[:, pairs])):
            found[f"{name}_{which}"] = values.mean(-1).tolist()
            found[f"{name}_{which}_alike"] = (values.abs() > ALIKE).double().mean(-1).tolist()
    return found


def closest_neighbours(pk: Tensor, x: Tensor) -> int:
    """Of one head, pk (T, D): the token T >= 1 whose matrix is most like that of T + 1."""
    unit = [torch.nn.functional.normalize(y, dim=-1) for y in (pk, x)]
    cosine = torch.stack([(y[1:-1] * y[2:]).sum(-1) for y in unit]).prod(0)
    return 1 + int(cosine.abs().argmax())
