"""How a head's rounding errors move the largest singular value of its W_Q."""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from attention.op import smooth_keys
from attention.spec import AttentionSpec
from diagnostics.precision import both, operand, score_gradients
from diagnostics.scene import Frame
from diagnostics.ties import maxima


class Pushes(NamedTuple):
    """By sequence, (B,) float64. From gradient to size in the units of dW_Q: parts of -dW_Q along u v^T, W_Q's first
    singular pair, so positive where descent makes |W_Q| larger."""

    gradient: Tensor  # by the exact gradient
    error: Tensor  # by everything that the spec's backward pass rounds: its dS less the exact one
    row_sum: Tensor  # the part of error along (PK)[T], by what rows of dS add up to, which is 0 of the exact ones
    push: Tensor  # the part of row_sum by delta's error; the rest is dP's rounding, not shared by delta = rowsum(dO O)
    size: Tensor  # >= 0: root of the summed squares of push's terms, what independent errors would add up to
    sum: Tensor  # sum over rows of delta_lp - delta_hp, of either sign, in the units of dP (paper figure 12)
    tied: Tensor  # share of rows with several P = 1, from 0 to 1


def pushes(frame: Frame, spec: AttentionSpec, rng: Tensor | None = None) -> tuple[Pushes, Tensor]:
    """Pushes, and (2, D, C) of all sequences together: the exact dW_Q, and what everything rounded adds to it.

    Scores as the spec rounds them are exact here; for no query norm and no soft cap. rng: as `emulated.trace`. The
    frame's keys are as the run read them; smooth_k is the share of their mean that is taken out further.
    """
    if spec.smooth_k:
        frame = dataclasses.replace(frame, k=operand(smooth_keys(frame.k, spec.smooth_k), spec))
    alpha = frame.q.shape[-1] ** -0.5
    pair = both(frame.q, frame.k, frame.v, spec, frame.do, rng)
    p, k, x = pair.p, frame.k.double(), frame.x.double()
    u, _, vt = torch.linalg.svd(frame.wq.double(), full_matrices=False)
    xv = x @ vt[0]

    def along(rows: Tensor) -> Tensor:  # rows of dS or P -> the share of each token in dW_Q along u v^T
        return (rows @ k @ u[:, 0]) * xv

    terms = alpha * pair.delta_error * along(p)
    ds = alpha * p * (frame.do.double() @ frame.v.double().mT - pair.delta_hp[..., None])
    rounded = score_gradients(frame.q, frame.k, frame.v, frame.do, pair, spec)
    dw = torch.stack([(rows @ k).flatten(0, 1).mT @ x.flatten(0, 1) for rows in (ds, rounded - ds)])
    return Pushes(gradient=-along(ds).sum(-1), error=-along(rounded - ds).sum(-1),
                  row_sum=-(rounded.sum(-1) * along(p)).sum(-1), push=terms.sum(-1), size=terms.norm(dim=-1),
                  sum=pair.delta_error.sum(-1), tied=(maxima(pair.s, "one").sum(-1) > 1).double().mean(-1)), dw
