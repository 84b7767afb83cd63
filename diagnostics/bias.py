"""Where the rounding error of P V comes from and what it does to delta; paper section 3.3.2, figures 5, 6 and 12.

All functions take one head's `Pair` and its V and dO as (B, T, D). "Ones" are the entries of P that BF16 rounds to 1.
"""

import torch
from torch import Tensor

from attention.rounding import round_bf16, round_to
from attention.spec import AttentionSpec
from diagnostics.precision import Pair

MOST = 5  # rows with this many ones or more share a line of a table
SIGNS = ("negative", "positive", "mixed")
REMAINDERS = ("same sign", "opposite sign", "none")
CHUNK = 1 << 22  # elements of P V by position that exist at a time


def by_ones(pair: Pair, v: Tensor, ones: Tensor) -> list[dict]:
    """Signed mean rounding errors of (row, feature) entries by the number of ones in the row and the sign of V there.

    ones: (B, T, T) bool. Each line: ones (MOST stands for that many and more), sign of V[t, i] at all ones t
    (`SIGNS`), entries, pv_error and o_error (signed means), pv_size (mean |error|), away: the mean of pv_error times
    the sign of P V, so positive where rounding goes away from zero.
    """
    pv, o, v = pair.pv_error, pair.o_error, v.double()
    away = pv * pair.o_hp.sign()
    count = ones.sum(-1)[..., None].expand_as(pv)
    below, above = (ones.double() @ side.double() for side in (v < 0, v > 0))
    sign = torch.where(below == count, 0, torch.where(above == count, 1, 2))
    lines = []
    for n in range(MOST + 1):
        for i, name in enumerate(SIGNS):
            here = (count.clamp(max=MOST) == n) & (sign == i)
            if entries := int(here.sum()):
                lines.append({"ones": n, "sign": name, "entries": entries, "pv_error": pv[here].mean().item(),
                              "pv_size": pv[here].abs().mean().item(), "away": away[here].mean().item(),
                              "o_error": o[here].mean().item()})
    return lines


def by_remainder(pair: Pair, v: Tensor, ones: Tensor) -> list[dict]:
    """The real counterpart of `synthetic_table`: (row, feature) entries with 1 to 4 ones at which V has one sign, by
    the sign of the remainder of P V beside them.

    Each line: ones, remainder (`REMAINDERS`, its sign against that of V at the ones), entries, error (signed mean of
    (PV)_lp - (PV)_hp, turned as if V were negative: below 0 is away from zero), error_size (mean |error|).
    """
    v, count = v.double(), ones.sum(-1)[..., None]
    below, above = (ones.double() @ side.double() for side in (v < 0, v > 0))
    side = (above == count).double() - (below == count).double()
    rest = (pair.o_hp * pair.l[..., None] - ones.double() @ v) * side
    error = -side * pair.pv_error
    lines = []
    for k in range(1, 5):
        for name, kind in zip(REMAINDERS, (rest > 0, rest < 0, rest == 0), strict=True):
            here = (count == k) & (side != 0) & kind
            if entries := int(here.sum()):
                lines.append({"ones": k, "remainder": name, "entries": entries, "error": error[here].mean().item(),
                              "error_size": error[here].abs().mean().item()})
    return lines


def prefix_error(pbar: Tensor, v: Tensor, probs: str = "bf16") -> Tensor:
    """Paper figure 6b, c: (sum_{t' <= t} P[t'] V[t', i])_lp - (the same)_hp for every t, float64 (..., T, D).

    pbar: (..., T), hp's exp(S - rowmax) of one row; v: (..., T, D). lp: P cast to `probs`, each sum rounded to FP32,
    then to BF16, no stabilizer; hp: float64.
    """
    return round_bf16(_running(pbar, v, probs)).double() - (pbar[..., None] * v.double()).cumsum(-2)


