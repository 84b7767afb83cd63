"""The Triton kernels through Triton's interpreter, against `emulated` with the same tiles, and against float64.

The interpreter has no BF16 arithmetic, so BF16 values travel in float32 here; tests/gpu repeats this on a GPU with
BF16 tensors and tensor cores.
"""

import importlib.metadata
import math
import re
from pathlib import Path

import interpreted
import numpy
import pytest
import torch

from attention.rounding import round_bf16, round_to
from attention.spec import FULL, AttentionSpec
from attention.standard import standard

TRITON = importlib.metadata.version("triton")  # not imported here: interpreted.py says why
OLD_TRITON = tuple(map(int, TRITON.split(".")[:2])) < (3, 7)
NEW_NUMPY = numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0"
pytestmark = pytest.mark.skipif(
    OLD_TRITON and NEW_NUMPY, reason=f"triton {TRITON}'s interpreter does not run with numpy {numpy.__version__}")

RNG = torch.tensor([1234567, 3, 2**32 + 5])
EXACT = ("o", "dq", "dk", "dv")


def test_packed_counts_add_up_in_one_register():
    """tiles.count_of_pairs on a GPU, which the interpreter does not run: the sum of 0x3F80 for each of L left and R
    right columns, times INVERSE, has L + R in its upper bits, for all counts that 256 columns can have."""
    source = (Path(__file__).parents[2] / "attention/tiles.py").read_text()
    inverse = int(re.search(r"^INVERSE = tl.constexpr\((0x\w+)\)", source, re.MULTILINE)[1], 16)
    left, right = numpy.meshgrid(numpy.arange(129, dtype=numpy.uint64), numpy.arange(129, dtype=numpy.uint64))
    found = 0x3F80 * (left + (right << numpy.uint64(16))) & 0xFFFFFFFF
    assert ((found * inverse & 0xFFFFFFFF) >> 23 == left + right).all()


@pytest.fixture(scope="module")
def worker():
    with interpreted.start() as pool:
        yield pool


def bf16(*shape, std=1.0):
    return round_bf16(torch.randn(shape) * std)


def inputs(B=1, H=2, T=70, D=16, std=1.0):
    torch.manual_seed(T * 1000 + D)
    return [bf16(B, H, T, D, std=std) for _ in range(4)]


def flash(worker, tensors, spec, stats=False, which="flash"):
    return worker.submit(interpreted.run, which, *tensors, RNG, spec.key, stats).result()


def both(worker, tensors, spec):
    return flash(worker, tensors, spec, True), flash(worker, tensors, spec, True, "emulated")


