"""The emulation against float64 and against eager code of the same precision, in every shape, layout and container.

Budgets are relative to another implementation's error. Messages carry the signed mean error, since bias and not size
is what makes a run fail.
"""

import pytest
import torch
from attention_cases import FLASH, assert_within, bias, errors, exact, inputs, materialised, run, run_spec, spec
from torch.utils._python_dispatch import TorchDispatchMode

from attention import attend, changed
from attention.emulated import emulated, trace
from attention.rounding import round_bf16

# The algorithm, without any rounding: float64.


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("stabilizer", ["none", "paper", "capped", "fixed", "unconditional", "lazy_max"])
def test_equals_materialised_in_float64(stabilizer, softcap):
    x = inputs(T=40, D=8, scale=2, dtype=torch.float64, bf16=False)
    x[1][:, :, 3:20] = x[1][:, :, 2:3]  # equal keys, so that maxima tie
    for switches in (dict(tile_k=16), dict(tile_k=0, delta="dp_p"), dict(tile_k=32, delta="do_o_recomputed")):
        s = spec("flash_fp32", stabilizer=stabilizer, softcap=softcap, **switches)
        for got, want in zip(run_spec(s, *x), exact(*x, softcap), strict=True):
            assert got.dtype == torch.float64
            torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("switches", [{}, dict(delta="dp_p"), dict(delta="do_o_recomputed", stabilizer="capped"),
                                      dict(softcap=1.5)], ids=str)
def test_gradcheck(switches):
    x = [t.requires_grad_() for t in inputs(T=8, D=4, dtype=torch.float64, bf16=False)[:3]]
    assert torch.autograd.gradcheck(lambda *x: attend(*x, spec("flash_fp32", **switches)), x)


# Error budgets.


@pytest.mark.parametrize("scale", [0.5, 1, 4])
@pytest.mark.parametrize("backend", FLASH)
def test_error_at_most_twice_that_of_same_precision_eager(backend, scale):
    """Against materialised attention of the same precision: FP32 autograd, or `standard` for BF16.

    P = exp(S - L) of any flash backward pass inherits half a unit of L's last place, which softmax's autograd does
    not have; FP32 is granted that. With pv=bf16 every tile rounds three times more: 3 times the error, in few tiles.
    """
    x = inputs(T=129, D=64, scale=scale, seed=1)
    want = exact(*x)
    eager, grace = run_spec(spec("standard"), *x), 0.0
    if backend == "flash_fp32":
        eager, grace = run(materialised, *x), trace(*x[:3], spec(backend)).lse.abs().max().item() * 2**-24
    rounds_pv = spec(backend).pv == "bf16"
    budget = [((3 if rounds_pv else 2) * size + grace, mean) for size, mean in errors(eager, want)]
    for tile_k in (64, 128) if rounds_pv else (16, 64, 128):
        assert_within(errors(run_spec(spec(backend, tile_k=tile_k), *x), want), budget, f"{backend}, tile_k={tile_k}")


@pytest.mark.parametrize("D", [16, 32, 48, 64, 80, 96, 128])
@pytest.mark.parametrize("T", [1, 2, 15, 17, 64, 127, 129])
def test_every_shape(T, D):
    x = inputs(B=2, H=1, T=T, D=D, seed=T + D)
    want = exact(*x)
    for backend, budget in (("flash_fp32", 1e-5), ("flash_bf16", 2e-2), ("stabilized", 2e-2)):
        got = run_spec(spec(backend, tile_k=16 if D % 32 else 64), *x)
        for name, g, w in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
            assert g.shape == x[0].shape
            error = (g.double() - w).abs().max().item()
            allowed = budget * max(w.abs().max().item(), 1)
            assert error <= allowed, f"{backend} {name}: {error:.2e}, signed mean {bias(g, w):.2e}"


def test_more_heads_than_a_gpu_grid_has_rows():
    x = inputs(B=5, H=14_000, T=3, D=16)
    for got, want in zip(run_spec(spec("flash_fp32"), *x), exact(*x), strict=True):
        assert (got - want).abs().max() < 1e-5


def test_fp32_means_fp32_whatever_is_switched_on():
    x = inputs(H=1, T=1000, D=64, bf16=False)
    want = exact(*x)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            got = run_spec(spec("flash_fp32"), *x)
    finally:
        torch.set_float32_matmul_precision(before)
    for name, g, w in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        assert g.dtype == torch.float32
        assert (g - w).abs().max() < 1e-5, f"{name}: {(g - w).abs().max():.2e}, signed mean {bias(g, w):.2e}"


