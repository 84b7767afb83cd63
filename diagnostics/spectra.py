"""Spectral norms, alignments and entropies of every weight matrix while a run trains.

Norms by power iteration that goes on from the directions of the last probe: v <- W^T W v / |W^T W v|, |W v| -> sigma_1
from below. Weights move little between probes, so a few rounds keep up; at evaluations `weights.top_singular` is exact,
and sets the directions anew. They are part of a checkpoint, so a resumed run logs what an uninterrupted one does.

A round reads every matrix twice and launches two products and a norm for each of seven batches of matrices; for GPT-2
small (85 M weights in blocks) that is 0.34 GFLOP and 0.7 GB of reads. The entropy takes 40 batched Cholesky
factorisations. What is small is computed for all layers at once, as a probe costs what its launches cost.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from diagnostics.weights import KINDS, block_matrices, entropy_of_grams, top_singular

ROUNDS = 4  # of power iteration a probe
READS = {"attn.c_attn": ("W_Q", "W_K", "W_V"), "attn.c_proj": ("W_O",), "mlp.c_fc": ("MLP_up",),
         "mlp.c_proj": ("MLP_down",)}  # a block's module: the matrices that multiply its input, in the order of KINDS


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
    """Spectral alignment of inputs x (..., tokens, n) of matrices W with first right singular vectors v (..., k, n) of
    length one, y = W x:

        SA(x, W) = <x, v_1> / |x|,    W = sum_i sigma_i u_i v_i^T

    (Qiu et al. 2025, arXiv 2510.04202: that the signs of SA over tokens become one precedes a loss explosion.)
    Returns, each (..., k), the mean of |SA| over tokens and the share of tokens with SA > 0. v_1 is defined up to its
    sign, so of the share p only min(p, 1 - p) means something: the sign diversity, 1/2 where both sides are as
    frequent, 0 where all tokens are on one. Both are NaN where an input or v is.
    """
    cosine = normalize(x.float(), dim=-1) @ v.mT
    return cosine.abs().mean(-2), torch.where(cosine.isnan(), torch.nan, (cosine > 0).float()).mean(-2)


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
        self.norms, self.found = {}, {}
        for kind, w in self._stacks():
            self.norms[kind], v = top_singular(w) if exact else power_iteration(w, self.v[kind])
            self.v[kind], self.found[kind] = finite(v), v
            if kind == "heads":
                grams = w[:, :2].double()
                self.entropy = entropy_of_grams(*(grams @ grams.mT).unbind(1))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Forward passes of the uncompiled model inside leave the inputs of each matrix, for `values`."""
        self.inputs = {name: {} for name in READS}
        hooks = [block.get_submodule(name).register_forward_pre_hook(self._listener(name, i))
                 for i, block in enumerate(self.blocks) for name in READS]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _listener(self, name: str, layer: int):
        return lambda _module, args: self.inputs[name].__setitem__(layer, args[0].detach())

    @torch.no_grad()
    def values(self) -> Tensor:
        """(n_layer, 18 + 5 H) float64 on the model's device, in the order that `as_record` reads. Their mean over ranks
        is what all of them saw."""
        aligned, heads = [], None
        for name, kinds in READS.items():
            v = [self.found[kind][:, None] for kind in kinds]
            if name == "attn.c_attn":
                v.append(self.found["heads"][:, 0])  # of W_Q
            x = torch.stack([seen for _, seen in sorted(self.inputs.pop(name).items())]).flatten(1, -2)
            both = torch.stack(alignment(x, torch.cat(v, 1)))  # (2, n_layer, matrices)
            aligned.append(both[:, :, :len(kinds)])
            heads = both[:, :, len(kinds):] if heads is None else heads
        norms, by_head = torch.stack([self.norms[kind] for kind in KINDS], 1), self.norms["heads"]
        return torch.cat([x.double() for x in (norms, *torch.cat(aligned, -1), by_head[:, 1], by_head[:, 2],
                                               self.entropy, *heads)], 1)

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
    W_Q; probe/qk_entropy/layer{i} is the smallest of a layer, NaN where one is.
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
        out[f"probe/qk_entropy/layer{i}"] = min(out[f"probe/qk_entropy_head/layer{i}"], key=lambda x: (x == x, x))
    return out