def assert_close(ours, theirs, spec):
    """Statistics equal; FP32 results within a few units of the last place of the largest; rounded results equal but for
    a share of entries where that last place decides a rounding (more in dQ and dK, where dP - delta cancels)."""
    assert torch.equal(ours["ties"], theirs["ties"])
    torch.testing.assert_close(ours["row_max"], theirs["row_max"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours["lse"], theirs["lse"], rtol=1e-6, atol=1e-6)
    assert ours["rest"].shape == (ours["o"].shape if spec.keeps_rest else (0,))
    if spec.keeps_rest and spec.pv == "fp32":  # where O is rounded the other way, too
        whole, other = (x["o"] + x["rest"] for x in (ours, theirs))
        torch.testing.assert_close(whole, other, rtol=2**-15, atol=1e-6)
        assert (ours["rest"] == theirs["rest"]).float().mean() > 0.9
    for name in EXACT:
        difference, scale = (ours[name] - theirs[name]).abs(), theirs[name].abs().max()
        assert theirs[name].isfinite().all() and scale > 0
        if spec.operands == "fp32":
            assert difference.max() <= 3e-6 * scale, name
        else:
            share = (difference > 1e-6 * scale).float().mean()
            cancels = 0.03 if spec.delta == "do_o_corrected" else 0.02  # its dQ is a difference of two sums
            assert share <= (0.005 if name in ("o", "dv") else cancels), name
            assert difference.max() <= 2**-6 * scale, name


SWITCHES = {
    "flash_fa2": {},
    "flash_bf16": {},
    "flash_fp32": dict(backend="flash_fp32"),
    "flash_fp32_ieee": dict(backend="flash_fp32", dots="ieee"),
    "scores": dict(backend="flash_fa2", scores="bf16"),
    "pv": dict(backend="flash_fa2", pv="bf16"),
    "probs_fp32": dict(probs="fp32"),
    "probs_fp8_e4m3": dict(probs="fp8_e4m3"),
    "probs_fp8_e5m2": dict(probs="fp8_e5m2"),
    "row_sum": dict(row_sum="bf16"),
    "output_fp32": dict(output="fp32"),
    "output_stochastic": dict(output="stochastic"),
    "pv_stochastic": dict(pv="stochastic", output="stochastic"),
    "pv_stochastic_full": dict(pv="stochastic", tile_k=FULL),
    "output_heads": dict(output_heads=(1,)),
    "output_heads_stochastic": dict(output_heads=(0,), output="stochastic"),
    "delta_exact": dict(delta="do_o_exact"),
    "delta_exact_fa2": dict(backend="flash_fa2", delta="do_o_exact"),
    "delta_exact_fp32": dict(backend="flash_fp32", output="bf16", delta="do_o_exact"),
    "delta_exact_stochastic": dict(output="stochastic", pv="stochastic", delta="do_o_exact"),
    "delta_exact_heads": dict(output_heads=(1,), delta="do_o_exact", tile_k=FULL),
    "delta_dp_p": dict(delta="dp_p"),
    "delta_dp_p_normalized": dict(delta="dp_p_normalized"),
    "delta_corrected": dict(delta="do_o_corrected"),
    "delta_corrected_softcap": dict(backend="flash_fa2", delta="do_o_corrected", softcap=2.0),
    "delta_corrected_fp32": dict(backend="flash_fp32", output="bf16", delta="do_o_corrected"),
    "delta_recomputed": dict(delta="do_o_recomputed"),
    "softcap": dict(softcap=2.0),
    "softcap_fp32": dict(backend="flash_fp32", softcap=2.0),
    "tile_full": dict(tile_k=FULL),
    "tile_full_stabilized": dict(tile_k=FULL, backend="stabilized"),
    "tile_128": dict(tile_k=128),
} | {f"stabilizer_{name}": dict(stabilizer=name) for name in
     ("paper", "capped", "clamp", "fixed", "unconditional", "lazy_max")}


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_equals_emulated(worker, name):
    chosen = dict(tile_q=32, tile_k=32) | SWITCHES[name]
    spec = AttentionSpec(**({"backend": name} if name.startswith("flash") and not SWITCHES[name] else {}) | chosen)
    tensors = inputs()
    tensors[0][:, :, 40:] = tensors[1][:, :, :30] = 0.5  # many rows with equal maxima
    ours, theirs = both(worker, tensors, spec)
    assert_close(ours, theirs, spec)
    assert (theirs["ties"] > 1).any() and (theirs["ties"] == 1).any()


@pytest.mark.parametrize("delta", ["do_o", "do_o_corrected"])
def test_dO_is_read_in_the_operands_format(worker, delta):
    """Of a model that trains in FP32 it arrives unrounded, and delta reads it as the products do."""
    spec = AttentionSpec(delta=delta, tile_q=32, tile_k=32)
    *qkv, do = inputs()
    raw, rounded = (flash(worker, (*qkv, x), spec) for x in (do * (1 + 2**-10), round_bf16(do * (1 + 2**-10))))
    assert all(torch.equal(raw[name], rounded[name]) for name in EXACT)


@pytest.mark.parametrize("T", [1, 2, 15, 17, 64, 127, 129])
def test_lengths(worker, T):
    spec = AttentionSpec(backend="stabilized", tile_q=64, tile_k=64)
    tensors = inputs(T=T)
    assert_close(*both(worker, tensors, spec), spec)


@pytest.mark.parametrize("D", [16, 32, 48, 80, 96, 128])
@pytest.mark.parametrize("backend", ["flash_bf16", "flash_fp32"])
def test_head_sizes(worker, D, backend):
    spec = AttentionSpec(backend=backend, tile_q=32, tile_k=32)
    assert_close(*both(worker, inputs(H=1, T=40, D=D), spec), spec)


@pytest.mark.parametrize("tile_q, tile_k", [(16, 64), (64, 16), (32, 128), (128, 32)])
def test_results_depend_on_the_key_tile_alone(worker, tile_q, tile_k):
    spec = AttentionSpec(backend="stabilized", tile_q=tile_q, tile_k=tile_k)
    tensors = inputs(T=100)
    ours, theirs = both(worker, tensors, spec)
    assert_close(ours, theirs, spec)
    other = AttentionSpec(backend="stabilized", tile_q=32, tile_k=tile_k)
    assert torch.equal(both(worker, tensors, other)[0]["o"], ours["o"])


@pytest.mark.parametrize("tile_k", [256, 512])
def test_tiles_longer_than_a_step_of_the_kernel(worker, tile_k):
    spec = AttentionSpec(backend="stabilized", tile_k=tile_k)
    assert_close(*both(worker, inputs(H=1, T=300), spec), spec)


@pytest.mark.parametrize("backend", ["flash_fa2", "flash_fp32"])
def test_float64(worker, backend):
    tensors = inputs(T=129, D=32, std=2.0)
    spec = AttentionSpec(backend=backend, tile_k=64, **({"output": "fp32"} if backend == "flash_fa2" else {}))
    ours = flash(worker, tensors, spec)
    q, k, v = (x.double().requires_grad_() for x in tensors[:3])
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(torch.ones(129, 129).triu(1).bool(), -torch.inf)
    o = s.softmax(-1) @ v
    exact = dict(zip(EXACT, (o, *torch.autograd.grad(o, (q, k, v), tensors[3].double())), strict=True))
    for name in EXACT:
        error = (ours[name] - exact[name]).abs().max() / exact[name].abs().max()
        assert error < (2e-6 if backend == "flash_fp32" else 6e-3), name
    torch.testing.assert_close(ours["lse"].double(), s.logsumexp(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("maximum", [20.0, -120.0, 0.0, 1e4])
@pytest.mark.parametrize("stabilizer", ["none", "paper", "capped", "unconditional"])
def test_row_maxima(worker, maximum, stabilizer):
    """Rows whose scores all equal one value, and rows with a single maximum."""
    q, k, v, do = inputs(H=1, T=48, D=16)
    q[..., 0], k[..., 0] = abs(maximum) ** 0.5 * 2, abs(maximum) ** 0.5 * (1 if maximum >= 0 else -1) * 2
    q[..., 1:], k[..., 1:] = 0, 0
    q[:, :, 30:, 1], k[:, :, ::7, 1] = 1, torch.arange(7) * 0.5
    tensors = [round_bf16(x) for x in (q, k, v, do)]
    spec = AttentionSpec(stabilizer=stabilizer, tile_q=16, tile_k=16)
    ours, theirs = both(worker, tensors, spec)
    assert (theirs["ties"] > 1).any()
    assert_close(ours, theirs, spec)


def test_a_single_maximum_gives_exactly_one(worker):
    """V = 1 in the maximum's place alone: O is P / l, and P of a row's only maximum must be 1 at any size of logits."""
    q = torch.zeros(1, 1, 16, 16)
    q[..., 0] = 100.0
    k = q * torch.linspace(3, 1, 16)[:, None]
    v = torch.zeros_like(q)
    v[:, :, 0] = 1
    spec = AttentionSpec(backend="flash_fp32", tile_k=16)
    result = flash(worker, (q, k, v, torch.ones_like(q)), spec, True)
    assert (result["o"] == 1).all() and (result["ties"] == 1).all() and result["row_max"].max() > 7000


def test_ones_give_ones_before_rounding(worker):
    q, k, _, do = inputs(T=100)
    for backend in ("flash_bf16", "flash_fp32"):
        spec = AttentionSpec(backend=backend, output="fp32", **({"pv": "fp32"} if backend == "flash_bf16" else {}))
        result = flash(worker, (q, k, torch.ones_like(q), do), spec)
        assert (result["o"] - 1).abs().max() < (1e-5 if backend == "flash_fp32" else 2**-9)


def test_strides(worker):
    """Views of one (B, T, 3, H, D) tensor, a transposed dO and one of stride 0 give what contiguous tensors give."""
    torch.manual_seed(0)
    packed = bf16(2, 33, 3, 2, 16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    spec = AttentionSpec(tile_q=16, tile_k=16)
    for do in (bf16(2, 33, 2, 16).transpose(1, 2), bf16(1, 1, 1, 1).expand(2, 2, 33, 16), bf16(2, 2, 16, 33).mT):
        ours = flash(worker, (q, k, v, do), spec)
        plain = flash(worker, [x.contiguous() for x in (q, k, v, do)], spec)
        assert all(torch.equal(ours[n], plain[n]) for n in EXACT)
        assert ours["o"].transpose(1, 2).is_contiguous() and ours["ties"].shape == (0,)


def test_statistics_change_nothing(worker):
    spec = AttentionSpec(tile_k=32)
    tensors = inputs()
    with_stats, without = (flash(worker, tensors, spec, stats) for stats in (True, False))
    assert all(torch.equal(with_stats[n], without[n]) for n in (*EXACT, "lse"))


def test_what_is_kept_for_delta_changes_no_o(worker):
    """Keys are walked to the same O whether it is kept; dV does not see delta, dQ and dK do."""
    tensors = inputs()
    kept, without = (flash(worker, tensors, AttentionSpec("flash_fa2", delta=x)) for x in ("do_o_exact", "do_o"))
    assert all(torch.equal(kept[n], without[n]) for n in ("o", "lse", "dv"))
    assert not any(torch.equal(kept[n], without[n]) for n in ("dq", "dk"))


@pytest.mark.parametrize("choice", [{}, dict(backend="stabilized"), dict(backend="flash_fa2"), dict(tile_k=FULL)])
def test_ties_of_the_first_sequences_alone(worker, choice):
    spec = AttentionSpec(**dict(tile_q=32, tile_k=32) | choice)
    tensors = inputs(B=3, T=40)
    tensors[0][:, :, 20:] = tensors[1][:, :, :20] = 0.5
    whole = flash(worker, tensors, spec, True)
    for counted in (0, 2):
        some = worker.submit(interpreted.run, "flash", *tensors, RNG, spec.key, True, counted).result()
        assert torch.equal(some["ties"], whole["ties"][:counted]) and some["ties"].shape[0] == counted
        assert all(torch.equal(some[n], whole[n]) for n in ("row_max", "lse", *EXACT))


def test_rounding_helpers(worker):
    """All upper halves with lower halves around the tie, NaN and inf included; FP8 over a sweep of [0, 500]."""
    upper = torch.arange(-2**15, 2**15, dtype=torch.int32) << 16
    x = (upper[:, None] | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).view(torch.float32).flatten()
    for name in ("round_bf16", "narrow"):
        y = worker.submit(interpreted.kernel_helper, name, x).result()
        expected = x.bfloat16().float()
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))
    p = torch.cat([torch.rand(20000), torch.rand(20000) * 2**-5, torch.rand(20000) * 2**-13, torch.rand(2000) * 6e4])
    for format in ("fp8_e4m3", "fp8_e5m2"):
        y = worker.submit(interpreted.kernel_helper, "round_fp8", p, format).result()
        assert torch.equal(y, round_to(p, format))
    t = torch.cat([torch.randn(20000), torch.linspace(-10, 10, 20001)])
    y = worker.submit(interpreted.kernel_helper, "tanh", t).result()
    assert ((y.double() - t.double().tanh()).abs() <= 4e-7 * t.double().tanh().abs()).all()


def test_tf32_parts(worker):
    """Large and small part make x, the large one is a value of TF32, and of the small one the tensor core, which cuts
    factors to TF32, takes no more than x's last place. NaN and Inf do not vanish."""
    bits = torch.randint(-2**31, 2**31 - 1, (50000,), dtype=torch.int32)
    patterns = [0x1000, 0x1FFF, 0x3FFFFFFF, 0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F802FFF, 0x7F7FEFFF, 1, 0]
    bits = torch.cat([bits[(bits & 0x7FFFFFFF) < 0x7F7FF000], torch.tensor(patterns, dtype=torch.int32)])
    x = torch.cat([bits, bits | -2**31]).view(torch.float32)
    large, small = (worker.submit(interpreted.kernel_helper, part, x).result() for part in ("large", "small"))
    assert not (large.view(torch.int32) & 0x1FFF).any() and torch.equal(large.double() + small, x.double())
    left_over = small.double() - (small.view(torch.int32) & -0x2000).view(torch.float32)
    last_place = torch.exp2((torch.frexp(x.double())[1] - 24).double()).clamp(min=2.0**-149)
    assert (small.abs() <= 2**12 * last_place).all()
    assert (left_over.abs() <= last_place.clamp(min=2.0**-136)).all()  # below 2^-126 TF32 has steps of 2^-136
    special = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001, 0x7F7FF000, 0x7F7FFFFF],
                           dtype=torch.int32).view(torch.float32)
    large, small = (worker.submit(interpreted.kernel_helper, part, special).result() for part in ("large", "small"))
    assert not (large + small).isfinite().any()


