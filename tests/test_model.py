"""The model against direct formulas, nanoGPT's initialisation, and what each option promises."""

import math

import pytest
import torch
import torch.nn.functional as F

from attention import AttentionLayer, AttentionSpec, RowStats
from embedding import embedding
from model import GPT, GPTConfig

SMALL = dict(n_layer=2, n_head=4, n_embd=64, block_size=32, vocab_size=130)


def scores(q, k):
    T = q.shape[2]
    s = q @ k.mT / math.sqrt(q.shape[-1])
    return s.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -math.inf)


def exact(q, k, v, stats=False, counted=None):
    """Materialised attention in the inputs' precision, with the row maxima that qk_clip reads."""
    s = scores(q, k)
    o = s.softmax(-1) @ v
    return (o, RowStats((s == s.amax(-1, keepdim=True)).sum(-1)[:counted], s.amax(-1))) if stats else o


def gpt(attend=exact, seed=0, **fields):
    torch.manual_seed(seed)
    config = GPTConfig(**SMALL | fields)
    return GPT(config, [attend] * config.n_layer)


def tokens(*shape, seed=0, below=130):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def spread(model, std=0.2):
    """Weights as large as trained ones; fresh ones leave attention nearly uniform."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(std * torch.randn(p.shape, generator=generator))
    return model


# ---- shape, names, initialisation ----


def test_parameter_names_are_nanogpts():
    block = ("ln_1.weight ln_1.bias attn.c_attn.weight attn.c_attn.bias attn.c_proj.weight attn.c_proj.bias "
             "ln_2.weight ln_2.bias mlp.c_fc.weight mlp.c_fc.bias mlp.c_proj.weight mlp.c_proj.bias").split()
    want = {f"transformer.{n}" for n in "wte.weight wpe.weight ln_f.weight ln_f.bias".split()} | {"lm_head.weight"}
    want |= {f"transformer.h.{i}.{name}" for i in range(2) for name in block}
    assert set(gpt(bias=True).state_dict()) == want
    layers = [AttentionLayer(AttentionSpec(backend="standard"), i) for i in range(2)]
    assert set(GPT(GPTConfig(**SMALL, bias=True), layers).state_dict()) == want
    unbiased = gpt(qk_clip=1.0)
    assert set(unbiased.state_dict()) == {n for n in want if not n.endswith("bias")}
    assert unbiased.lm_head.weight is unbiased.transformer.wte.weight


def test_initialisation_has_nanogpts_spread():
    model = gpt(n_layer=3, n_embd=128, vocab_size=1000, block_size=256, bias=True)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.full_like(p, 0.0 if name.endswith("bias") else 1.0)), name
            continue
        std = 0.02 / math.sqrt(6) if name.endswith("c_proj.weight") else 0.02
        assert p.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * p.numel())), name  # 5 standard errors
        assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name


def test_gpt2_small_has_the_published_size():
    with torch.device("meta"):
        plain = GPT(GPTConfig(vocab_size=50257, bias=True), [exact] * 12)
    assert plain.num_params() == 124_439_808 - 1024 * 768  # what is released has positions, too
    assert plain.flops_per_token() == 6 * plain.num_params() + 12 * 12 * 12 * 64 * 1024


def test_weights_follow_from_the_seed_and_options_leave_the_others_alone():
    plain = gpt().state_dict()
    optional = gpt(qk_norm=True, gated_attention=True, logit_softcap=5.0).state_dict()
    assert all(torch.equal(value, optional[name]) for name, value in plain.items())
    assert not torch.equal(gpt(seed=1).lm_head.weight, plain["lm_head.weight"])
    torch.manual_seed(0)
    first, second = (GPT(GPTConfig(**SMALL), [exact] * 2) for _ in range(2))
    assert torch.equal(first.lm_head.weight, plain["lm_head.weight"])
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_loss_of_a_fresh_model_is_the_logarithm_of_the_vocabulary():
    x = tokens(4, 33)
    loss = gpt()(x[:, :-1], x[:, 1:])[1]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(130), abs=0.05)


# ---- forward and backward ----


@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_embedding_is_torchs(shape):
    """Values and gradients bit for bit, with tokens that repeat; and torch's rules of an operator."""
    idx, weight = tokens(*shape, below=4), torch.randn(6, 8, requires_grad=True)
    upstream = torch.randn(*shape, 8)
    ours, theirs = embedding(idx, weight), F.embedding(idx, weight)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(one, weight, upstream)[0] for one in (ours, theirs)))
    torch.library.opcheck(embedding, (idx, weight))


