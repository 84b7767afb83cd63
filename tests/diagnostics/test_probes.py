"""Probes against direct float64 formulas on planted models, and that they leave a model as it was."""

import contextlib
import math

import numpy as np
import pytest
import torch

from attention import AttentionLayer, AttentionSpec
from diagnostics.probes import (
    as_record,
    attention_inputs,
    explain_nonfinite,
    first_nonfinite,
    key_mean,
    largest_eigenvalues,
    measure,
    nonfinite_gradients,
    wq_norms,
)
from model import GPT, GPTConfig

L, H, C, T, V = 2, 2, 32, 40, 64
D = C // H
AUTOCAST = contextlib.nullcontext()


def probe(model, idx, autocast) -> dict:
    """What a run's log has of it."""
    return as_record(measure(model, idx, autocast).tolist())


def planted(dtype=torch.float64, **switches) -> GPT:
    """Large scores, and no position embeddings nor mixing of tokens before layer 1: a token that repeats has equal
    keys in both layers, so exact ties."""
    torch.manual_seed(0)
    spec = AttentionSpec(**{"backend": "flash_fp32", "tile_k": 16} | switches)
    model = GPT(GPTConfig(n_layer=L, n_head=H, n_embd=C, block_size=T, vocab_size=V, dropout=0.1),
                [AttentionLayer(spec, i) for i in range(L)])
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
        model.transformer.h[0].attn.c_proj.weight.zero_()
        for block in model.transformer.h:
            block.attn.c_attn.weight.mul_(15)
            block.attn.c_attn.weight[:D].mul_(3)  # head 0 asks louder
    return model.to(dtype)


def tokens() -> torch.Tensor:
    return torch.randint(0, 12, (3, T), generator=torch.Generator().manual_seed(1))


def reference(model: GPT, idx: torch.Tensor, tile: int, epsilon: float):
    """By layer: rs (B, H, T), the most scores of a key tile within epsilon of its maximum, and the row maximum."""
    weights = {name: p.detach().double().numpy() for name, p in model.named_parameters()}

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weights[f"transformer.{name}.weight"]

    def gelu(x):
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    x, found = weights["transformer.wte.weight"][idx.numpy()], []
    for i in range(L):
        w = {k.split(f"h.{i}.")[1]: v for k, v in weights.items() if f"h.{i}." in k}
        qkv = (norm(x, f"h.{i}.ln_1") @ w["attn.c_attn.weight"].T).reshape(len(idx), T, 3, H, D)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)
        s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(-1, -2) / math.sqrt(D), -np.inf)
        with np.errstate(invalid="ignore"):  # masked from masked
            near = np.abs(s[..., None, :] - s[..., :, None]) - epsilon
        assert np.nanmin(np.abs(near)) > 1e-9  # or a verdict were a matter of rounding
        counts = []
        for start in range(0, T, tile):
            part = s[..., start:start + tile]
            largest = part.max(-1, keepdims=True)
            counts.append(((part >= largest - epsilon) & np.isfinite(part)).sum(-1))
        found.append((np.max(counts, 0), s.max(-1)))
        p = np.exp(s - s.max(-1, keepdims=True))
        o = (p / p.sum(-1, keepdims=True)) @ v
        x = x + o.swapaxes(1, 2).reshape(len(idx), T, C) @ w["attn.c_proj.weight"].T
        x = x + gelu(norm(x, f"h.{i}.ln_2") @ w["mlp.c_fc.weight"].T) @ w["mlp.c_proj.weight"].T
    return found


@pytest.mark.parametrize("switches, tile", [({}, 16), ({"tile_k": 0}, T), ({"backend": "standard", "tile_k": 0}, T)])
def test_ties_and_maxima(switches, tile):
    """The share of tied rows is exact: which of them a tile sees tied is part of it."""
    model, idx = planted(**switches), tokens()
    values = probe(model, idx, AUTOCAST)
    expected = reference(model, idx, tile, epsilon=1e-3)
    for i, (rs, row_max) in enumerate(expected):
        by_head = (rs > 1).mean((0, 2))
        assert 0.1 < by_head.mean() < 0.95
        assert values[f"probe/ties/layer{i}"] == pytest.approx(by_head.mean(), abs=1e-6)
        assert values[f"probe/ties_head/layer{i}"] == pytest.approx(by_head, abs=1e-5)
        assert values[f"probe/row_max/layer{i}"] == pytest.approx(row_max.max(), rel=1e-9)
    assert reference(model, idx, 16, 1e-3)[0][0].mean() != reference(model, idx, T, 1e-3)[0][0].mean()