def test_a_sum_of_tf32_products_is_added_once(worker):
    """A tensor core rounds its sums towards zero at every eight terms, so an accumulator must not pass through it:
    three times a tile it is off by 7 times as much."""
    x, y, acc = torch.randn(3, 32, 32)
    plain, acc = worker.submit(interpreted.product, x, y, None, "tf32x3", False).result(), 100 * acc
    assert torch.equal(worker.submit(interpreted.product, x, y, acc, "tf32x3", False).result(), acc + plain)
    exact, size = x.double() @ y.double(), x.double().abs() @ y.double().abs()
    for computed in (False, True):
        found = worker.submit(interpreted.product, x, y, None, "tf32x3", computed).result()
        assert ((found - exact).abs() <= 2**-20 * size).all()


def test_launch_is_described_and_bad_input_refused(worker):
    spec = AttentionSpec(backend="flash_bf16")
    line = worker.submit(interpreted.call, "describe_launch", spec, 64, "cpu", 1024, torch.float32).result()
    assert all(word in line for word in ("forward=", "dq=", "dkdv=", f"triton {TRITON}"))
    for head, words in ((160, "head sizes up to 128, got 160"), (64, "the kernels take heads up to 62")):
        wide = AttentionSpec(backend="flash_bf16", output_heads=(63,))
        with pytest.raises(ValueError, match=words):  # so before a run starts
            worker.submit(interpreted.call, "describe_launch", wide, head, "cpu", 1024, torch.float32).result()
    big = torch.zeros(1, 1, 2, 160)
    for tensor, words in ((big, "head sizes up to 128, got 160"), (big[..., :16].double(), "kernel=emulated"),
                          (big[..., :16].bfloat16(), "carry BF16 values in float32")):
        with pytest.raises(ValueError, match=words):
            flash(worker, [tensor] * 4, spec)