@pytest.mark.parametrize("gelu", ["exact", "tanh"])
def test_forward_equals_the_formula(gelu):
    model, x = spread(gpt(bias=True, gelu=gelu)), tokens(2, 9)
    p = dict(model.named_parameters())
    h = p["transformer.wte.weight"][x] + p["transformer.wpe.weight"][:9]

    def linear(name, h):
        return h @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(name, h):
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return h * p[f"{name}.weight"] + p[f"{name}.bias"]

    def activate(u):
        if gelu == "exact":
            return u * 0.5 * (1 + torch.erf(u / math.sqrt(2)))
        return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))

    for i in range(2):
        at = f"transformer.h.{i}."
        qkv = linear(at + "attn.c_attn", norm(at + "ln_1", h))
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in qkv.split(64, dim=-1))
        h = h + linear(at + "attn.c_proj", exact(q, k, v).transpose(1, 2).flatten(2))
        h = h + linear(at + "mlp.c_proj", activate(linear(at + "mlp.c_fc", norm(at + "ln_2", h))))
    want = norm("transformer.ln_f", h) @ p["transformer.wte.weight"].T
    logits, loss = model(x, x)
    assert torch.allclose(logits, want, atol=1e-4, rtol=1e-4)
    assert loss.item() == pytest.approx(-want.log_softmax(-1).gather(-1, x[..., None]).mean().item(), rel=1e-5)


def test_without_targets_the_last_position_comes_back():
    model, x = gpt(), tokens(2, 9)
    last, loss = model(x)
    assert loss is None and last.shape == (2, 1, 130)
    assert torch.allclose(last, model(x, x)[0][:, -1:], atol=1e-6)


def test_targets_of_minus_one_do_not_count():
    model, x, y = gpt(), tokens(2, 8), tokens(2, 8, seed=1)
    y[:, 3:] = -1
    logits, loss = model(x, y)
    assert loss.item() == pytest.approx(F.cross_entropy(logits[:, :3].flatten(0, 1), y[:, :3].flatten()).item())


def test_every_parameter_gets_a_gradient_and_no_token_sees_the_future():
    model, x = spread(gpt(bias=True, qk_norm=True, gated_attention=True, logit_softcap=30.0)), tokens(2, 9)
    model(x, tokens(2, 9, seed=1))[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0, name
    changed = x.clone()
    changed[:, 5:] = (x[:, 5:] + 1) % 130
    before, after = model(x, x)[0], model(changed, x)[0]
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.allclose(before[:, 5], after[:, 5])


@pytest.mark.parametrize("parts", [2, 3, 4, 6, 12])
def test_accumulated_gradients_equal_one_large_batch(parts):
    model, x, y = gpt().double(), tokens(12, 16), tokens(12, 16, seed=1)
    model(x, y)[1].backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (model(xs, ys)[1].double() / parts).backward()  # the loss is FP32, whatever the weights are
    for name, p in model.named_parameters():
        assert (p.grad - want[name]).abs().max() <= 1e-6 * want[name].abs().max(), name


def test_an_fp32_attention_output_reaches_the_projection_uncast():
    seen = {}

    def attend(q, k, v, stats=False):
        seen["in"] = q.dtype
        return exact(q, k, v).float()

    model = gpt(attend, gated_attention=True)
    model.transformer.h[0].attn.c_proj.register_forward_pre_hook(lambda m, args: seen.update(projection=args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens(1, 8), tokens(1, 8))[1].backward()
    assert seen == {"in": torch.bfloat16, "projection": torch.float32}


def test_attention_gets_views_of_one_projection():
    def attend(q, k, v, stats=False):
        assert q.shape == (2, 4, 8, 16)
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        return exact(q, k, v)

    gpt(attend)(tokens(2, 8))


def test_dropout_acts_in_training_alone():
    model, x = gpt(dropout=0.5), tokens(2, 8)
    assert not torch.equal(model(x)[0], model(x)[0])
    model.eval()
    assert torch.equal(model(x)[0], gpt()(x)[0])


def test_compiled_equals_eager_to_rounding():
    model, x = spread(gpt(qk_clip=1.0)), tokens(2, 9)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x, x)[1], model(x, x)[1])
    assert model.apply_qk_clip().isfinite().all()


