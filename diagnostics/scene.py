"""A scene: what one head read, wrote and was told by the loss at some steps of a run, in one file.

With it every figure of the diagnosis can be made again, without the run, its corpus or a GPU.
"""

import io
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from attention import AttentionLayer, attend
from attention.op import smooth_keys
from attention.spec import AttentionSpec, from_key
from diagnostics.precision import both, head_spec, operand, scores
from diagnostics.probes import attention_inputs
from diagnostics.ties import RULES, maxima, tied_share
from diagnostics.weights import head_norms, matrix_norms, qk_entropy
from files import write_bytes

TENSORS = ("tokens", "x", "q", "k", "v", "o", "do", "lse", "wq")
VERSION = 2


class SceneError(ValueError):
    """A scene that cannot be read or captured; one sentence with the way out."""


@dataclass
class Survey:
    """All layers at one step. head_norms: [layer][W_Q, W_K, W_V][head], spectral norms (paper figures 3, 11).
    matrix_norms: kind -> one value a layer. qk_entropy, ties: [layer][head]; ties is the share of score rows with
    rs > 1 in a key tile (paper figure 13); tied: rule of `ties.RULES` -> [layer][head], that share over whole rows.
    rows: score rows that a share is of."""

    step: int
    head_norms: list
    matrix_norms: dict
    qk_entropy: list
    ties: list
    tied: dict
    rows: int


@dataclass
class Frame:
    """One head at one step; B sequences of T tokens, head size D, width C.

    tokens (B, T) int64. x (B, T, C): the layer's input as its matrix product reads it. q, k, v, do (B, T, D): as the
    attention reads them (BF16 values where operands=bf16, keys less what smooth_k takes out). o (B, T, D): as the
    run's own backend stored it. lse (B, T): L = m + log l, by the emulation. wq (D, C): the head's W_Q. All float32 but
    tokens.
    """

    step: int
    tokens: Tensor
    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    do: Tensor
    lse: Tensor
    wq: Tensor


@dataclass
class Scene:
    """spec is the head's own. sequences_per_step: of the run, so that a frame's B sequences can be scaled to a step.
    history: series of the run's log, name -> [steps, values]: val_loss, ties/layer{i}, wq_norm/layer{i} and
    norm_KIND/layer{i}, as far as they were logged (`probes.as_record` and `spectra.as_record` say what they are).
    qk_norm: whether the model normalises q and k, so that q is not W_Q x."""

    name: str
    layer: int
    head: int
    spec: AttentionSpec
    sequences_per_step: int
    surveys: list[Survey]
    frames: list[Frame]
    history: dict = field(default_factory=dict)
    qk_norm: bool = False


@torch.no_grad()
def survey(model: nn.Module, idx: Tensor, autocast, step: int) -> Survey:
    """Norms, entropies and ties of every layer, for idx (B, T), in evaluation mode."""
    with attention_inputs(model.eval()) as inputs, autocast:
        model(idx)
    layers = [m for m in model.modules() if isinstance(m, AttentionLayer)]
    ties, tied = [], {rule: [] for rule in RULES}
    for i, layer in enumerate(layers):
        q, k, v = inputs[i]
        _, stats = attend(q, k, v, layer.spec, layer.rng, stats=True)
        ties.append((stats.ties > 1).double().mean((0, 2)).tolist())
        # A head at a time: (B, T, T) of one fits everywhere.
        shares = [[tied_share(maxima(s, rule, layer.spec.epsilon)) for rule in RULES]
                  for s in (scores(q[:, h], k[:, h], layer.spec) for h in range(q.shape[1]))]
        for rule, values in zip(RULES, zip(*shares, strict=True), strict=True):
            tied[rule].append(list(values))
    blocks = [block.attn for block in model.transformer.h]
    weights = [block.c_attn.weight for block in blocks]
    heads = blocks[0].n_head
    return Survey(step, [head_norms(w, heads).tolist() for w in weights], matrix_norms(model),
                  [qk_entropy(w, heads).tolist() for w in weights], ties, tied, idx.numel())


OUTLIER, TIED = 3.0, 0.4  # the monitor's default thresholds of wq_ratio and ties


def worst_head(one: Survey) -> tuple[int, int]:
    """Layer and head that the monitor would name: the largest spectral norm of W_Q (paper section 3.3: layer 1, head 7
    of ours), and among norms within 5 % of it the largest share of tied rows. Where no norm stands out yet but a head
    ties in more than 40 % of its rows, that head: in the small run its norm grew from 5 to 64 in the steps that
    followed, past heads that had been larger."""
    norms = [(layer, head, norm) for layer, three in enumerate(one.head_norms) for head, norm in enumerate(three[0])]
    largest = max(norm for *_, norm in norms)
    most = max((ties, layer, head) for layer, heads in enumerate(one.ties) for head, ties in enumerate(heads))
    if largest <= OUTLIER * statistics.median(norm for *_, norm in norms) and most[0] > TIED:
        return most[1:]
    near = [(layer, head) for layer, head, norm in norms if norm >= 0.95 * largest]
    return max(near, key=lambda at: (one.ties[at[0]][at[1]], one.head_norms[at[0]][0][at[1]]))