def test_descriptors_are_for_whole_tiles_of_bf16_matrices(monkeypatch):
    """What decides between descriptors and pointers: the tile, then length, head size and dtype, then the layout."""
    from attention import flash

    packed = torch.zeros(2, 256, 3, 4, 64, dtype=torch.bfloat16)
    q = packed[:, :, 1].transpose(1, 2)
    tile = flash.Tile(64, 128, 4, 2, 168, True)
    assert flash.fitted(tile, q, q, q) == tile and str(tile) == "64x128/4w/2s/168r/tma"
    d = flash.descriptor(q, 128)
    assert d.base is q and d.shape == [512, 256] and d.strides == [768, 1] and d.block_shape == [128, 64]
    assert flash._descriptors(tile._replace(tma=False), q, q, q) == [None] * 3

    plain = tile._replace(tma=False)
    shifted = torch.zeros(packed.numel() + 1, dtype=torch.bfloat16)[1:].view(packed.shape)[:, :, 1].transpose(1, 2)
    odd = torch.zeros(2, 256, 4 * 64 + 4, dtype=torch.bfloat16)[..., :256].view(2, 256, 4, 64).transpose(1, 2)
    for other in (q[:, :, :192], q[..., :32], q.float(), q.contiguous(), q[:, :, ::2].transpose(0, 1), shifted, odd,
                  torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(2, 4, 256, 64)):
        assert flash.fitted(tile, other, other, other) == plain, (other.shape, other.stride())
        if other.shape == q.shape:
            assert flash.fitted(tile, q, q, other) == plain  # one is enough
    assert flash.fitted(plain, q, q, q) == plain
    one = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16)  # one sequence, one head: its other strides mean nothing
    assert flash.fitted(tile, one, one, one) == tile
    monkeypatch.setattr(flash, "INTERPRET", True)
    assert flash.fitted(tile, q, q, q) == plain