@pytest.mark.parametrize("ratio", [0.0, 0.3, 5.0, 250.0])
def test_key_means_of_a_known_ratio(ratio):
    """Differences that sum to zero, of length 2 and 6, beside a common key of length 2 ratio."""
    own = torch.eye(D).repeat(2, 1)
    own[D:] *= -1
    common = torch.nn.functional.normalize(torch.arange(1.0, D + 1), dim=0)
    k = torch.stack([2 * own + 2 * ratio * common, 6 * own + 2 * ratio * common])
    assert key_mean(k).tolist() == pytest.approx([ratio, ratio / 3], rel=1e-5, abs=1e-6)


def test_key_means():
    """The mean key of a sequence over the root mean square of what its keys differ from it by, before smooth_k."""
    model, idx = planted(), tokens()
    with attention_inputs(model.eval()) as inputs, AUTOCAST:
        model(idx)
    values = probe(model, idx, AUTOCAST)
    for i, (_, k, _) in inputs.items():
        k = k.double().numpy()
        mean = k.mean(2, keepdims=True)
        own = np.sqrt(np.square(k - mean).sum(-1).mean(-1))
        expected = (np.sqrt(np.square(mean).sum(-1))[..., 0] / own).max(0)
        assert values[f"probe/key_mean_head/layer{i}"] == pytest.approx(expected, rel=1e-3) and expected.min() > 0.01
    x = model.transformer.h[0].ln_1(model.transformer.wte.weight[idx]).detach().numpy()  # without positions
    mean = x.mean(1, keepdims=True)
    expected = (np.sqrt(np.square(mean).sum(-1))[:, 0] / np.sqrt(np.square(x - mean).sum(-1).mean(-1))).max()
    assert values["probe/input_mean/layer0"] == pytest.approx(expected, rel=1e-3) and expected > 0.01
    smooth = probe(planted(smooth_k=1), idx, AUTOCAST)
    assert smooth["probe/key_mean_head/layer0"] == values["probe/key_mean_head/layer0"]
    assert smooth["probe/row_max/layer0"] != values["probe/row_max/layer0"]


def test_wq_norms():
    """Largest singular value by head; the gain of one head is seen in that head alone."""
    model = planted()
    values = probe(model, tokens(), AUTOCAST)
    for i, block in enumerate(model.transformer.h):
        weight = block.attn.c_attn.weight.detach().numpy()
        direct = [np.linalg.svd(weight[h * D:(h + 1) * D], compute_uv=False)[0] for h in range(H)]
        assert wq_norms(block.attn.c_attn.weight, H).tolist() == pytest.approx(direct, rel=1e-9)
        assert values[f"probe/wq_norm/layer{i}"] == pytest.approx(max(direct), rel=1e-9)
        assert values[f"probe/wq_norm_head/layer{i}"] == pytest.approx(direct, abs=1e-4)
        assert direct[0] > 2 * direct[1]
    planted_norms = torch.zeros(3 * C, C)
    planted_norms[0, 3], planted_norms[D + 1, 5] = 7.0, 1e-3  # rank one, of known norm, in both heads
    assert wq_norms(planted_norms, H).tolist() == pytest.approx([7.0, 1e-3], rel=1e-7)


@pytest.mark.parametrize("head", range(H))
def test_what_is_the_largest_of_a_layer_is_nan_where_a_heads_is(head):
    """Wherever it stands: Python's max keeps a NaN that comes first, and loses one that does not."""
    model = planted()
    model.transformer.h[1].attn.c_attn.weight.data[head * D, 0] = math.nan
    values = probe(model, tokens(), AUTOCAST)
    for name in ("wq_norm", "row_max"):
        assert math.isnan(values[f"probe/{name}/layer1"]) and math.isfinite(values[f"probe/{name}/layer0"])


def test_largest_eigenvalues():
    """Against an eigenvalue routine, close and equal ones included; zero stays zero, and NaN is no error."""
    torch.manual_seed(3)
    basis = torch.linalg.qr(torch.randn(4, 24, 24, dtype=torch.float64)).Q
    values = torch.rand(4, 24, dtype=torch.float64)
    values[0, 0], values[1, :2], values[2, :2] = 1e9, 5.0, torch.tensor([5.0, 5.0 * (1 - 1e-6)], dtype=torch.float64)
    values[3] *= 1e-30
    gram = basis @ torch.diag_embed(values) @ basis.mT
    assert largest_eigenvalues(gram) == pytest.approx(torch.linalg.eigvalsh(gram)[:, -1], rel=1e-8, abs=0)
    gram[0], gram[1, 0, 0] = 0, math.nan
    found = largest_eigenvalues(gram).tolist()
    assert found[0] == 0 and math.isnan(found[1]) and found[2] == pytest.approx(5.0)