# ---- options ----


def test_qk_norm_is_a_learnable_rms_norm_of_each_head():
    seen = {}

    def attend(q, k, v, stats=False):
        seen.update(q=q, k=k, v=v)
        return exact(q, k, v)

    model = spread(gpt(attend, qk_norm=True, n_layer=1))
    attn, x = model.transformer.h[0].attn, torch.randn(2, 9, 64)
    attn(x)
    for i, name in enumerate("qk"):
        raw = (x @ attn.c_attn.weight[64 * i : 64 * i + 64].T).unflatten(-1, (4, 16)).transpose(1, 2)
        scale = getattr(attn, f"{name}_norm").weight
        assert scale.shape == (16,)
        want = raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
        assert torch.allclose(seen[name], want, atol=1e-5)
    assert torch.allclose(seen["v"].transpose(1, 2).flatten(2), x @ attn.c_attn.weight[128:].T, atol=1e-5)


def test_qk_norm_keeps_the_projections_dtype():
    def attend(q, k, v, stats=False):
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        return exact(q, k, v)

    with torch.autocast("cpu", torch.bfloat16):
        gpt(attend, qk_norm=True)(tokens(1, 8))


def test_gated_attention_multiplies_each_output_by_a_sigmoid_of_the_input():
    gated = spread(gpt(gated_attention=True)).transformer.h[0].attn
    x = torch.randn(2, 9, 64)
    q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in gated.c_attn(x).split(64, dim=-1))
    gate = 1 / (1 + torch.exp(-(x @ gated.c_gate.weight.T)))
    want = (exact(q, k, v).transpose(1, 2).flatten(2) * gate) @ gated.c_proj.weight.T
    assert torch.allclose(gated(x), want, atol=1e-5)


def test_logit_softcap_is_a_scaled_tanh():
    plain, capped, x = spread(gpt()), spread(gpt(logit_softcap=2.0)), tokens(2, 9)
    raw, got = plain(x, x)[0], capped(x, x)[0]
    assert raw.abs().max() > 4 and got.abs().max() <= 2
    assert torch.allclose(got, 2 * torch.tanh(raw / 2), atol=1e-6)


def first_layer_maxima(model, x):
    """(H,) largest score of each head of layer 0, computed here."""
    h = model.transformer.h[0].ln_1(model.transformer.wte(x) + model.transformer.wpe.weight[: x.shape[1]])
    q, k, _ = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in model.transformer.h[0].attn.c_attn(h).split(64, -1))
    return scores(q, k).amax((0, 2, 3))


@pytest.mark.parametrize("bias", [False, True])
def test_qk_clip_brings_the_largest_score_down_to_tau(bias):
    model, micro_batches = spread(gpt(bias=bias, qk_clip=1.0)), [tokens(2, 16, seed=s) for s in range(3)]
    before = torch.stack([first_layer_maxima(model, x) for x in micro_batches]).amax(0)
    tau = before.median().item()
    model = spread(gpt(bias=bias, qk_clip=tau))
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    for x in micro_batches:
        model(x, x)[1].backward()
    recorded = model.apply_qk_clip()
    assert recorded.shape == (2, 4) and torch.allclose(recorded[0], before, rtol=1e-5)
    after = torch.stack([first_layer_maxima(model, x) for x in micro_batches]).amax(0)
    assert torch.allclose(after, before.clamp(max=tau), rtol=1e-4)
    assert (before > tau).any() and (before < tau).any()
    name = "transformer.h.0.attn.c_attn.weight"
    gamma = (tau / before).clamp(max=1)[:, None, None].sqrt()
    old, new = weights[name].view(3, 4, 16, 64), model.get_parameter(name).view(3, 4, 16, 64)
    assert torch.allclose(new[0], old[0] * gamma) and torch.allclose(new[1], old[1] * gamma)
    assert torch.equal(new[2], old[2])
    assert all(torch.equal(weights[n], p) for n, p in model.named_parameters() if "c_attn" not in n)
    assert torch.equal(model.apply_qk_clip(), torch.full((2, 4), -math.inf))  # forgotten, and nothing more to do