def test_what_is_described_is_what_fits(monkeypatch):
    from attention import flash

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    bf16_, fp32 = torch.bfloat16, torch.float32
    for choice, T, dtype, loads in (({}, 1024, bf16_, "forward dq dkdv"), ({}, 1024, fp32, ""), ({}, 1000, bf16_, ""),
                                    ({}, 1088, bf16_, "dq dkdv"), (dict(tile_k=FULL), 1024, bf16_, "dq dkdv"),
                                    (dict(backend="flash_fa2"), 1024, bf16_, "dq dkdv")):
        line = flash.describe_launch(AttentionSpec(**choice), 64, "cuda", T, dtype)
        found = [word.partition("=")[0] for word in line.split() if word.endswith("/tma")]
        assert " ".join(found) == loads, (choice, T, dtype, line)


@pytest.mark.parametrize("shape, group", [
    ((32, 12, 1024, 64), 48), ((16, 16, 1024, 64), 52), ((8, 12, 4096, 64), 24), ((16, 12, 1024, 128), 24),
    ((1, 2, 64, 64), 2), ((1, 3, 65536, 128), 1)])
def test_heads_run_side_by_side_in_groups_of_one_size(shape, group):
    """But for rounding: a small last group would leave multiprocessors idle."""
    from attention import flash

    heads = shape[0] * shape[1]
    assert flash._group(torch.empty(shape, dtype=torch.bfloat16, device="meta"), heads) == group
    assert group * (math.ceil(heads / group) - 0.25) <= heads