def capture(model: nn.Module, x: Tensor, y: Tensor, autocast, layer: int, head: int, step: int,
            scale: float = 1.0, tokens: int | None = None) -> Frame:
    """Runs sequences x with targets y, (B, T), forward and backward and keeps one head. Gradients are cleared.

    scale: factor on the mean loss, so that dO is what it was in training: B / sequences per step. Dropout is off.
    tokens: keep this many leading positions. Attention is causal, so what is kept is exactly what the whole sequence
    has there, dO with the loss of all later tokens included. Errors: SceneError where something is not finite.
    """
    (frame,) = capture_heads(model, x, y, autocast, layer, [head], step, scale)
    kept = {name: getattr(frame, name) for name in TENSORS}
    # Copies: weights go on changing, and a slice would keep all heads in memory.
    return Frame(step, **{name: (t if name == "wq" else t[:, :tokens]).cpu().clone() for name, t in kept.items()})


def capture_heads(model: nn.Module, x: Tensor, y: Tensor, autocast, layer: int, heads: list[int], step: int,
                  scale: float = 1.0) -> list[Frame]:
    """`capture` of several heads of a layer by one pass, on the model's device; they share x and the tokens."""
    block = model.eval().transformer.h[layer].attn
    seen: dict[str, Tensor] = {}

    def keep(_module, args, output):
        seen.update(zip("qkv", args[:3], strict=True), o=output)
        output.register_hook(lambda grad: seen.__setitem__("do", grad))

    hooks = [block.attend.register_forward_hook(keep),
             block.register_forward_pre_hook(lambda _module, args: seen.__setitem__("x", args[0]))]
    try:
        with torch.enable_grad(), autocast:
            _, loss = model(x, y)
        (loss * scale).backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    seen["k"] = smooth_keys(seen["k"], block.attend.spec.smooth_k)
    width = block.c_attn.weight.shape[1]
    size, inputs, frames = width // block.n_head, seen["x"].detach().to(seen["q"].dtype).float(), []
    for head in heads:
        spec = head_spec(block.attend.spec, head)
        q, k, v, do = (operand(seen[n].detach()[:, head], spec) for n in ("q", "k", "v", "do"))
        bad = [n for n, t in dict(q=q, k=k, v=v, do=do).items() if not t.isfinite().all()]
        if bad:
            raise SceneError(f"step {step}: {', '.join(bad)} of layer {layer}, head {head} are not finite, so there is "
                             "nothing to compare; choose earlier checkpoints with --steps")
        frames.append(Frame(step, x, inputs, q, k, v, seen["o"].detach()[:, head].float(), do, both(q, k, v, spec).lse
                            .float(), block.c_attn.weight.detach()[head * size:(head + 1) * size].float()))
    return frames


def save(scene: Scene, path: str | Path) -> Path:
    """One compressed npz, nothing lost: a tensor whose values BF16 can hold as uint16 (its upper halves), others as
    float32, tokens as int32; numbers and names as JSON."""
    head = {"version": VERSION, "name": scene.name, "layer": scene.layer, "head": scene.head, "spec": scene.spec.key,
            "sequences_per_step": scene.sequences_per_step, "surveys": [asdict(s) for s in scene.surveys],
            "steps": [f.step for f in scene.frames], "history": scene.history, "qk_norm": scene.qk_norm}
    arrays = {f"{name}_{i}": _pack(getattr(frame, name)) for i, frame in enumerate(scene.frames) for name in TENSORS}
    packed = io.BytesIO()
    np.savez_compressed(packed, scene=np.frombuffer(json.dumps(head).encode(), dtype=np.uint8), **arrays)
    write_bytes(path, packed.getvalue())
    return Path(path)


def load(path: str | Path) -> Scene:
    """Errors: SceneError for a file that is missing or is no scene."""
    try:
        with np.load(path, allow_pickle=False) as file:
            head = json.loads(bytes(file["scene"]))
            if head["version"] != VERSION:
                raise SceneError(f"{path} is a scene of version {head['version']}, this code reads {VERSION}; "
                                 "capture it again")
            frames = [Frame(step, **{name: _unpack(file[f"{name}_{i}"]) for name in TENSORS})
                      for i, step in enumerate(head["steps"])]
    except FileNotFoundError:
        raise SceneError(f"there is no scene {path}; capture one with scripts/diagnose.py RUN") from None
    except SceneError:
        raise
    except Exception as error:  # zip, json and numpy each have their own; every one means: no scene
        raise SceneError(f"{path} is no scene that can be read ({error}); capture it again") from None
    return Scene(head["name"], head["layer"], head["head"], from_key(head["spec"]), head["sequences_per_step"],
                 [Survey(**one) for one in head["surveys"]], frames, head["history"], head.get("qk_norm", False))


def _pack(x: Tensor) -> np.ndarray:
    if not x.is_floating_point():
        return x.numpy().astype(np.int32)
    bits = x.contiguous().numpy().view(np.uint32)
    return (bits >> 16).astype(np.uint16) if not (bits & 0xFFFF).any() else x.contiguous().numpy()


def _unpack(a: np.ndarray) -> Tensor:
    if a.dtype == np.uint16:
        a = (a.astype(np.uint32) << 16).view(np.float32)
    return torch.from_numpy(a.astype(np.int64) if a.dtype == np.int32 else a)
