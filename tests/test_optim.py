"""The schedule against nanoGPT's formula; AdamW and Muon against torch's; groups, state and determinism."""

import dataclasses
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from config import Config
from model import GPT, GPTConfig
from optim import Muon, build_optimizer, learning_rate, newton_schulz

CONFIG = Config(learning_rate=1e-2, min_lr=1e-3, warmup_iters=4, lr_decay_iters=20, weight_decay=0.1, eps=1e-7,
                muon_learning_rate=5e-3)


def exact(q, k, v, stats=False):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def gpt(**fields):
    torch.manual_seed(0)
    config = GPTConfig(**dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=50, bias=True) | fields)
    return GPT(config, [exact] * config.n_layer)


def set_gradients(model, step):
    x = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(x, x.roll(-1, 1))[1].backward()


def run(model, optimizer, steps):
    for step in steps:
        optimizer.set_lr(step)
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def with_(**changes):
    return dataclasses.replace(CONFIG, **changes)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def same(a, b):
    """Whether nested states hold the same bits."""
    return all(torch.equal(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


# ---- schedule ----


def test_schedule_is_nanogpts():
    assert learning_rate(0, CONFIG) == 1e-2 / 5
    assert learning_rate(3, CONFIG) == 1e-2 * 4 / 5
    assert learning_rate(4, CONFIG) == pytest.approx(1e-2)
    assert learning_rate(12, CONFIG) == pytest.approx(5.5e-3)  # halfway down the cosine
    assert learning_rate(8, CONFIG) == pytest.approx(1e-3 + 0.5 * (1 + math.cos(math.pi / 4)) * 9e-3)
    assert [learning_rate(step, CONFIG) for step in (20, 21, 10**6)] == [1e-3] * 3


def test_schedule_without_decay_warms_up_and_stays():
    config = with_(decay_lr=False)
    assert [learning_rate(step, config) for step in (0, 3, 4, 20, 10**6)] == [1e-2 / 5, 1e-2 * 4 / 5] + [1e-2] * 3


def test_schedule_with_nothing_to_decay_or_warm_up():
    config = with_(warmup_iters=20)
    assert learning_rate(19, config) == 1e-2 * 20 / 21 and learning_rate(20, config) == 1e-3
    assert learning_rate(0, with_(warmup_iters=0)) == pytest.approx(1e-2)
    assert learning_rate(5, with_(min_lr=0.0, lr_decay_iters=5)) == 0.0


def test_set_lr_moves_every_group_along_one_curve():
    optimizer = build_optimizer(gpt(), with_(optimizer="muon"), "cpu")
    for step in (0, 4, 12, 30):
        optimizer.set_lr(step)
        lr = learning_rate(step, CONFIG)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(lr if group["name"].startswith("adamw") else lr / 2)


# ---- groups ----


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("bias", [True, False])
def test_every_parameter_is_in_exactly_one_group(kind, bias):
    model = gpt(bias=bias, qk_norm=True, gated_attention=True)
    optimizer = build_optimizer(model, with_(optimizer=kind), "cpu")
    named = [pair for g in optimizer.param_groups for pair in zip(g["names"], g["params"], strict=True)]
    assert len(named) == len(dict(named)) and dict(named).keys() == dict(model.named_parameters()).keys()
    assert all(dict(model.named_parameters())[name] is p for name, p in named)
    for group in optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            in_muon = kind == "muon" and p.dim() == 2 and name.startswith("transformer.h.")
            assert group["name"].startswith("muon" if in_muon else "adamw"), name
            assert group["weight_decay"] == (CONFIG.muon_weight_decay if in_muon else 0.1 * (p.dim() >= 2)), name


def test_description_names_counts_rates_and_decay():
    text = build_optimizer(gpt(bias=False), with_(optimizer="muon", muon_qkv="head"), "cpu").describe()
    common = "peak lr 0.005, weight decay 0.01, momentum 0.95, row blocks"
    assert text.splitlines() == [
        "adamw, decayed: 2 tensors, 2,112 parameters, peak lr 0.01, weight decay 0.1, betas 0.9, 0.95, eps 1e-07, "
        "fused: transformer.wte.weight, transformer.wpe.weight",
        "adamw, not decayed: 5 tensors, 160 parameters, peak lr 0.01, weight decay 0, betas 0.9, 0.95, eps 1e-07, "
        "fused: transformer.h.*.ln_1.weight x2, transformer.h.*.ln_2.weight x2, transformer.ln_f.weight",
        f"muon, qkv by head: 2 tensors, 6,144 parameters, {common} 12, "
        "Newton-Schulz in float32: transformer.h.*.attn.c_attn.weight x2",
        f"muon: 6 tensors, 18,432 parameters, {common} 1, "
        "Newton-Schulz in float32: transformer.h.*.attn.c_proj.weight x2, transformer.h.*.mlp.c_fc.weight x2, "
        "transformer.h.*.mlp.c_proj.weight x2",
    ]


def test_a_zero_is_honoured():
    config = with_(optimizer="muon", weight_decay=0.0, muon_weight_decay=0.0, muon_momentum=0.0, beta1=0.0, eps=0.0)
    optimizer = build_optimizer(gpt(), config, "cpu")
    for group in optimizer.param_groups:
        assert group["weight_decay"] == 0
        assert group["momentum"] == 0 if "momentum" in group else group["betas"] == (0, 0.95) and group["eps"] == 0
    model = gpt()
    before = model.transformer.wte.weight.detach().clone()
    optimizer = build_optimizer(model, with_(weight_decay=0.0), "cpu")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(model.transformer.wte.weight, before)


@pytest.mark.parametrize("changes, message", [(dict(optimizer="sgd"), "optimizer='sgd' is not adamw or muon"),
                                              (dict(optimizer="muon", muon_qkv="row"), "muon_qkv='row' is not one of")])
def test_unknown_choices_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build_optimizer(gpt(), with_(**changes), "cpu")


# ---- AdamW ----


def test_adamw_is_the_published_update():
    """Two steps of Loshchilov and Hutter's Algorithm 2, written out."""
    model = gpt()
    optimizer = build_optimizer(model, CONFIG, "cpu")
    name = "transformer.h.1.mlp.c_fc.weight"
    w = model.get_parameter(name).detach().double()
    m = v = torch.zeros_like(w)
    for step in range(2):
        optimizer.set_lr(step)
        lr = learning_rate(step, CONFIG)
        set_gradients(model, step)
        g = model.get_parameter(name).grad.double()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
        w = w * (1 - lr * 0.1) - lr * m_hat / (v_hat.sqrt() + 1e-7)
        optimizer.step()
    assert (model.get_parameter(name).double() - w).abs().max() < 1e-6


# ---- Muon ----


def test_newton_schulz_gives_an_almost_orthogonal_matrix():
    for shape in ((32, 32), (24, 80), (80, 24), (5, 16, 48)):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        o = newton_schulz(g)
        assert o.shape == g.shape and o.dtype == g.dtype
        u, s, vh = torch.linalg.svd(g, full_matrices=False)
        got = u.mT @ o @ vh.mT  # diagonal: the singular vectors stay
        diagonal = torch.diagonal(got, dim1=-2, dim2=-1)
        assert (got - torch.diag_embed(diagonal)).abs().max() < 1e-4
        x = s / s.square().sum(-1, keepdim=True).sqrt()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
        assert (diagonal - x).abs().max() < 1e-4
        assert 0.6 < diagonal[s > 0.05 * s.amax()].min() and diagonal.max() < 1.3


def test_newton_schulz_equals_torchs_but_for_bf16_and_of_a_zero_matrix_is_zero():
    from torch.optim._muon import _zeropower_via_newtonschulz

    for shape in ((32, 32), (24, 80), (80, 24)):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        theirs = _zeropower_via_newtonschulz(g, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
        precise = newton_schulz(g)
        assert 0 < (theirs - precise).abs().max() < 0.05  # BF16, five steps
        assert torch.allclose(newton_schulz(g.double()).float(), precise, atol=1e-4)
    assert torch.equal(newton_schulz(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("shape", [(32, 32), (24, 80), (80, 24)])
def test_muon_follows_torch_muon(shape):
    """Where definitions coincide: one block, RMS-matched. torch orthogonalises in BF16, hence the tolerance."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    lr, decay = 0.02, 0.1
    a = Muon([dict(params=[ours])], lr=lr, momentum=0.95, weight_decay=decay)
    b = torch.optim.Muon([theirs], lr=lr, momentum=0.95, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        ours.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    moved = (theirs - start).square().mean().sqrt()
    assert (ours - theirs).square().mean().sqrt() < 0.01 * moved


def test_the_update_has_rms_one_fifth():
    """0.2 sqrt(max(m, n)) times a semi-orthogonal matrix: what AdamW's updates measure (Liu et al. 2025)."""
    for shape, blocks in (((96, 32), 1), ((96, 32), 3), ((96, 32), 12), ((32, 128), 1)):
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(4))
        Muon([dict(params=[p], blocks=blocks)], lr=1.0, momentum=0.95, weight_decay=0.0).step()
        assert p.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)  # singular values 0.7..1.2


@pytest.mark.parametrize("qkv, blocks", [("whole", 1), ("matrix", 3), ("head", 12)])
def test_fused_qkv_is_orthogonalised_as_asked(qkv, blocks):
    model = gpt()
    optimizer = build_optimizer(model, with_(optimizer="muon", muon_qkv=qkv, muon_weight_decay=0.0), "cpu")
    set_gradients(model, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    lr = CONFIG.muon_learning_rate / 5  # step 0 of the warm-up
    for name, parts in (("transformer.h.0.attn.c_attn.weight", blocks), ("transformer.h.0.mlp.c_fc.weight", 1),
                        ("transformer.h.0.attn.c_proj.weight", 1)):
        p, grad = model.get_parameter(name), model.get_parameter(name).grad
        rows = len(p) // parts
        want = torch.cat([newton_schulz(g) * 0.2 * math.sqrt(max(g.shape)) for g in grad.split(rows)])
        got = (before[name] - p) / lr
        assert torch.allclose(got, want, atol=1e-3), name  # atol: FP32 weights minus small updates


def test_row_blocks_must_divide_the_rows():
    with pytest.raises(ValueError, match=r"shape \(10, 4\) into 3 row blocks"):
        Muon([dict(params=[torch.nn.Parameter(torch.zeros(10, 4))], blocks=3)], lr=1.0, momentum=0.9, weight_decay=0.0)


# ---- state, determinism, scaling ----


def saved(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_survives_a_checkpoint_bit_for_bit(kind):
    config = with_(optimizer=kind, muon_qkv="head")
    model = gpt()
    optimizer = build_optimizer(model, config, "cpu")
    run(model, optimizer, range(3))
    state = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    run(model, optimizer, range(3, 6))
    resumed = gpt()
    resumed.load_state_dict(state["model"])
    other = build_optimizer(resumed, config, "cpu")
    other.load_state_dict(state["optimizer"])
    kept = saved(other.state_dict())
    run(resumed, other, range(3, 6))
    assert equal(resumed, model)
    assert torch.equal(state["optimizer"][kind][name := "transformer.h.0.attn.c_proj.weight"][
        key := "momentum" if kind == "muon" else "exp_avg"], kept[kind][name][key])  # a copy: training changed it not


def test_state_before_the_first_step_loads():
    model = gpt()
    optimizer = build_optimizer(model, CONFIG, "cpu")
    optimizer.load_state_dict(saved(optimizer.state_dict()))
    run(model, optimizer, range(2))
    plain = gpt()
    run(plain, build_optimizer(plain, CONFIG, "cpu"), range(2))
    assert equal(model, plain)


def test_a_resumed_run_takes_its_hyperparameters_from_its_config():
    model = gpt()
    optimizer = build_optimizer(model, CONFIG, "cpu")
    run(model, optimizer, range(2))
    other = build_optimizer(model, with_(weight_decay=0.3, eps=1e-5), "cpu")
    other.load_state_dict(saved(optimizer.state_dict()))
    assert [g["weight_decay"] for g in other.param_groups] == [0.3, 0.0]
    assert [g["eps"] for g in other.param_groups] == [1e-5] * 2


def test_state_of_another_run_is_refused():
    model = gpt()
    optimizer = build_optimizer(model, CONFIG, "cpu")
    run(model, optimizer, range(1))
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"is of adamw, this run's optimizer is adamw \+ muon"):
        build_optimizer(model, with_(optimizer="muon"), "cpu").load_state_dict(state)
    with pytest.raises(ValueError, match=r"differ in 12 parameters, first transformer\.h\.2\.attn\.c_attn\.bias"):
        build_optimizer(gpt(n_layer=3), CONFIG, "cpu").load_state_dict(state)
    with pytest.raises(ValueError, match=r"of transformer\.wte\.weight has shape \(50, 32\), the parameter \(60, 32\)"):
        build_optimizer(gpt(vocab_size=60), CONFIG, "cpu").load_state_dict(state)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_two_runs_are_bit_equal(kind):
    models = [gpt(), gpt()]
    for model in models:
        run(model, build_optimizer(model, with_(optimizer=kind), "cpu"), range(4))
    assert equal(*models) and not equal(models[0], gpt())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_reduces_the_loss(kind):
    model, x = gpt(), torch.arange(48).view(3, 16)
    optimizer = build_optimizer(model, with_(optimizer=kind), "cpu")
    first = model(x, x.roll(-1, 1))[1].item()
    for step in range(20):
        optimizer.set_lr(step)
        optimizer.zero_grad()
        loss = model(x, x.roll(-1, 1))[1]
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * first


def test_an_overflow_under_a_loss_scale_skips_every_optimizer_together():
    """FP16: a gradient that overflows in an AdamW parameter must not let Muon step alone."""
    model = gpt()
    optimizer = build_optimizer(model, with_(optimizer="muon"), "cpu")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for overflow in (False, True):
        before = gpt()
        before.load_state_dict(model.state_dict())
        set_gradients(model, 0)
        true = model.lm_head.weight.grad.clone()
        for p in model.parameters():
            p.grad *= scaler.scale(torch.ones(())).item()
        if overflow:
            model.transformer.wpe.weight.grad[0, 0] = math.inf
        scaler.unscale_(optimizer)
        assert torch.equal(model.lm_head.weight.grad, true)
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), model.parameters(), strict=True)]
        assert not any(changed) if overflow else all(changed)
    assert scaler.get_scale() == 512


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_skipped_step_changes_nothing_and_a_step_that_may_skip_is_the_same_step(kind):
    plain, guarded = gpt(), gpt()
    ours, theirs = (build_optimizer(m, with_(optimizer=kind), "cpu") for m in (plain, guarded))
    for step in range(3):
        for model, optimizer, skip in ((plain, ours, None), (guarded, theirs, torch.tensor(False))):
            set_gradients(model, step)
            optimizer.step(skip)
        before = saved([theirs.state_dict(), guarded.state_dict()])
        for p in guarded.parameters():
            p.grad.fill_(math.nan)
        theirs.step(torch.tensor(True))
        assert same([theirs.state_dict(), guarded.state_dict()], before)
        assert equal(plain, guarded) and same(ours.state_dict(), theirs.state_dict())