def test_launch_table():
    """A tile that loads by pointers instead takes the same keys at a time, which decide the result, and no descriptors;
    tiles are what Triton and the tensor cores can take."""
    from attention import flash

    assert {key[0] for key in flash.LAUNCHES} == {8, 9} and len(flash.LAUNCHES) == 2 * 2 * 2 + 2
    for (generation, _, operands), launch in flash.LAUNCHES.items():
        assert set(launch.forward) == {128, 64, 32}
        for keys, tile in (*launch.forward.items(), (launch.dq.keys, launch.dq), (launch.dkdv.keys, launch.dkdv)):
            plain = tile.with_pointers()
            assert plain.keys == tile.keys <= keys and not plain.tma and plain.otherwise is None
            assert not tile.tma or (generation == 9 and operands == "bf16"), tile
            assert tile.tma or tile.otherwise is None, tile
            for rows, keys_, warps, stages in (tile[:4], plain[:4]):
                assert all(n & (n - 1) == 0 for n in (rows, keys_, warps)) and min(rows, keys_) >= 16 and stages >= 1


@pytest.mark.parametrize("D, dots, dtype, tiles", [
    (64, "tf32x3", torch.float32, "tf32x3: forward=128x32/8w/2s/128r dq=128x64/8w/1s dkdv=32x128/8w/1s"),
    (64, "tf32x3", torch.bfloat16, "fp32: forward=64x32/4w/2s dq=64x32/4w/2s dkdv=32x128/8w/1s"),
    (64, "ieee", torch.float32, "fp32: forward=64x32/4w/2s dq=64x32/4w/2s dkdv=32x128/8w/1s"),
    (128, "tf32x3", torch.float32, "tf32x3: forward=128x32/8w/1s dq=64x32/4w/1s dkdv=32x64/4w/1s"),
    (128, "tf32x3", torch.bfloat16, "fp32: forward=64x32/4w/1s dq=64x32/4w/1s dkdv=32x64/4w/1s"),
    (128, "ieee", torch.float32, "fp32: forward=64x32/4w/1s dq=64x16/4w/1s dkdv=16x64/4w/1s"),
])
def test_fp32_operands_have_tiles_by_how_they_are_multiplied(monkeypatch, D, dots, dtype, tiles):
    from attention import flash

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert f" D<={D} {tiles} " in flash.describe_launch(AttentionSpec("flash_fp32", dots=dots), D, "cuda", 1024, dtype)


