"""`bench_attention.py --check` and `--bias`: the Triton kernels against `emulated` for every switch, entry by entry,
and the errors that both have where rounding is biased."""

import json
import time

import torch

from attention import AttentionSpec, flash
from attention.emulated import emulated
from attention.rounding import round_bf16
from scripts.bench_attention_common import RNG, tensors, write
from scripts.bench_attention_workers import build_all, builds

CHECKED = (((2, 4, 1000, 64), 1.0), ((2, 4, 512, 64), 4.0), ((1, 4, 512, 128), 1.0), ((1, 4, 300, 80), 1.0))

SWITCHES = [dict(backend=b) for b in ("flash_fa2", "flash_bf16", "stabilized", "flash_fp32")] + [
    dict(backend="flash_fp32", dots="ieee", tile_k=32), dict(backend="flash_fa2", scores="bf16"),
    dict(backend="flash_fa2", pv="bf16"), dict(probs="fp32"), dict(probs="fp8_e4m3"), dict(probs="fp8_e5m2"),
    dict(row_sum="bf16"), dict(pv="stochastic"), dict(output="fp32"), dict(output="stochastic"),
    dict(output_heads=(0, 2)), dict(delta="do_o_exact"), dict(delta="dp_p"), dict(delta="dp_p_normalized"),
    dict(delta="do_o_corrected"), dict(delta="do_o_recomputed"), dict(softcap=30.0), dict(tile_k=0),
    dict(tile_k=64), dict(tile_k=256), dict(tile_k=0, backend="stabilized")] + [
    dict(stabilizer=s) for s in ("paper", "capped", "clamp", "fixed", "unconditional", "lazy_max")]


BACKENDS = ("flash_fa2", "flash_bf16", "stabilized", "flash_fp32")
BIASED_SHAPE = (4, 6, 512, 64)
BIASED = ((1.0, 0.0), (3.0, 0.0), (3.0, -0.5), (8.0, -0.5))  # scale of Q, mean of V


def cases():
    """(shape, std, AttentionSpec fields) of `check`, the first shape with every switch before the others."""
    return [(shape, std, choice) for shape, std in CHECKED for choice in (SWITCHES if shape[3] == 64 else SWITCHES[:4])]


def dtype_of(choice):
    return torch.float32 if AttentionSpec(**choice).operands == "fp32" else torch.bfloat16


def needs():
    """What `check` and `bias` launch, for `builds`."""
    return [(choice, dtype_of(choice), *shape[2:], True) for shape, _, choice in cases()] + [
        (dict(backend=name), torch.bfloat16, *BIASED_SHAPE[2:], False) for name in BACKENDS]


def check(args):
    """Kernels against `emulated` with the same tiles on fresh inputs, for every switch."""
    start, rows, before = time.monotonic(), [], None
    build_all(builds(needs()), args.workers, start + args.seconds / 2)
    for shape, std, choice in cases():
        if time.monotonic() > start + args.seconds:
            print(f"stopped after {args.seconds:g} s, {len(rows)} of {len(cases())} done")
            break
        if (shape, std) != before:
            print(f"\n{shape} std {std}: share of entries that differ, signed mean difference over the mean size, "
                  "largest difference over the largest value")
            before = shape, std
        rows.append(one(shape, std, choice))
        print(line(rows[-1]), flush=True)
        write(args.out, check=rows)


def one(shape, std, choice) -> dict:
    """What differs between a kernel's results and the emulation's."""
    spec = AttentionSpec(**choice)
    qkv, do = tensors(shape, dtype_of(choice), std)
    with torch.no_grad():
        qkv[0][:, :, -100:], qkv[1][:, :, :100] = 0.5, 0.5  # rows with equal maxima
    rng, results = torch.tensor(RNG, device=do.device), []
    for run in (flash.flash, emulated):
        o, lse, ties, row_max, _ = run(*qkv, rng, spec.key, True)
        results.append([o, lse, *torch.autograd.grad(o, qkv, do.to(o.dtype)), ties, row_max])
    row = dict(zip("BHTD", shape, strict=True)) | dict(std=std, switch=json.dumps(choice), spec=spec.describe())
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv", "ties", "row_max"), *results, strict=True):
        a, b = a.detach().double(), b.detach().double()
        row[name] = dict(differ=(a != b).double().mean().item(), finite=bool(a.isfinite().all()),
                         mean=((a - b).mean() / b.abs().mean()).item(),
                         largest=((a - b).abs().max() / b.abs().max()).item())
    return row


def line(row) -> str:
    names = ("o", "dq", "dk", "dv")
    return (f"{row['switch']:48s}" + " ".join(
        f"{n}:{row[n]['differ']:.4f}/{row[n]['mean']:+.0e}/{row[n]['largest']:.0e}" for n in names)
        + f" ties:{row['ties']['differ']:.5f} lse:{row['lse']['largest']:.0e}"
        + ("" if all(row[n]["finite"] for n in names) else " NOT FINITE"))


def bias(args):
    """Signed mean errors of O and of delta = rowsum(dO O) on inputs whose row maxima repeat, against float64."""
    start, rows = time.monotonic(), []
    build_all(builds(needs()), args.workers, start + args.seconds / 2)
    print(f"{'scale of Q, mean of V':22s} {'backend':11s} {'tied':>5s}  error of O: kernel, emulated  of delta: "
          "kernel, emulated")
    for scale, mean in BIASED:
        (q, k, v), do = biased(scale, mean)
        rng = torch.tensor(RNG, device=do.device)
        for name in BACKENDS:
            spec = AttentionSpec(name)
            exact, row = float64(q, k, v, spec), dict(q_scale=scale, v_mean=mean, backend=name)
            for which, run in (("kernel", flash.flash), ("emulated", emulated)):
                with torch.no_grad():
                    o, _, ties, *_ = run(q, k, v, rng, spec.key, which == "emulated")
                error = o.double() - exact
                row[which] = dict(o=error.mean().item(), delta=(do.double() * error).sum(-1).mean().item())
            row["tied"] = (ties > 1).double().mean().item()
            rows.append(row)
            print(f"{scale:g}, {mean:g}".ljust(23) + f"{name:11s} {row['tied']:5.3f}  " + "  ".join(
                f"{row['kernel'][n]:+.4e} {row['emulated'][n]:+.4e}" for n in ("o", "delta")), flush=True)
    write(args.out, bias=rows)


def biased(scale, mean):
    """q, k, v and dO. Every key comes up in many places, so that maxima repeat; V and dO have means, so that the
    rounding of P V, which repeated maxima bias, has a sign (paper section 3)."""
    (q, k, v), do = tensors(BIASED_SHAPE, torch.float32)
    with torch.no_grad():
        q *= scale
        k[:, :, 1::2] = k[:, :, ::2]
        v *= 0.5
        v += mean
        return [round_bf16(x).bfloat16() for x in (q, k, v)], round_bf16(do - 0.3).bfloat16()


def float64(q, k, v, spec):
    """O in float64, from scores that are rounded where the backend rounds them: what is left is the error behind."""
    s = q.double() @ k.double().mT
    if spec.scores == "bf16":
        s = round_bf16(s.float()).double()
    s = (s * q.shape[-1] ** -0.5).masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1) @ v.double()