def delta_shares(pair: Pair, v: Tensor, do: Tensor, ones: Tensor, spec: AttentionSpec) -> dict:
    """Who makes the sum of (delta_lp - delta_hp)[T] (paper figure 5a), in two ways; all values are parts of `sum`.

    By row: rows_tied, rows_single, rows_none have several, one and no ones; `rows` counts them. By position: at_ones
    and elsewhere are the steps of the prefix error, which rounds the whole sum once, at positions with P = 1 and at
    others, weighted with dO / l; rest is what that leaves: rounding by tiles, the division and the rounding of O.
    size: the sum of absolute values. root: the root of the summed squares, which is what the sum of independent errors
    without a bias would be like; |sum| far beyond it is bias. With a stabilizer the part by position is what the rows
    would do without it.
    """
    error, count = pair.delta_error, ones.sum(-1)
    kinds = {"rows_tied": count > 1, "rows_single": count == 1, "rows_none": count == 0}
    steps = sum((_steps(pair.pbar[b], pair.l[b], v[b], do[b], ones[b], spec) for b in range(len(v))),
                torch.zeros(2, dtype=torch.float64, device=v.device))
    total, (at_ones, elsewhere) = error.sum().item(), steps.tolist()
    return {"sum": total, "size": error.abs().sum().item(), "root": error.norm().item(),
            "at_ones": at_ones, "elsewhere": elsewhere, "rest": total - at_ones - elsewhere,
            **{name: error[rows].sum().item() for name, rows in kinds.items()},
            "rows": {name: int(rows.sum()) for name, rows in kinds.items()}}


def addition_error(values: Tensor, remainder: Tensor) -> Tensor:
    """BF16(x) - x with x = remainder + sum of values, (N,): values (N, K) hold V where P = 1, remainder (N,) the rest
    of P V (paper section 3.3.2 works out one of them). Exact in float64."""
    exact = values.double().sum(-1) + remainder.double()
    return round_bf16(exact) - exact


def synthetic_table(draws: int = 1 << 14, size: float = 2.0**-12, seed: int = 0) -> list[dict]:
    """The same rounding on numbers with a known answer: K = 1 to 4 ones, V negative and uniform over the BF16 values
    of [-4, -2), beside a remainder of at most `size`, of the sign of V, of the other sign, or none.

    Each line: ones, remainder, error (signed mean of BF16(x) - x), error_size (mean of its absolute value). One value
    needs no rounding; two carry into a new place, so half of the sums are ties, which the remainder's sign decides.
    """
    draw = torch.Generator().manual_seed(seed)
    lines = []
    for k in range(1, 5):
        v = -2 - torch.randint(128, (draws, k), generator=draw) / 64
        r = -size * (1 - torch.rand(draws, generator=draw, dtype=torch.float64))  # never 0
        for name, factor in zip(REMAINDERS, (1, -1, 0), strict=True):
            error = addition_error(v, factor * r)
            lines.append({"ones": k, "remainder": name, "error": error.mean().item(),
                          "error_size": error.abs().mean().item()})
    return lines


def _steps(pbar, l, v, do, ones, spec) -> Tensor:
    """Parts (2,) of the sum of delta's error at ones and elsewhere, of one sequence; rows in chunks, for memory."""
    T, D = v.shape
    rows, found = max(1, CHUNK // (T * D)), torch.zeros(2, dtype=torch.float64, device=v.device)
    for start in range(0, T, rows):
        part, seen = slice(start, start + rows), min(start + rows, T)  # later keys are masked
        weight = pbar[part, :seen]
        low = round_bf16(_running(weight, v[:seen], spec.probs)).double()
        step = torch.diff(low, dim=-2, prepend=torch.zeros_like(low[:, :1]))
        step -= weight[..., None] * v[:seen].double()
        scaled = (step @ (do[part].double() / l[part, None])[..., None]).squeeze(-1)
        found += torch.stack([scaled[ones[part, :seen]].sum(), scaled[~ones[part, :seen]].sum()])
    return found


def _running(pbar, v, probs) -> Tensor:
    """lp's running sums of P V along t, in FP32."""
    return (round_to(pbar.float(), probs)[..., None] * v.float()).cumsum(-2)