@pytest.mark.parametrize("choice, D, T, dtype, forward", [
    ({}, 128, 1024, torch.bfloat16, "64x128/4w/1s/168r/tma"),
    ({}, 128, 1000, torch.bfloat16, "128x128/8w/2s"),
    ({}, 96, 1024, torch.bfloat16, "128x128/8w/2s"),
    ({}, 128, 1024, torch.float32, "128x128/8w/2s"),
    (dict(tile_k=FULL), 128, 1024, torch.bfloat16, "128x128/8w/2s"),
    (dict(tile_q=32), 128, 1000, torch.bfloat16, "32x128/8w/2s"),
    (dict(tile_q=32), 128, 1024, torch.bfloat16, "32x128/4w/1s/168r/tma"),
    (dict(backend="flash_fa2"), 128, 1024, torch.bfloat16, "64x64/4w/3s/tma"),
    ({}, 64, 1000, torch.bfloat16, "64x128/4w/2s/168r"),
])
def test_where_descriptors_cannot_load_another_tile_may(monkeypatch, choice, D, T, dtype, forward):
    """At D = 128 with 128 keys the tile of descriptors would spill by pointers. What is described is launched."""
    from attention import flash

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    spec = AttentionSpec(**choice)
    assert f" forward={forward} " in flash.describe_launch(spec, D, "cuda", T, dtype)
    (tile,) = flash.launch_for(spec, D, torch.device("cuda"), dtype)[1].forward.values()
    q = torch.empty(1, T, 3, 2, D, dtype=dtype)[:, :, 0].transpose(1, 2)
    assert str(flash.fitted(tile, q, q, q)) == forward


@pytest.mark.parametrize("delta", ["do_o", "do_o_exact"])
def test_loads_by_descriptors(worker, delta):
    """Heads side by side in one matrix of tokens: the same tiles as by pointers. FP32, as the interpreter needs."""
    packed = bf16(2, 128, 4, 2, 64)
    q, k, v, do = (packed[:, :, i].transpose(1, 2) for i in range(4))
    spec = AttentionSpec(delta=delta)
    by_pointers = flash(worker, (q, k, v, do), spec)
    found = worker.submit(interpreted.run_with_descriptors, q, k, v, do, RNG, spec.key).result()
    assert all(torch.equal(by_pointers[name], found[name]) for name in (*EXACT, "lse"))


def test_without_gpu_or_interpreter_the_kernels_are_refused():
    from attention import flash

    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="kernel=triton needs a CUDA GPU"):
            flash.check_available(torch.device("cpu"))


def test_standard_attention_agrees(worker):
    """The two arms of an experiment compute the same function: differences are roundings, not a wrong mask or scale."""
    tensors = inputs(T=70, D=32)
    ours = flash(worker, tensors, AttentionSpec("flash_fa2"))["o"]
    theirs = standard(*tensors[:3], RNG, AttentionSpec("standard").key, False)[0]
    assert (ours - theirs).abs().max() < 2**-5
