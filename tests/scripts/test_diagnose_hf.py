"""Small random models of each class: queries, keys and directions against the weights, and the files end to end."""

import json
import math

import numpy as np
import pytest
import torch

from attention.rounding import round_bf16
from diagnostics import preconditions
from scripts import diagnose_hf

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = "the quick brown fox jumps over a lazy dog and then sleeps".split()
TEXT = " ".join(WORDS[i * i % 12] for i in range(60))
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=16, max_position_embeddings=64, initializer_range=0.5)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),  # wider than 32 / 4
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=16, n_positions=64,
                                            initializer_range=0.5),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved model of each class, all biases and norms away from 0 and 1, and a tokenizer of whole words: beside
    Llama, and alone, since transformers reads Qwen2's folder with Qwen2's own class."""
    root = tmp_path_factory.mktemp("hf")
    (root / "text.txt").write_text(TEXT)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(["?", *WORDS])}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    coder = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config())
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 1:
                    p.add_(torch.rand_like(p))
        model.save_pretrained(root / name)
    coder.save_pretrained(root / "llama")
    coder.save_pretrained(root / "words")
    return root


def load(folder):
    model, coder = diagnose_hf.load_model(str(folder), str(folder.parent / "words"), torch.float32, "cpu")
    return model, torch.tensor([coder(TEXT)["input_ids"]])


def direct(model, layer, x):
    """q (H, T, D), k (G, T, D) of a layer from its input x (T, C) and its weights, in NumPy float64."""
    config, name = model.config, model.config.model_type
    weights = {k: v.detach().double().numpy() for k, v in model.state_dict().items()}
    T = len(x)
    if name == "gpt2":
        w, b = (weights[f"transformer.h.{layer}.attn.c_attn.{n}"] for n in ("weight", "bias"))
        q, k, _ = np.split(x @ w + b, 3, axis=1)
        return tuple(y.reshape(T, 4, 8).swapaxes(0, 1) for y in (q, k))
    D = 16 if name == "qwen3" else 8
    at = f"model.layers.{layer}.self_attn."
    angle = np.arange(T)[:, None] * 10000.0 ** (-np.arange(0, D, 2) / D)
    cos, sin = (np.tile(f(angle), 2) for f in (np.cos, np.sin))
    found = []
    for which in "qk":
        y = x @ weights[f"{at}{which}_proj.weight"].T + weights.get(f"{at}{which}_proj.bias", 0.0)
        y = y.reshape(T, -1, D)
        if name == "qwen3":
            y = y / np.sqrt((y * y).mean(-1, keepdims=True) + config.rms_norm_eps) * weights[f"{at}{which}_norm.weight"]
        y = y.swapaxes(0, 1)
        found.append(y * cos + np.concatenate([-y[..., D // 2:], y[..., : D // 2]], -1) * sin)
    return tuple(found)


@pytest.mark.parametrize("name", CONFIGS)
def test_queries_keys_and_inputs(folders, name):
    """They are what the weights make of the layer's input, and what transformers' own eager attention exponentiates;
    the logits are those of the model as it loads by itself."""
    model, ids = load(folders / name)
    eager = transformers.AutoModelForCausalLM.from_pretrained(folders / name, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = eager(ids, output_attentions=True)
        assert torch.allclose(model(ids).logits, expected.logits, rtol=1e-4, atol=1e-4)
    T = ids.shape[1]
    mask = torch.ones(T, T).tril().bool()
    for i, (q, k, x, scaling, _) in enumerate(diagnose_hf.layers(model, ids)):
        for got, want in zip((q, k), direct(model, i, x.double().numpy()), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        assert len(k) == (4 if name == "gpt2" else 2) and len(q) == 4 and scaling == q.shape[-1] ** -0.5
        s = (q @ k.repeat_interleave(4 // len(k), 0).mT * scaling).masked_fill(~mask, -math.inf)
        torch.testing.assert_close(torch.softmax(s, -1), expected.attentions[i][0], rtol=1e-3, atol=1e-5)
    assert i == 1 and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", CONFIGS)
def test_directions_are_those_of_the_gradient(folders, name):
    """alpha sum_T e[T] (PK)[T]^T X[T] is the gradient of sum_T e[T] P[T] . S[T] with respect to W_Q, through norm and
    positions, P and K held fixed: what an error e of delta adds to dW_Q."""
    model, ids = load(folders / name)
    error = torch.randn(4, ids.shape[1], generator=torch.Generator().manual_seed(1)).double()
    modules = [m for m in model.modules() if hasattr(m, "c_attn") or hasattr(m, "q_proj")]
    for i, (q, k, x, scaling, back) in enumerate(diagnose_hf.layers(model, ids)):
        s = preconditions.bf16_scores(q, k, scaling)
        pk = back(preconditions.attention_weighted_keys(s, k))
        H, _, D = pk.shape
        found = torch.einsum("ht,htd,tc->hdc", error, pk, x.double()).flatten(0, 1) * scaling
        attention = modules[i]
        weight = attention.c_attn.weight if name == "gpt2" else attention.q_proj.weight
        with torch.enable_grad():
            calls = []
            hook = attention.register_forward_pre_hook(lambda m, a, kw, c=calls: c.append((a, kw)), with_kwargs=True)
            model(ids, use_cache=False)
            hook.remove()
            attention(*calls[0][0], **calls[0][1])
            queries = attention.recorded[0][0]
            wide = k.repeat_interleave(4 // len(k), 0)
            loss = (error.float()[..., None] * torch.softmax(s, -1).float() * (queries @ wide.mT) * scaling).sum()
            grad, = torch.autograd.grad(loss, weight)
        grad = grad.mT[:H * D] if name == "gpt2" else grad
        torch.testing.assert_close(found.float(), grad, rtol=1e-3, atol=1e-4 * grad.abs().max().item())


def test_repeated_maxima_and_cosines():
    """A planted layer: rows, keys and counts by rule, and every cosine by a loop over the matrices themselves."""
    draw = torch.Generator().manual_seed(0)
    T, D, C = 12, 4, 6
    k = torch.nn.functional.normalize(torch.randn(1, T, D, generator=draw), dim=-1)
    k[0, 7] = k[0, 2]
    k[0, 9] = k[0, 2]
    q = torch.randn(2, T, D, generator=draw)
    q[0, 8] = q[0, 10] = 50 * k[0, 2]
    s = preconditions.bf16_scores(q, k, 0.5)
    assert torch.equal(s[1, 5, :6], round_bf16(round_bf16(
        (round_bf16(q[1, 5]).double() * round_bf16(k[0, :6]).double()).sum(-1)) / 2)) and s[1, 5, 6] == -math.inf
    found = preconditions.tied_rows(s)
    rows = {(h, t): (n, keys) for h, t, n, keys in found["rows"]}
    assert rows[0, 8] == ({"exact": 2, "epsilon": 2, "one": 2}, [2, 7])
    assert rows[0, 10] == ({"exact": 3, "epsilon": 3, "one": 3}, [2, 7, 9])
    for rule, count in found["counts"].items():
        assert count == [sum(n[rule] > 1 for (h, _), (n, _) in rows.items() if h == head) for head in (0, 1)]

    pk, x = preconditions.attention_weighted_keys(s, k), torch.randn(T, C, generator=draw).double()
    p = torch.softmax(s, -1)
    torch.testing.assert_close(pk[1, 6], (p[1, 6, :, None] * k[0].double()).sum(0))
    x[5] = 1.001 * x[4]
    pk[0, 5] = 3 * pk[0, 4]
    found = preconditions.similarity(pk, x)
    matrices = torch.einsum("htd,tc->htdc", pk, x)

    def cosine(a, b):
        return float((a * b).sum() / (a.norm() * b.norm()))

    for h in range(2):
        pairs = [(t, u) for t in range(1, T) for u in range(t + 1, T)]
        for which, chosen in (("all", pairs), ("next", [(t, u) for t, u in pairs if u == t + 1])):
            whole = [cosine(matrices[h, t], matrices[h, u]) for t, u in chosen]
            # Of column 3, freed of the sign of its input feature.
            column = [cosine(matrices[h, t, :, 3], matrices[h, u, :, 3]) * float((x[t, 3] * x[u, 3]).sign())
                      for t, u in chosen]
            for name, values in (("matrices", whole), ("columns", column)):
                assert found[f"{name}_{which}"][h] == pytest.approx(np.mean(values))
                assert found[f"{name}_{which}_alike"][h] == pytest.approx(np.mean(np.abs(values) > 0.999))
    assert preconditions.closest_neighbours(pk[0], x) == 4 and found["matrices_next_alike"][0] >= 1 / 10


@pytest.mark.parametrize("name", CONFIGS)
def test_mean_keys(folders, name):
    """Of the keys that scores are made of, positions included, by layer and key head: in float64 from the weights."""
    model, ids = load(folders / name)
    if name in ("qwen2", "gpt2"):  # plants what keys have in common
        attention = model.get_submodule("model.layers.1.self_attn" if name == "qwen2" else "transformer.h.1.attn")
        bias, at = (attention.k_proj.bias, 8) if name == "qwen2" else (attention.c_attn.bias, 32 + 8)  # key head 1
        with torch.no_grad():
            bias[at:at + 8] += 30
    found, _ = diagnose_hf.examine(model, ids, 1e-3)
    for i, (_, _, x, _, _) in enumerate(diagnose_hf.layers(model, ids)):
        k = direct(model, i, x.double().numpy())[1]
        mean = k.mean(1, keepdims=True)
        expected = np.linalg.norm(mean[:, 0], axis=1) / np.sqrt(np.square(k - mean).sum(-1).mean(-1))
        assert found["key_mean"][i] == pytest.approx(expected, rel=1e-3)
        assert len(found["key_mean"][i]) == (4 if name == "gpt2" else 2)
    if name == "gpt2":  # without positions in the keys
        planted = found["key_mean"][1].pop(1)
        assert planted > 5 * max(found["key_mean"][1])
    elif name == "qwen2":
        assert np.argmax(found["key_mean"][1]) == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_end_to_end(folders, name, tmp_path, capsys):
    """Four files; counts are those of the listed rows, and the page and the figures' numbers follow from them."""
    out = tmp_path / "out"
    command = [str(folders / name), "--text", str(folders / "text.txt"), "--tokens", "40", "--out", str(out)]
    command += [] if name == "llama" else ["--tokenizer", str(folders / "words")]
    assert diagnose_hf.main([*command, "--device", "cpu"]) == 0
    assert {p.name for p in out.iterdir()} == {"preconditions.json", "preconditions.md", "figure8.png", "figure9.png"}
    found = json.loads((out / "preconditions.json").read_text())
    assert (found["tokens"], found["layers"], found["heads"], found["dtype"]) == (40, 2, 4, "bfloat16")
    assert found["pieces"][:4] == TEXT.split()[:4]
    for rule in ("exact", "epsilon", "one"):
        for layer in range(2):
            for head in range(4):
                listed = sum(r[0] == layer and r[1] == head and r[3][rule] > 1 for r in found["rows"])
                assert found["counts"][layer][rule][head] == listed
    assert sum(sum(layer["exact"]) for layer in found["counts"]) > 0  # words repeat, and BF16 is coarse
    eight = found["figure8"]
    best = found["similarity"][eight["layer"]]["matrices_next"][eight["head"]]
    assert abs(best) == max(abs(c) for layer in found["similarity"] for c in layer["matrices_next"])
    assert len(eight["columns"]) == 3 and len({round(abs(c), 9) for c in eight["columns"].values()}) == 1
    page = (out / "preconditions.md").read_text()
    assert page.split("\n\nColumn j")[0] in capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 120 and f"{eight['matrix']:.6f}" in page
    assert [len(layer) for layer in found["key_mean"]] == 2 * [found["key_heads"]]
    largest = max(max(layer) for layer in found["key_mean"])
    layer, = (i for i, means in enumerate(found["key_mean"]) if max(means) == largest)
    assert (f"In layer {layer}, key head {found['key_mean'][layer].index(largest)}, it is {largest:.3g} times as long"
            in " ".join(page.split()))
    zeros = diagnose_hf.page(found | {"key_mean": [[math.nan, 2.0], [math.nan, math.nan]]})  # heads without keys
    assert "In layer 0, key head 1, it is 2 times" in zeros and "2, nan." in " ".join(zeros.split())
    assert f"layer {eight['layer']}, head {eight['head']}" in " ".join(page.lower().split())


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2"])
def test_a_folder_without_a_tokenizer(folders, tmp_path, capsys, name):
    """transformers may make a tokenizer without words of it, which reads every text as nothing."""
    command = [str(folders / name), "--text", str(folders / "text.txt"), "--out", str(tmp_path / "out")]
    assert diagnose_hf.main([*command, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert f"{name} has no tokenizer" in said and "with --tokenizer" in said and "0 tokens" not in said
    assert diagnose_hf.main([*command, "--device", "cpu", "--tokenizer", str(folders / "gpt2")]) == 2
    assert "gpt2 has no tokenizer" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_user_errors(folders, tmp_path, capsys):
    """One sentence and status 2, with the values at fault; nothing is written."""
    llama, words, text, short = (folders / "llama", folders / "words", folders / "text.txt", tmp_path / "short.txt")
    short.write_text("the fox")
    bare, window = tmp_path / "bare", tmp_path / "window"
    for folder in (bare, window):
        folder.mkdir()
    transformers.OPTConfig(hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path / "opt")
    CONFIGS["llama"]().save_pretrained(bare)
    config = transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=10, max_window_layers=0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(window)
    for command, message in (
            ([llama, "--text", tmp_path / "none.txt"], "none.txt"),
            ([llama, "--text", short], "short.txt has 2 tokens"),
            ([llama, "--text", text, "--tokens", 4], "--tokens=4 must be at least 8"),
            ([llama, "--text", text, "--epsilon", -1], "--epsilon=-1.0"),
            ([tmp_path / "nowhere", "--text", text], "nowhere is no model that can be found"),
            ([tmp_path / "opt", "--text", text], "is of model_type 'opt'; known are llama, qwen2, qwen3, gpt2"),
            ([bare, "--text", text], "has no tokenizer that can be loaded"),
            ([bare, "--text", text, "--tokenizer", words], "the weights of"),
            ([window, "--text", text, "--tokenizer", words, "--tokens", 20], "a window of 10 tokens")):
        assert diagnose_hf.main([*map(str, command), "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error, error
    assert not (tmp_path / "out").exists()
