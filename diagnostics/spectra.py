"""Spectral norms, alignments and entropies of every weight matrix while a run trains.

Norms by power iteration that goes on from the directions of the last probe: v <- W^T W v / |W^T W v|, |W v| -> sigma_1
from below. Weights move little between probes, so a few rounds keep up; at evaluations `weights.top_singular` is exact,
and sets the directions anew. They are part of a checkpoint, so a resumed run logs what an uninterrupted one does.

A round reads every matrix twice and launches two products and a norm for each of seven batches of matrices; for GPT-2
small (85 M weights in blocks) that is 0.34 GFLOP and 0.7 GB of reads. One small eigenvalue problem a head is left, for
the entropy.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from diagnostics.weights import KINDS, block_matrices, entropy_of_grams, top_singular

ROUNDS = 4  # of power iteration a probe


def power_iteration(w: Tensor, v: Tensor, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """(|W v| (...), v (..., n)) after some rounds from v, for W (..., m, n): lower bounds of the largest singular
    values, and unit vectors that approach the first right singular vectors. A zero W ends in v = 0, which starts anew.
    """
    v = torch.where(v.any(-1, keepdim=True), v, v.shape[-1] ** -0.5)[..., None]
    for _ in range(rounds):
        v = normalize(w.mT @ (w @ v), dim=-2)
    return (w @ v).norm(dim=(-2, -1)), v[..., 0]


def finite(v: Tensor) -> Tensor:
    """v (..., n), with zeros, from which power iteration starts anew, for one that is not finite: directions are part
    of a checkpoint, and must not keep finite weights from being saved."""
    return torch.where(v.isfinite().all(-1, keepdim=True), v, 0)


def alignment(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Spectral alignment of inputs x (..., n) of matrices W with first right singular vectors v (k, n), y = W x:

        SA(x, W) = <x, v_1> / |x|,    W = sum_i sigma_i u_i v_i^T

    (Qiu et al. 2025, arXiv 2510.04202: that the signs of SA over tokens become one precedes a loss explosion.)
    Returns, each (k,), the mean of |SA| over tokens and the share of tokens with SA > 0. v_1 is defined up to its sign,
    so of the share p only min(p, 1 - p) means something: the sign diversity, 1/2 where both sides are as frequent, 0
    where all tokens are on one.
    """
    cosine = normalize(x.flatten(0, -2).float(), dim=-1) @ v.mT
    return cosine.abs().mean(0), (cosine > 0).float().mean(0)


