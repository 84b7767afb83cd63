"""From a scene to numbers: the paper's chain from ties to the growth of W_Q, by figure. Plain values, for JSON."""

import torch
from torch import Tensor

from diagnostics import bias, coherence
from diagnostics.precision import both
from diagnostics.probes import key_mean
from diagnostics.scene import Frame, Scene
from diagnostics.ties import RULES, maxima, places, tied_share

PAIRS = 512  # tokens whose cosines are taken: all pairs of them
SHOWN = 24  # positions of a row that figure 6c shows around its largest step


def diagnose(scene: Scene) -> dict:
    """All numbers of figures 3, 4, 5, 6, 11, 12, 13 and the tables beside them.

    Keys: layer, head, attention, between (what lies between W_Q x and the scores, so that `coherence`, which takes
    them for q k / sqrt(D) with q = W_Q x, is not of W_Q), steps, key_mean (`probes.key_mean` by frame, of the sequence
    where it is the largest), captured_equals_emulated, ties, rounding, synthetic, shares, coherence, figure3 ...
    figure13. Sums of delta are of the frame's sequences; `per_step` scales them to all sequences of a step.
    """
    pairs = [both(f.q, f.k, f.v, scene.spec, f.do) for f in scene.frames]
    ones = [maxima(pair.s, "one") for pair in pairs]
    sets = [coherence.rank_one(pair.p, frame.k, frame.x) for pair, frame in zip(pairs, scene.frames, strict=True)]
    last, frame, layers = pairs[-1], scene.frames[-1], range(len(scene.surveys[-1].ties))
    found = {
        "name": scene.name, "layer": scene.layer, "head": scene.head, "attention": scene.spec.describe(),
        "between": ["qk_norm"] * scene.qk_norm + ["softcap"] * bool(scene.spec.softcap),
        "steps": [f.step for f in scene.frames], "sequences": len(frame.tokens), "tokens": frame.tokens.shape[1],
        "key_mean": [key_mean(f.k).max().item() for f in scene.frames],
        # How far the run's own kernel is from the emulation that lp is: compared as stored.
        "captured_equals_emulated": [(f.o.double() == pair.o_lp).double().mean().item()
                                     for f, pair in zip(scene.frames, pairs, strict=True)],
        "ties": [_ties(f, pair, scene) for f, pair in zip(scene.frames, pairs, strict=True)],
        "rounding": bias.by_ones(last, frame.v, ones[-1]),
        "remainder": bias.by_remainder(last, frame.v, ones[-1]),
        "synthetic": bias.synthetic_table(),
        "shares": [bias.delta_shares(pair, f.v, f.do, one, scene.spec) | {"step": f.step}
                   for f, pair, one in zip(scene.frames, pairs, ones, strict=True)],
        "coherence": _coherence(scene, pairs, sets),
        "heads": {"step": scene.surveys[-1].step, "tied": scene.surveys[-1].tied, "ties": scene.surveys[-1].ties,
                  "wq_norm": [three[0] for three in scene.surveys[-1].head_norms],
                  "qk_entropy": scene.surveys[-1].qk_entropy},
        "figure3": {"wq_norm": scene.surveys[-1].head_norms[scene.layer][0], "step": scene.surveys[-1].step,
                    "qk_entropy": scene.surveys[-1].qk_entropy[scene.layer]},
        "figure5a": _cumulative(scene, pairs),
        "figure11": {"steps": [s.step for s in scene.surveys],
                     "norms": {kind: [s.matrix_norms[kind] for s in scene.surveys]
                               for kind in scene.surveys[0].matrix_norms},
                     "wq_norm_largest_head": [[max(three[0]) for three in s.head_norms] for s in scene.surveys],
                     "logged": {kind: {i: scene.history.get(f"norm_{kind}/layer{i}", [[], []]) for i in layers}
                                for kind in scene.surveys[0].matrix_norms},
                     "logged_largest_head": {i: scene.history.get(f"wq_norm/layer{i}", [[], []]) for i in layers}},
        "figure13": {"val_loss": scene.history.get("val_loss", [[], []]),
                     "tied_share": scene.history.get(f"ties/layer{scene.layer}", [[], []]),
                     "checkpoints": [[s.step for s in scene.surveys],
                                     [sum(s.ties[scene.layer]) / len(s.ties[scene.layer]) for s in scene.surveys]],
                     "head": [[s.step for s in scene.surveys],
                              [s.ties[scene.layer][scene.head] for s in scene.surveys]],
                     "rows_a_sequence": frame.tokens.shape[1]},
    }
    b, token = worst_token(last, ones[-1])
    product = frame.do[b, token].double() * last.o_error[b, token]
    feature = int(product.argmax())
    prefix = bias.prefix_error(last.pbar[b, token], frame.v[b], scene.spec.probs)[:token + 1, feature]
    at = int(torch.diff(prefix, prepend=prefix.new_zeros(1)).abs().argmax())
    found["figure5bc"] = {"step": frame.step, "sequence": b, "token": token, "do": frame.do[b, token].tolist(),
                          "o_error": last.o_error[b, token].tolist(), "product": product.tolist(),
                          "delta_error": last.delta_error[b, token].item()}
    found["figure6"] = {"step": frame.step, "sequence": b, "token": token, "feature": feature,
                        "p": last.pbar[b, token, :token + 1].tolist(), "v": frame.v[b, :token + 1, feature].tolist(),
                        "prefix_error": prefix.tolist(), "ones": ones[-1][b, token].nonzero()[:, 0].tolist(),
                        "zoom": [max(0, at - SHOWN // 2), min(token, at + SHOWN // 2)],
                        "v_negative": (frame.v[b, :token + 1, feature] < 0).double().mean().item()}
    found["figure4"] = _figure4(scene, pairs, sets, b, token)
    found["figure12"] = {"step": frame.step, "sequence": b, "delta_error": last.delta_error[b].tolist(),
                         "sum": last.delta_error[b].sum().item()}
    return found


def worst_token(pair, ones: Tensor) -> tuple[int, int]:
    """Sequence and row with the largest delta_lp - delta_hp, among rows with several ones where there are any (the
    paper's token 718 of figure 5)."""
    error = pair.delta_error
    tied = ones.sum(-1) > 1
    if tied.any():
        error = error.masked_fill(~tied, -torch.inf)
    return divmod(int(error.flatten().argmax()), error.shape[1])


def _ties(frame: Frame, pair, scene: Scene) -> dict:
    masks = {rule: maxima(pair.s, rule, scene.spec.epsilon) for rule in RULES}
    where = places(masks["one"])
    tied = masks["one"].sum(-1) > 1
    keys = (masks["one"] & tied[..., None]).sum(1)  # (B, T): tied rows a key is a maximum of
    tokens, index = frame.tokens.unique(return_inverse=True)
    weight = torch.zeros(len(tokens), dtype=torch.int64).index_add_(0, index.flatten(), keys.flatten())
    top = weight.topk(min(5, len(tokens)))
    return {"step": frame.step, "share": {rule: tied_share(mask) for rule, mask in masks.items()}, "places": where,
            "most_ones": int(masks["one"].sum(-1).max()),
            "tokens": [[int(tokens[i]), int(n)] for n, i in zip(top.values, top.indices, strict=True) if n]}


def _cumulative(scene: Scene, pairs) -> dict:
    """Paper figure 5a: the sums over the sequences of all frames in order, and their running sum. By frame: per_step,
    what a whole step would add, and steps_cumulative, its running sum over the frames, which is the paper's curve where
    there is a frame for every step."""
    sums = [(f.step, b, s) for f, pair in zip(scene.frames, pairs, strict=True)
            for b, s in enumerate(pair.delta_error.sum(-1).tolist())]
    values = torch.tensor([s for *_, s in sums], dtype=torch.float64)
    per_step = torch.stack([pair.delta_error.sum() * scene.sequences_per_step / len(f.tokens)
                            for f, pair in zip(scene.frames, pairs, strict=True)])
    return {"step": [step for step, *_ in sums], "sequence": [b for _, b, _ in sums], "sum": values.tolist(),
            "cumulative": values.cumsum(0).tolist(), "positive": (values > 0).double().mean().item(),
            "steps": [f.step for f in scene.frames], "per_step": per_step.tolist(),
            "steps_cumulative": per_step.cumsum(0).tolist()}


def _coherence(scene: Scene, pairs, sets) -> dict:
    """Cosines between tokens of a frame and between frames; the summed error's rank; projection of W_Q's change."""
    few = [_some(one) for one in sets]
    parts = {"pk": lambda a, b: coherence.cosines(a.pk, b.pk), "x": lambda a, b: coherence.cosines(a.x, b.x),
             "rank_one": lambda a, b: a.cosines(b)}
    found = {"between_tokens": [{name: coherence.summary(part(one, one), True) for name, part in parts.items()}
                                | {"step": f.step} for f, one in zip(scene.frames, few, strict=True)],
             "between_steps": [{name: coherence.summary(part(a, b), False) for name, part in parts.items()}
                               | {"steps": [f.step, g.step]}
                               for f, g, a, b in zip(scene.frames, scene.frames[1:], few, few[1:], strict=False)]}
    errors = [coherence.gradient_error(one, pair.delta_error.flatten(), f.q.shape[-1])
              for f, one, pair in zip(scene.frames, sets, pairs, strict=True)]
    found["error"] = [{"step": f.step, "norm": e.norm().item(), "effective_rank": coherence.effective_rank(e),
                       "top_share": coherence.top_share(e)} for f, e in zip(scene.frames, errors, strict=True)]
    found["growth"] = [_growth(f, g, e) for f, g, e in zip(scene.frames, scene.frames[1:], errors, strict=False)]
    # The whole way against the errors of all frames together, but for the last one, which moved nothing yet.
    found["growth_in_all"] = _growth(scene.frames[0], scene.frames[-1], sum(errors[:-1])) if len(errors) > 1 else None
    return found


def _growth(start: Frame, end: Frame, error: Tensor) -> dict:
    update = end.wq - start.wq
    return ({"steps": [start.step, end.step], "norm": update.double().norm().item()}
            | coherence.projection(error, update) | {"spectral": coherence.explained_growth(error, start.wq, update)})


def _some(one: coherence.RankOne) -> coherence.RankOne:
    """PAIRS tokens spread evenly."""
    index = torch.linspace(0, len(one) - 1, min(PAIRS, len(one))).long()
    return coherence.RankOne(one.pk[index], one.x[index])


def _figure4(scene: Scene, pairs, sets, b: int, token: int) -> dict:
    """The two rank-1 matrices that the paper shows: of the first and the last frame (of two tokens of one, if alone),
    with the features of PK and X that are largest over all tokens of each."""
    T = scene.frames[-1].tokens.shape[1]
    chosen = [(-1, b * T + token)]
    if len(sets) > 1:
        chosen.insert(0, (0, int(pairs[0].delta_error.flatten().argmax())))
    else:
        rest = pairs[-1].delta_error.flatten().clone()
        rest[b * T + token] = -torch.inf
        chosen.insert(0, (-1, int(rest.argmax())))
    a, c = (sets[i].matrix(n) for i, n in chosen)
    top = [{name: getattr(sets[i], name).abs().mean(0).topk(2).indices.tolist() for name in ("pk", "x")}
           for i, _ in chosen]
    return {"steps": [scene.frames[i].step for i, _ in chosen], "tokens": [n % T for _, n in chosen],
            "sequences": [n // T for _, n in chosen], "features": top,
            "cosine": ((a * c).sum() / (a.norm() * c.norm()).clamp_min(1e-300)).item()}
