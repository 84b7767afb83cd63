"""`bench_attention.py --check`: the Triton kernels against `emulated`, entry by entry, for every switch."""

import json

import torch

from attention import AttentionSpec, flash
from attention.emulated import emulated
from scripts.bench_attention_common import RNG, tensors, write

CHECKED = (((2, 4, 1000, 64), 1.0), ((2, 4, 512, 64), 4.0), ((1, 4, 512, 128), 1.0), ((1, 4, 300, 80), 1.0))

SWITCHES = [dict(backend=b) for b in ("flash_fa2", "flash_bf16", "stabilized", "flash_fp32")] + [
    dict(backend="flash_fp32", dots="ieee", tile_k=32), dict(backend="flash_fa2", scores="bf16"),
    dict(backend="flash_fa2", pv="bf16"), dict(probs="fp32"), dict(probs="fp8_e4m3"), dict(probs="fp8_e5m2"),
    dict(row_sum="bf16"), dict(output="fp32"), dict(output="stochastic"), dict(output_heads=(0, 2)),
    dict(delta="dp_p"), dict(delta="do_o_recomputed"), dict(softcap=30.0), dict(tile_k=0), dict(tile_k=64),
    dict(tile_k=256), dict(tile_k=0, backend="stabilized")] + [
    dict(stabilizer=s) for s in ("paper", "capped", "clamp", "fixed", "unconditional", "lazy_max")]


def check(args):
    """Kernels against `emulated` with the same tiles on fresh inputs, for every switch."""
    rows = []
    for shape, std in CHECKED:
        print(f"\n{shape} std {std}: share of entries that differ, signed mean of the difference over the mean size")
        for choice in SWITCHES if shape[3] == 64 else SWITCHES[:4]:
            spec = AttentionSpec(**choice)
            qkv, do = tensors(shape, torch.float32 if spec.operands == "fp32" else torch.bfloat16, std)
            with torch.no_grad():
                qkv[0][:, :, -100:], qkv[1][:, :, :100] = 0.5, 0.5  # rows with equal maxima
            rng, results = torch.tensor(RNG, device=do.device), []
            for run in (flash.flash, emulated):
                o, lse, ties, row_max = run(*qkv, rng, spec.key, True)
                results.append([o, lse, *torch.autograd.grad(o, qkv, do.to(o.dtype)), ties, row_max])
            row = dict(zip("BHTD", shape, strict=True)) | dict(std=std, switch=json.dumps(choice), spec=spec.describe())
            for name, a, b in zip(("o", "lse", "dq", "dk", "dv", "ties", "row_max"), *results, strict=True):
                a, b = a.detach().double(), b.detach().double()
                row[name] = dict(differ=(a != b).double().mean().item(), finite=bool(a.isfinite().all()),
                                 mean=((a - b).mean() / b.abs().mean()).item(),
                                 largest=((a - b).abs().max() / b.abs().max()).item())
            rows.append(row)
            print(f"{row['switch']:48s}" + " ".join(
                f"{n}:{row[n]['differ']:.4f}/{row[n]['mean']:+.0e}/{row[n]['largest']:.0e}" for n in
                ("o", "dq", "dk", "dv")) + f" ties:{row['ties']['differ']:.5f} lse:{row['lse']['largest']:.0e}"
                + ("" if all(row[n]["finite"] for n in ("o", "dq", "dk", "dv")) else " NOT FINITE"), flush=True)
    write(args.out, check=rows)