class Spectra:
    """Directions and the last values of a model's matrices: `update`, then a forward pass inside `listening`, then
    `values`."""

    def __init__(self, model: nn.Module):
        self.blocks = list(model.transformer.h)
        self.n_head, draw = self.blocks[0].attn.n_head, torch.Generator().manual_seed(0)
        self.v = {kind: self._start(draw, stack) for kind, stack in self._stacks()}

    @staticmethod
    def _start(draw: torch.Generator, stack: Tensor) -> Tensor:
        shape = (*stack.shape[:-2], stack.shape[-1])
        return normalize(torch.randn(shape, generator=draw), dim=-1).to(stack.device)

    def _stacks(self) -> Iterator[tuple[str, Tensor]]:
        """Each kind's matrices (n_layer, m, n), and "heads": (n_layer, 3, H, D, C) of W_Q, W_K and W_V."""
        # One kind at a time, so that the copies never exist together.
        by_layer = [block_matrices(block) for block in self.blocks]
        for kind in KINDS:
            yield kind, torch.stack([matrices[kind] for matrices in by_layer]).detach().float()
        heads = torch.stack([block.attn.c_attn.weight for block in self.blocks]).detach().float()
        yield "heads", heads.view(len(self.blocks), 3, self.n_head, -1, heads.shape[-1])

    @torch.no_grad()
    def update(self, exact: bool) -> None:
        """Norms and directions of the weights as they are; entropies of W_Q^T W_K."""
        self.norms, self.aligned = {}, {}
        for kind, w in self._stacks():
            self.norms[kind], v = top_singular(w) if exact else power_iteration(w, self.v[kind])
            self.v[kind] = finite(v)
            if kind == "heads":
                grams = w[:, :2].double()
                self.entropy = entropy_of_grams(*(grams @ grams.mT).unbind(1))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Forward passes of the uncompiled model inside leave the alignments of each matrix with its inputs."""
        hooks = []
        for i, block in enumerate(self.blocks):
            attn, mlp = block.attn, block.mlp
            for module, kinds in ((attn.c_attn, ("W_Q", "W_K", "W_V", "heads")), (attn.c_proj, ("W_O",)),
                                  (mlp.c_fc, ("MLP_up",)), (mlp.c_proj, ("MLP_down",))):
                hooks.append(module.register_forward_pre_hook(self._listener(i, kinds)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _listener(self, layer: int, kinds: tuple[str, ...]):
        @torch.no_grad()
        def listen(_module, args):
            with torch.autocast(args[0].device.type, enabled=False):
                for kind in kinds:
                    v = self.v[kind][layer]
                    v = v[0] if kind == "heads" else v[None]  # of the heads' W_Q
                    self.aligned[layer, kind] = alignment(args[0], v)

        return listen

    def values(self) -> Tensor:
        """(n_layer, 18 + 5 H) float64 on the model's device, in the order that `as_record` reads. Their mean over ranks
        is what all of them saw."""
        rows = []
        for i in range(len(self.blocks)):
            row = [self.norms[kind][i, None] for kind in KINDS]
            for part in (0, 1):
                row += [self.aligned[i, kind][part] for kind in KINDS]
            rows.append(torch.cat([x.double() for x in (
                *row, self.norms["heads"][i, 1], self.norms["heads"][i, 2], self.entropy[i],
                *self.aligned[i, "heads"])]))
        return torch.stack(rows)

    def state_dict(self) -> dict[str, Tensor]:
        """The directions, for a checkpoint."""
        return dict(self.v)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.v = {kind: state[kind].to(v.device) for kind, v in self.v.items()}


def as_record(values: list[list[float]]) -> dict[str, float | list[float]]:
    """Flat keys for metrics.jsonl of `Spectra.values` (`tolist`).

    By layer and kind of matrix (`weights.KINDS`): probe/norm_KIND/layer{i}, the spectral norm;
    probe/alignment_KIND/layer{i}, the mean size of the spectral alignment; probe/sign_diversity_KIND/layer{i}
    (`alignment`). By layer, lists over heads: probe/wk_norm_head/layer{i}, probe/wv_norm_head/layer{i},
    probe/qk_entropy_head/layer{i} in nats, and probe/alignment_head/layer{i} and probe/sign_diversity_head/layer{i} of
    W_Q; probe/qk_entropy/layer{i} is the smallest of a layer.
    """
    out: dict[str, float | list[float]] = {}
    K = len(KINDS)
    for i, row in enumerate(values):
        H = (len(row) - 3 * K) // 5
        for kind, norm, size, positive in zip(KINDS, row, row[K:], row[2 * K:], strict=False):
            out[f"probe/norm_{kind}/layer{i}"] = norm
            out[f"probe/alignment_{kind}/layer{i}"] = size
            out[f"probe/sign_diversity_{kind}/layer{i}"] = min(positive, 1 - positive)
        heads = (row[3 * K + n * H:3 * K + (n + 1) * H] for n in range(5))
        for name, one in zip(("wk_norm", "wv_norm", "qk_entropy", "alignment", "sign_diversity"), heads, strict=True):
            one = [min(p, 1 - p) for p in one] if name == "sign_diversity" else one
            out[f"probe/{name}_head/layer{i}"] = [round(x, 4) for x in one]
        out[f"probe/qk_entropy/layer{i}"] = min(out[f"probe/qk_entropy_head/layer{i}"])
    return out