@pytest.mark.parametrize("backend", FLASH)
def test_values_of_one_give_one_before_the_last_rounding(backend):
    q, k, v, _ = inputs(T=300, D=64, scale=2)
    error = (trace(q, k, torch.ones_like(v), spec(backend, tile_k=64)).unrounded - 1).abs().max().item()
    if backend == "flash_fp32":
        assert error < 1e-5, f"{error:.2e}"
    elif backend == "flash_fa2":  # P is cast for P V but summed uncast; a BF16 result would hide most of this
        assert 1e-5 < error < 2**-9, f"{error:.2e}"
    else:  # 5 tiles, two roundings of O and one of P V in each
        assert 1e-5 < error < 5 * 3 * 2**-9, f"{error:.2e}"


# Layouts, containers, contexts.


@pytest.mark.parametrize("backend", FLASH)
def test_layout_of_inputs_and_gradients_does_not_matter(backend):
    B, T, H, D = 2, 33, 3, 16
    s = spec(backend, tile_k=16)
    packed = round_bf16(torch.randn(B, T, 3 * H * D, generator=torch.Generator().manual_seed(3)))
    q, k, v = (t.view(B, T, H, D).transpose(1, 2) for t in packed.split(H * D, dim=2))
    assert not q.is_contiguous()
    do = inputs(B, H, T, D)[3]
    layouts = {"transposed": do.transpose(1, 2).contiguous().transpose(1, 2), "stride 0": do[:1, :, :1].expand_as(do)}
    for name, g in layouts.items():
        plain = run_spec(s, q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous())
        for got, want in zip(run_spec(s, q, k, v, g), plain, strict=True):
            assert torch.equal(got, want), name
    assert run_spec(s, q, k, v, do)[0].transpose(1, 2).is_contiguous(), "joining the heads must be a view"


@pytest.mark.parametrize("backend", ["flash_bf16", "flash_fa2", "stabilized"])
def test_bf16_tensors_and_bf16_values_in_fp32_agree(backend):
    x = inputs(T=65, D=32, scale=2)
    carried = run_spec(spec(backend, tile_k=16), *x)
    native = run_spec(spec(backend, tile_k=16), *(t.bfloat16() for t in x))
    for a, b in zip(native, carried, strict=True):
        assert a.dtype == torch.bfloat16 and b.dtype == torch.float32 and torch.equal(a.float(), b)


def test_containers_and_output_types():
    x = inputs()
    for dtype in (torch.bfloat16, torch.float16):
        o, dq, *_ = run_spec(spec("flash_fp32"), *(t.to(dtype) for t in x))
        assert o.dtype == torch.float32 and dq.dtype == dtype
    assert attend(*(t.bfloat16() for t in x[:3]), spec(output_heads=(1,))).dtype == torch.float32
    o, _, *others = emulated(*x[:3], torch.zeros(3, dtype=torch.int64), spec().key, False)
    assert [t.shape for t in others] == [(0,)] * 3 and o.shape == x[0].shape
    fine = inputs(bf16=False)
    for a, b in zip(run_spec(spec(), *fine), run_spec(spec(), *map(round_bf16, fine)), strict=True):
        assert torch.equal(a, b), "operands=bf16 rounds q, k, v and dO on entry"
    assert not torch.equal(run_spec(spec("flash_fp32"), *fine)[0], run_spec(spec("flash_fp32"), *x)[0])