def test_qk_clip_reads_backend_statistics_and_all_ranks():
    layers = [AttentionLayer(AttentionSpec(backend="standard"), i) for i in range(2)]
    torch.manual_seed(0)
    model, plain, x = spread(GPT(GPTConfig(**SMALL, qk_clip=1e9), layers)), spread(gpt(qk_clip=1e9)), tokens(2, 16)
    model(x, x), plain(x, x)
    recorded, want = model.apply_qk_clip(), plain.apply_qk_clip()
    assert torch.allclose(recorded, want, rtol=0.05)  # "standard" rounds to BF16
    other_rank = torch.full((2, 4), 4e9)
    old = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    assert torch.equal(model.apply_qk_clip(lambda mine: torch.maximum(mine, other_rank)), other_rank)
    assert torch.allclose(model.transformer.h[0].attn.c_attn.weight[:128], old[:128] / 2)


def test_qk_clip_ignores_evaluation_and_scores_that_are_not_finite():
    model, x = gpt(qk_clip=1e-6), tokens(2, 9)
    model.eval()(x, x)
    assert (model.apply_qk_clip() == -math.inf).all()
    old = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    model.apply_qk_clip(lambda mine: torch.full_like(mine, math.nan))
    model.apply_qk_clip(lambda mine: torch.full_like(mine, math.inf))
    model.apply_qk_clip(lambda mine: torch.full_like(mine, 7.0), torch.tensor(True))  # a step that was left out
    assert torch.equal(model.transformer.h[0].attn.c_attn.weight, old)


# ---- sampling, cropping, errors ----


def test_greedy_sampling_takes_the_likeliest_real_token_and_crops_long_prompts():
    model, x = spread(gpt().eval()), tokens(1, 40)
    out = model.generate(x, 3, temperature=0, n_tokens=50)
    assert torch.equal(out[:, :40], x) and out.shape == (1, 43)
    for t in range(40, 43):
        assert out[0, t] == model(out[:, t - 32 : t])[0][0, -1, :50].argmax()


def test_sampling_follows_the_distribution_and_top_k():
    model, x = spread(gpt().eval()), tokens(1, 5).repeat(4000, 1)
    drawn = model.generate(x, 1, temperature=2.0, top_k=4, generator=torch.Generator().manual_seed(0))[:, -1]
    logits = model(x[:1])[0][0, -1]
    kept = logits.topk(4).indices
    want = (logits[kept] / 2).softmax(0)
    got = torch.stack([(drawn == token).float().mean() for token in kept])
    assert got.sum() == 1
    assert (got - want).abs().max() < 5 * 0.5 / math.sqrt(4000)  # 5 standard errors at the widest
    again = model.generate(x, 1, temperature=2.0, top_k=4, generator=torch.Generator().manual_seed(0))[:, -1]
    assert torch.equal(drawn, again)


@pytest.mark.parametrize("fields, message", [
    (dict(n_embd=65), "n_embd=65 is not a multiple of n_head=4"),
    (dict(n_layer=0), "n_layer=0 must be at least 1"),
    (dict(dropout=1.0), r"dropout=1.0 must lie in \[0, 1\)"),
    (dict(gelu="relu"), "gelu='relu' is not one of exact, tanh"),
    (dict(qk_clip=-1.0), "qk_clip=-1.0"),
    (dict(logit_softcap=math.inf), "logit_softcap=inf"),
    (dict(qk_norm=True, qk_clip=100.0), "qk_clip=100.0 with qk_norm"),
])
def test_a_config_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**SMALL | fields)


def test_misuse_is_explained():
    with pytest.raises(ValueError, match="1 attention layers for a model with n_layer=2"):
        GPT(GPTConfig(**SMALL), [exact])
    with pytest.raises(ValueError, match="qk_clip > 0"):
        gpt().apply_qk_clip()
    with pytest.raises(ValueError, match="temperature=-1"):
        gpt().generate(tokens(1, 3), 1, temperature=-1)
    with pytest.raises(ValueError, match="top_k=0"):
        gpt().generate(tokens(1, 3), 1, top_k=0)
