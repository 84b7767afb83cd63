"""The Triton kernels on a GPU: BF16 tensors, tensor cores, full shapes, torch.compile. Skipped without CUDA."""

import os
import subprocess
import sys

import pytest
import torch

from attention import AttentionLayer, AttentionSpec, attend, changed, flash
from attention.emulated import emulated
from scripts.bench_attention import peak

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; tests/attention interprets")

PRESETS = ("flash_fa2", "flash_bf16", "stabilized", "flash_fp32")
TILE = {"flash_fp32": 32}


def make(backend, **switches):
    return AttentionSpec(backend, **({"tile_k": TILE[backend]} if backend in TILE else {}) | switches)


def inputs(B, H, T, D, dtype=torch.bfloat16, std=1.0, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    packed = (torch.randn(B, T, 3, H, D, device="cuda", generator=g) * std).bfloat16().to(dtype)
    do = torch.randn(B, T, H, D, device="cuda", generator=g).bfloat16().to(dtype).transpose(1, 2)
    return [packed[:, :, i].transpose(1, 2).detach().requires_grad_() for i in range(3)], do


def run(qkv, do, spec, attention=attend):
    o = attention(*qkv, spec)
    return [o.detach(), *torch.autograd.grad(o, qkv, do.to(o.dtype))]


def exact(qkv, do):
    """O and gradients in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in qkv)
    T = q.shape[2]
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(torch.ones(T, T, device="cuda").triu(1).bool(), -torch.inf)
    o = s.softmax(-1) @ v
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())]


def errors(ours, theirs):
    """Largest difference over the largest value, of O, dQ, dK and dV."""
    return [((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item()
            for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("backend", PRESETS)
@pytest.mark.parametrize("T, D", [(1, 64), (2, 64), (15, 64), (17, 64), (64, 64), (127, 64), (129, 64), (1000, 64),
                                  (1024, 64), (1000, 128), (200, 16), (200, 32), (200, 48), (200, 80), (200, 96)])
def test_shapes_against_float64(backend, T, D):
    qkv, do = inputs(2, 3, T, D, torch.float32 if backend == "flash_fp32" else torch.bfloat16)
    reference = exact(qkv, do)
    budget = (5e-6, 1e-5) if backend == "flash_fp32" else (8e-3, 2e-2)
    if T == 1:  # dQ and dK are exactly 0 there: dP - delta cancels
        reference[1:3] = [x + 1 for x in reference[1:3]]
        ours = run(qkv, do, make(backend))
        ours[1:3] = [x.double() + 1 for x in ours[1:3]]
    else:
        ours = run(qkv, do, make(backend))
    found = errors(ours, reference)
    assert found[0] <= budget[0] and max(found[1:]) <= budget[1], found


def test_fp32_means_fp32():
    """Absolute error below 1e-5 at T = 1000, D = 64, std 1, with everything switched on that could lower precision."""
    qkv, do = inputs(2, 4, 1000, 64, torch.float32)
    reference = exact(qkv, do)
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for dots in ("tf32x3", "ieee"):
                o, *grads = run(qkv, do, make("flash_fp32", dots=dots))
                assert o.dtype == torch.float32
                assert (o.double() - reference[0]).abs().max() < 1e-5, dots
                assert max(errors(grads, reference[1:])) < 1e-5, dots
    finally:
        torch.set_float32_matmul_precision(previous)


@pytest.mark.parametrize("dots", ["tf32x3", "ieee"])
@pytest.mark.parametrize("D", [64, 128])
def test_digits_of_fp32_values(D, dots):
    """Of values with all 24 bits, whose small TF32 parts are not 0. Sums that pass through the tensor core, which
    rounds towards zero, lose 3 to 8 times of both."""
    qkv, do = inputs(2, 4, 1024, D, torch.float32)
    qkv, do = [(x.detach() * 1.1).requires_grad_() for x in qkv], do * 1.1
    ours, reference = run(qkv, do, make("flash_fp32", dots=dots)), exact(qkv, do)
    assert max(errors(ours, reference)) < 2e-6, errors(ours, reference)
    lost = [(((a - b) * b.sign()).mean() / b.abs().mean()).item() for a, b in zip(ours, reference, strict=True)]
    assert max(map(abs, lost)) < 1.2e-6, lost


@pytest.mark.parametrize("value", [0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1])  # Inf, -Inf, three NaN
@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
def test_nan_and_inf_of_fp32_values_do_not_vanish(which, value):
    """And stay in their head: cutting factors into parts works on their bits."""
    qkv, do = inputs(1, 2, 200, 64, torch.float32)
    clean, row, column = run(qkv, do, make("flash_fp32")), 77, 5
    hit = do if which == "do" else qkv["qkv".index(which)]
    with torch.no_grad():
        hit[0, 1, row, column] = torch.tensor(value, dtype=torch.int32).view(torch.float32)
    ours = run(qkv, do, make("flash_fp32"))
    assert all(torch.equal(a[:, 0], b[:, 0]) for a, b in zip(ours, clean, strict=True))
    o, dq, dk, dv = (x[0, 1].isfinite() for x in ours)
    touched = dict(q=[o[row], dq[row], dk[: row + 1], dv[: row + 1]], k=[dq[row:, column]],
                   v=[o[row:, column], dq[row:]], do=[dq[row], dk[: row + 1], dv[: row + 1, column]])[which]
    assert not any(x.any() for x in touched)


def test_fp32_on_bf16_tensors_loses_nothing():
    """BF16 tensors take exact BF16 products; the result is that of the same values in float32 tensors."""
    qkv, do = inputs(1, 4, 500, 64)
    wide = [x.detach().float().requires_grad_() for x in qkv]
    a, b = (attend(*x, make("flash_fp32")) for x in (qkv, wide))
    assert a.dtype == torch.float32 and max(errors([a], [b])) < 2e-6
    assert max(errors([a], exact(qkv, do)[:1])) < 2e-6


@pytest.mark.parametrize("backend", PRESETS)
def test_against_emulated(backend):
    qkv, do = inputs(2, 3, 777, 64, torch.float32 if backend == "flash_fp32" else torch.bfloat16)
    spec = make(backend)
    rng = torch.zeros(3, dtype=torch.int64, device="cuda")
    ours = run(qkv, do, spec)
    theirs = run(qkv, do, spec, lambda q, k, v, spec: emulated(q, k, v, rng, spec.key, False)[0])
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
        if backend == "flash_fp32":
            assert max(errors([a], [b])) < 5e-6, name
        else:
            assert (a != b).float().mean() < 0.05, name
            assert abs((a.double() - b.double()).mean()) < 1e-4 * b.double().abs().mean(), name


@pytest.mark.parametrize("backend", PRESETS)
def test_gradients_are_bit_equal_over_30_calls(backend):
    qkv, do = inputs(4, 4, 1024, 64)
    first = run(qkv, do, make(backend))
    for _ in range(29):
        assert all(torch.equal(a, b) for a, b in zip(run(qkv, do, make(backend)), first, strict=True))


@pytest.mark.parametrize("backend", PRESETS)
def test_compiled_equals_eager(backend):
    torch._dynamo.reset()
    qkv, do = inputs(2, 2, 300, 64)
    layer = AttentionLayer(make(backend), 0).cuda()

    def attention(q, k, v, spec):
        return layer(q * 1, k * 1, v * 1)

    compiled = torch.compile(attention, fullgraph=True)
    for a, b in zip(run(qkv, do, make(backend), attention), run(qkv, do, make(backend), compiled), strict=True):
        assert torch.equal(a, b)


def test_strides():
    qkv, _ = inputs(2, 3, 130, 64)
    plain = [x.detach().contiguous().requires_grad_() for x in qkv]
    for do in (torch.randn(2, 3, 64, 130, device="cuda").bfloat16().mT,
               torch.randn(1, 1, 1, 1, device="cuda").bfloat16().expand(2, 3, 130, 64),
               torch.randn(130, 3, 2, 64, device="cuda").bfloat16().permute(2, 1, 0, 3)):
        ours, theirs = run(qkv, do, make("flash_bf16")), run(plain, do.contiguous(), make("flash_bf16"))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_more_heads_than_a_grid_dimension_holds():
    qkv, do = inputs(70000, 1, 17, 16)
    ours = run(qkv, do, make("flash_fa2"))
    last = [x.detach()[-3:].requires_grad_() for x in qkv]
    assert all(torch.equal(a[-3:], b) for a, b in zip(ours, run(last, do[-3:], make("flash_fa2")), strict=True))


def test_offsets_past_2_to_31_elements():
    B, H, T, D = 960, 12, 1024, 64
    packed = torch.randn(B, T, 3, H, D, device="cuda", dtype=torch.bfloat16)
    assert packed.numel() > 2**31
    qkv = [packed[:, :, i].transpose(1, 2).detach().requires_grad_() for i in range(3)]
    do = torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    ours = run(qkv, do, make("flash_bf16"))
    last = [x.detach()[-1:].requires_grad_() for x in qkv]
    assert all(torch.equal(a[-1:], b) for a, b in zip(ours, run(last, do[-1:], make("flash_bf16")), strict=True))


@pytest.mark.parametrize("stabilizer", ["none", "paper", "capped", "unconditional", "clamp", "lazy_max"])
@pytest.mark.parametrize("maximum", [20.0, -120.0, 0.0, 1e4])
def test_row_maxima(stabilizer, maximum):
    """Rows whose scores are all equal, at small and huge sizes: finite, and as emulated."""
    (q, k, v), _ = inputs(1, 2, 200, 64)
    with torch.no_grad():
        q.zero_(), k.zero_()
        q[..., 0], k[..., 0] = (8 * abs(maximum)) ** 0.5, (8 * abs(maximum)) ** 0.5 * (1 if maximum >= 0 else -1)
        q[:, :, 100:, 1], k[:, :, ::7, 1] = 1, 3
    spec, rng = make("flash_bf16", stabilizer=stabilizer), torch.zeros(3, dtype=torch.int64, device="cuda")
    o, stats = attend(q, k, v, spec, stats=True)
    other, _, ties, row_max, _ = emulated(q, k, v, rng, spec.key, True)
    assert o.isfinite().all() and torch.equal(stats.ties, ties) and (ties > 1).any()
    assert (stats.row_max - row_max).abs().max() <= 1e-6 * row_max.abs().max()
    assert (o.float() - other.float()).abs().max() <= 2**-7 * other.float().abs().max()


@pytest.mark.parametrize("backend", PRESETS)
def test_statistics_change_nothing(backend):
    qkv, _ = inputs(2, 4, 1000, 64)
    plain, (o, _) = attend(*qkv, make(backend)), attend(*qkv, make(backend), stats=True)
    assert torch.equal(plain, o)


@pytest.mark.parametrize("backend", PRESETS[:3])
@pytest.mark.parametrize("T", [1000, 1024])
def test_ties_of_the_first_sequences(backend, T):
    """Counted as emulated, on scores with many equal maxima; sequences that are not asked for change nothing."""
    (q, k, v), _ = inputs(4, 3, T, 64)
    with torch.no_grad():
        q[:, 0, T // 2:] = k[:, 0, : T // 2] = 0.5
        k[:, 1] = -k[:, 1].abs()
        q[:, 1] = q[:, 1].abs()
    spec, rng = make(backend), torch.zeros(3, dtype=torch.int64, device="cuda")
    plain, (o, whole) = attend(q, k, v, spec), attend(q, k, v, spec, stats=True)
    assert (whole.ties != emulated(q, k, v, rng, spec.key, True)[2]).float().mean() < 1e-3  # the last place of a score
    for counted in (0, 1, 3):
        o, some = attend(q, k, v, spec, stats=True, counted=counted)
        assert torch.equal(some.ties, whole.ties[:counted]) and torch.equal(some.row_max, whole.row_max)
        assert torch.equal(o, plain)


def test_stochastic_output_is_a_function_of_seed_layer_and_draw():
    qkv, _ = inputs(2, 3, 300, 64)
    spec = make("flash_fa2", output="stochastic")
    rng = torch.tensor([7, 3, 11], device="cuda")
    exactly = attend(*qkv, make("flash_fa2", output="fp32"))
    a, b, c = attend(*qkv, spec, rng), attend(*qkv, spec, rng), attend(*qkv, spec, rng + 1)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert (emulated(*qkv, rng, spec.key, False)[0] != a).float().mean() < 0.01
    error, step = (a.double() - exactly.double()), (exactly.bfloat16().double() - exactly.double()).abs().mean()
    assert abs(error.mean()) < 0.05 * step and error.abs().max() < 2**-6


@pytest.mark.parametrize("T", [300, 1024])
def test_stochastic_pv_is_a_function_of_seed_layer_and_draw(T):
    qkv, _ = inputs(2, 3, T, 64)
    spec, rng = make("flash_bf16", pv="stochastic"), torch.tensor([7, 3, 11], device="cuda")
    a, b, c = attend(*qkv, spec, rng), attend(*qkv, spec, rng), attend(*qkv, spec, rng + 1)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert (emulated(*qkv, rng, spec.key, False)[0] != a).float().mean() < 0.02


@pytest.mark.parametrize("T, D", [(1000, 64), (1024, 64), (300, 80), (1024, 128)])
@pytest.mark.parametrize("backend", ["flash_fa2", "flash_bf16"])
def test_what_o_left_over_for_delta(backend, T, D):
    """The same O as without it, and gradients as emulated, eager and compiled."""
    torch._dynamo.reset()
    qkv, do = inputs(2, 3, T, D)
    spec, rng = make(backend, delta="do_o_exact"), torch.zeros(3, dtype=torch.int64, device="cuda")
    ours, without = run(qkv, do, spec), run(qkv, do, make(backend))
    assert torch.equal(ours[0], without[0]) and torch.equal(ours[3], without[3])
    assert not torch.equal(ours[1], without[1]) and not torch.equal(ours[2], without[2])
    theirs = run(qkv, do, spec, lambda q, k, v, spec: emulated(q, k, v, rng, spec.key, False)[0])
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert (a != b).float().mean() < 0.05, name
        assert abs((a.double() - b.double()).mean()) < 1e-4 * b.double().abs().mean(), name
    o, _, _, _, rest = flash.flash(*qkv, rng, spec.key, False)
    assert rest.dtype == torch.bfloat16 and rest.stride() == o.stride()
    if spec.pv == "fp32":
        whole = attend(*qkv, make(backend, output="fp32"))
        assert ((o.float() + rest - whole).abs() <= 2**-16 * whole.abs()).all()
    if T == 1024:
        layer = AttentionLayer(spec, 0).cuda()
        compiled = torch.compile(lambda q, k, v, spec: layer(q * 1, k * 1, v * 1), fullgraph=True)
        assert all(torch.equal(a, b) for a, b in zip(ours, run(qkv, do, spec, compiled), strict=True))


@pytest.mark.parametrize("delta", ["dp_p", "dp_p_normalized", "do_o_corrected"])
@pytest.mark.parametrize("T, D", [(1000, 64), (1024, 64), (300, 80), (1024, 128)])
@pytest.mark.parametrize("backend", ["flash_fa2", "flash_bf16"])
def test_deltas_from_rows_of_ds(backend, T, D, delta):
    """O and dV as with rowsum(dO O), dQ and dK not, and all as emulated."""
    qkv, do = inputs(2, 3, T, D)
    spec, rng = make(backend, delta=delta), torch.zeros(3, dtype=torch.int64, device="cuda")
    ours, of_o = run(qkv, do, spec), run(qkv, do, make(backend))
    assert [torch.equal(a, b) for a, b in zip(ours, of_o, strict=True)] == [True, False, False, True]
    theirs = run(qkv, do, spec, lambda q, k, v, spec: emulated(q, k, v, rng, spec.key, False)[0])
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert (a != b).float().mean() < 0.05, name
        assert abs((a.double() - b.double()).mean()) < 1e-4 * b.double().abs().mean(), name


@pytest.mark.parametrize("delta", ["do_o_exact", "dp_p_normalized", "do_o_corrected"])
def test_nothing_of_the_stored_os_rounding_is_left_in_the_gradients(delta):
    """Of FP32 tensors, where it is all that is rounded: dQ's error against float64 with and without what it left over
    (0.002 of it on a CPU). dV does not see it."""
    qkv, do = inputs(2, 3, 500, 64, torch.float32)
    _, *reference = exact(qkv, do)
    near, far = (run(qkv, do, make("flash_fp32", output="bf16", delta=x))[1:] for x in (delta, "do_o"))
    for name, a, b, c in zip(("dq", "dk"), near, far, reference, strict=False):
        assert (a - c).norm() < 0.02 * (b - c).norm(), name


@pytest.mark.parametrize("backend", [*PRESETS, "flash_fa2+delta=do_o_exact", "flash_fa2+delta=do_o_corrected"])
@pytest.mark.parametrize("T", [1000, 1024])
def test_memory(backend, T):
    """Nothing of size T x T: forward and backward take O, L, delta and the gradients, with do_o_exact O's size once
    more, and not a byte beyond."""
    qkv, do = inputs(8, 12, T, 64)
    spec = changed(AttentionSpec(), backend)
    extra, needed = peak(qkv, do.float() if spec.stores_fp32 else do, spec)
    assert extra <= needed + 24  # the seed, which attend makes where it is given none


@pytest.mark.parametrize("backend", [*PRESETS[:3], "flash_fa2+delta=do_o_exact", "flash_bf16+delta=do_o_corrected"])
@pytest.mark.parametrize("D", [64, 128])
def test_descriptors_and_pointers_give_the_same_bits(backend, D, monkeypatch):
    qkv, do = inputs(2, 3, 1024, D)
    spec = changed(AttentionSpec(), backend)
    _, launch = flash.launch_for(spec, D, do.device, do.dtype)
    used = [flash.fitted(tile, *qkv, do).tma for tile in (*launch.forward.values(), launch.dq, launch.dkdv)]
    assert any(used) == (torch.cuda.get_device_capability()[0] == 9)
    by_descriptors = run(qkv, do, spec)
    monkeypatch.setattr(flash, "_whole", lambda *_: False)
    assert all(torch.equal(a, b) for a, b in zip(by_descriptors, run(qkv, do, spec), strict=True))


@pytest.mark.parametrize("D", [64, 128])
def test_lengths_and_layouts_that_descriptors_do_not_take(D):
    """A batch that mixes both kinds of launch: the same rows, whether the length is a multiple of the tile or not."""
    (q, k, v), do = inputs(2, 3, 1024, D)
    spec = make("flash_bf16")
    whole = run((q, k, v), do, spec)
    part = [x.detach()[:, :, :1000].requires_grad_() for x in (q, k, v)]
    assert torch.equal(run(part, do[:, :, :1000], spec)[0], whole[0][:, :, :1000])
    apart = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    assert all(torch.equal(a, b) for a, b in zip(run(apart, do.contiguous(), spec), whole, strict=True))


@pytest.mark.parametrize("backend", PRESETS[:3])
def test_cuda_graphs(backend):
    """Captured once and replayed on other values, in place and by torch.compile's own graphs."""
    spec = make(backend)
    (qkv, do), (other, do2) = inputs(2, 3, 1024, 64), inputs(2, 3, 1024, 64, seed=1)
    expected = run(other, do2, spec)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(qkv, do, spec)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(qkv, do, spec)
    with torch.no_grad():
        for a, b in zip((*qkv, do), (*other, do2), strict=True):
            a.copy_(b)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))

    if backend != "flash_bf16":
        return  # what follows takes seconds, and knows no backend
    torch._dynamo.reset()
    layer = AttentionLayer(spec, 0).cuda()
    compiled = torch.compile(lambda q, k, v: layer(q * 1, k * 1, v * 1), mode="reduce-overhead")
    for _ in range(4):
        o = compiled(*other)
        found = [o.detach().clone(), *torch.autograd.grad(o, other, do2)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_streams_share_nothing():
    spec = make("flash_bf16")
    cases = [inputs(2, 3, 1024, 64, seed=seed) for seed in range(4)]
    expected = [run(*case, spec) for case in cases]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in cases], [None] * 4
    for _ in range(5):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i] = run(*cases[i], spec)
    torch.cuda.synchronize()
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_two_processes_agree():
    code = ("import torch, hashlib, sys; sys.path.insert(0, 'tests/gpu'); import test_flash_gpu as t; "
            "qkv, do = t.inputs(2, 4, 1000, 64); "
            "print([hashlib.sha256(x.contiguous().view(torch.int16).cpu().numpy().tobytes()).hexdigest() "
            "for x in t.run(qkv, do, t.make('stabilized'))])")
    outputs = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                              env=os.environ | {"PYTHONPATH": "."}).stdout for _ in range(2)}
    assert len(outputs) == 1


def test_bad_input_is_refused():
    (q, k, v), _ = inputs(1, 1, 16, 64)
    for change, words in ((lambda x: x.double(), "kernel=emulated"), (lambda x: x.half(), "float16"),
                          (lambda x: x.repeat(1, 1, 1, 3), "head sizes up to 128, got 192"),
                          (lambda x: x[:, :, :0], "empty shape")):
        with pytest.raises(ValueError, match=words):
            attend(change(q), change(k), change(v), make("flash_bf16"))