@pytest.mark.parametrize("backend", FLASH)
def test_autocast_changes_nothing(backend):
    x = inputs(bf16=False)
    plain = run_spec(spec(backend), *x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run_spec(spec(backend), *x)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("choice", [*FLASH, "flash_fa2+delta=do_o_exact"])
def test_repeatable_and_compiled_equals_eager(choice, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    s = changed(spec(), f"{choice}+tile_k=16")
    B, T, H, D = 1, 20, 2, 16
    do = inputs(B, H, T, D)[3]

    def block(x):
        q, k, v = (t.view(B, T, H, D).transpose(1, 2) for t in x.split(H * D, dim=2))
        o, stats = attend(q, k, v, s, stats=True)
        return o, stats.ties, stats.row_max

    x = torch.randn(B, T, 3 * H * D, generator=torch.Generator().manual_seed(5)).requires_grad_()
    results = []
    for f in (block, block, torch.compile(block, fullgraph=True)):
        o, ties, row_max = f(x)
        results.append((o, ties, row_max, *torch.autograd.grad(o, x, do)))
    for name, *values in zip(("o", "ties", "row_max", "gradient"), *results, strict=True):
        assert torch.equal(values[0], values[1]), f"{name} differs from call to call"
        assert torch.equal(values[0], values[2]), f"{name} differs when compiled"


@pytest.mark.parametrize("switches", [{}, dict(output_heads=(0,), output="stochastic"), dict(backend="flash_fp32"),
                                      dict(delta="do_o_exact")], ids=str)
def test_the_operator_is_registered_correctly(switches):
    q, k, v, _ = inputs(T=9, dtype=torch.bfloat16)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v))
    args = (q, k, v, torch.zeros(3, dtype=torch.int64), spec(**switches).key, True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    assert set(torch.library.opcheck(emulated, args, test_utils=checks).values()) == {"SUCCESS"}


def test_backward_pass_fills_no_gradients_of_statistics():
    """L, ties and row maxima have no gradient; autograd would make tensors of zeros for them, as large as they are."""
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names, xs = [], [torch.randn(1, 2, 20, 16).requires_grad_() for _ in range(3)]
    o, *_ = emulated(*xs, torch.zeros(3, dtype=torch.int64), spec().key, True)
    with Log():
        torch.autograd.grad(o, xs, torch.ones_like(o))
    assert "lpattn.emulated_backward.default" in names and not any("zero" in name for name in names), names


def test_what_is_kept_for_the_backward_pass():
    """Q, K, V, O and L; where it is asked for, what O's rounding left over, two bytes an element; nothing else."""
    x = [t.bfloat16().requires_grad_() for t in inputs()[:3]]
    for s, rest in ((spec(), False), (spec("flash_fa2"), False), (spec(delta="dp_p"), False),
                    (spec(delta="do_o_exact"), True), (spec(delta="do_o_exact", output_heads=(1,)), True)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # noqa: B023
            o = attend(*x, s)
        assert len(kept) == 5 + rest
        n = o.numel()
        assert sum(t.nbytes for t in kept) == 3 * 2 * n + o.nbytes + 4 * n // o.shape[-1] + 2 * n * rest


def test_switches_of_the_kernels_alone_change_nothing():
    x = inputs()
    for plain, other in ((spec(), spec(tile_q=16)), (spec("flash_fp32"), spec("flash_fp32", dots="ieee"))):
        assert all(torch.equal(a, b) for a, b in zip(run_spec(plain, *x), run_spec(other, *x), strict=True))


def test_trace_is_what_the_operator_does():
    q, k, v, do = inputs(T=65, D=32)
    for backend in FLASH:
        for delta in ("do_o", "do_o_exact", "dp_p", "do_o_recomputed"):
            if delta == "do_o_exact" and backend == "flash_fp32":
                continue
            s = spec(backend, tile_k=16, delta=delta)
            got = trace(q, k, v, s, do)
            o, lse, ties, row_max, rest = emulated(q, k, v, torch.zeros(3, dtype=torch.int64), s.key, True)
            for a, b in ((got.o, o), (got.lse, lse), (got.ties, ties), (got.row_max, row_max)):
                assert torch.equal(a, b)
            if delta in ("do_o", "do_o_exact"):
                assert torch.equal(got.delta, (do * (o + rest if s.keeps_rest else o).contiguous()).sum(-1))
            want = (do.double() * materialised(*(t.double() for t in (q, k, v)))).sum(-1)
            assert (got.delta - want).abs().max() < (1e-4 if backend == "flash_fp32" else 0.25)
    assert trace(q, k, v, spec()).delta is None


# Bad input: one clear sentence, the same from every backend.

GOOD = (1, 2, 8, 16)
BAD = {
    "must be \\(B, H, T, D\\), got shape \\(2, 8, 16\\)": lambda x: (x[0], x, x),
    "share one shape, got q \\(1, 2, 8, 16\\) and k \\(1, 2, 7, 16\\)": lambda x: (x, x[:, :, :7], x),
    "share one shape, got q .* and v": lambda x: (x, x, x[..., :8]),
    "share dtype and device": lambda x: (x, x.double(), x),
    "empty shape \\(1, 2, 0, 16\\)": lambda x: (x[:, :, :0],) * 3,
    "takes float64, float32, bfloat16 or float16 tensors, got torch.int64": lambda x: (x.long(),) * 3,
}


@pytest.mark.parametrize("backend", ["standard", "sdpa", *FLASH])
@pytest.mark.parametrize("message", BAD)
def test_bad_input(message, backend):
    with pytest.raises(ValueError, match=message):
        attend(*BAD[message](torch.zeros(GOOD)), spec(backend))


def test_bad_input_for_a_spec():
    x = torch.zeros(GOOD)
    with pytest.raises(ValueError, match=r"rounds to BF16 but its inputs are float16"):
        attend(*(x.half(),) * 3, spec())
    with pytest.raises(ValueError, match=r"output_heads=\(2,\) names a head past the last of 2 heads"):
        attend(x, x, x, spec(output_heads=(2,)))