def test_a_probe_leaves_the_model_alone():
    """Hooks, mode, gradients, weights and random state are as before; also where the forward pass raises."""
    model, idx = planted(torch.float32), tokens()
    layers = [m for m in model.modules() if isinstance(m, AttentionLayer)]
    model.train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    first, second = probe(model, idx, AUTOCAST), probe(model, idx, AUTOCAST)
    assert first == second  # dropout is off in it
    assert model.training and all(m.training for m in model.modules())
    model.eval()
    probe(model, idx, AUTOCAST)
    assert not model.training
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="exceeds block_size"):
        probe(model.train(), torch.zeros(1, T + 1, dtype=torch.int64), AUTOCAST)
    assert model.training
    with pytest.raises(KeyError), attention_inputs(model):
        raise KeyError("inside")
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    with attention_inputs(model) as inputs:
        model(idx)
        assert {i: [tuple(x.shape) for x in inputs[i]] for i in inputs} == {i: [(3, H, T, D)] * 3 for i in range(L)}
        assert len(layers) == L and all(len(m._forward_pre_hooks) == 1 for m in layers)


def test_autocast_is_the_runs():
    """Under BF16 autocast the scores are those of BF16 queries and keys: the probe sees what training sees."""
    model, idx = planted(torch.float32).eval(), tokens()
    bf16 = torch.autocast("cpu", torch.bfloat16)
    plain, cast = (probe(model, idx, autocast)["probe/row_max/layer0"] for autocast in (AUTOCAST, bf16))
    with attention_inputs(model) as inputs, torch.autocast("cpu", torch.bfloat16):
        model(idx)
    q, k, _ = inputs[0]
    assert q.dtype == torch.bfloat16
    direct = (q.double() @ k.double().mT / math.sqrt(D)).masked_fill(~torch.ones(T, T).tril().bool(), -math.inf).max()
    assert cast == pytest.approx(direct.item(), rel=1e-6) and cast != plain == pytest.approx(cast, rel=0.02)


def test_first_nonfinite():
    """Each place is told from the others; a finite pass says nothing."""
    idx = tokens()
    assert first_nonfinite(planted(torch.float32), idx, AUTOCAST) == ""

    model = planted(torch.float32)
    model.transformer.h[1].attn.c_attn.weight.data[40, 3] = math.nan
    assert "input of layer 1's attention is already non-finite" in first_nonfinite(model, idx, AUTOCAST)

    model = planted(torch.float32, backend="flash_bf16", stabilizer="paper", shift_cap=math.inf)
    weight = model.transformer.h[1].attn.c_attn.weight.data
    weight[D:2 * D] *= 100
    weight[C + D:C + 2 * D] = weight[D:2 * D]  # keys equal queries in head 1: large positive maxima, which repeat
    words = first_nonfinite(model, idx, AUTOCAST)
    assert words.startswith("layer 1, head 1, row ") and "flash_bf16 turned finite inputs" in words
    assert "stabilizer=paper(beta=2,epsilon=0.001,cap=inf)" in words and "row maximum" in words

    model = planted(torch.float32)
    model.transformer.h[-1].mlp.c_proj.weight.data[0] = math.inf  # after the last attention
    assert first_nonfinite(model, idx, AUTOCAST) == "the attention outputs are finite, the logits are not"


def test_logits_of_every_position_count():
    """A token's non-finite embedding in the middle of the last MLP's way shows only at its own position."""
    model, idx = planted(torch.float32), tokens()
    idx[:, :] %= 12
    idx[:, 7] = 50  # one token that occurs nowhere else
    mlp = model.transformer.h[-1].mlp

    def poison(_module, _args, output):
        output[:, 7] = math.nan
        return output

    handle = mlp.register_forward_hook(poison)
    try:
        assert "the logits are not" in first_nonfinite(model, idx, AUTOCAST)
    finally:
        handle.remove()


def test_explanation_of_a_step():
    """The micro-batch at fault is found among finite ones; otherwise the backward pass is, with its parameters."""
    model = planted(torch.float32)
    model.transformer.wte.weight.data[50] = math.nan
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(V, C))  # untied: only a batch with token 50 is affected
    good, bad = tokens(), tokens()
    bad[1, 3] = 50
    assert "layer 0's attention is already non-finite" in explain_nonfinite(model, [good, bad, good], AUTOCAST)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    words = explain_nonfinite(model, iter([good, good]), AUTOCAST)
    assert words == "the forward pass is finite, the backward pass is not; gradients that are not finite: none"
    for name in ("transformer.h.0.mlp.c_fc.weight", "transformer.h.1.ln_1.weight", "transformer.h.1.ln_2.weight",
                 "transformer.ln_f.weight"):
        model.get_parameter(name).grad[0] = math.inf
    assert nonfinite_gradients(model) == ["transformer.h.0.mlp.c_fc.weight", "transformer.h.1.ln_1.weight",
                                          "transformer.h.1.ln_2.weight"]
    assert explain_nonfinite(model, [good], AUTOCAST).endswith("transformer.h.1.ln_2.weight")
