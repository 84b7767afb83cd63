"""Times attention backends beside torch SDPA, and compares the Triton kernels with float64 and with `emulated`.

    python scripts/bench_attention.py                      # the table, and results/bench_attention.json
    python scripts/bench_attention.py --tune --seconds=120 # best launch configurations, ready to paste into flash.py
    python scripts/bench_attention.py --check              # per switch: entries that differ from `emulated`
    python scripts/bench_attention.py --memory             # peak memory beyond what must exist

Times are medians of single calls between CUDA events, backends taking turns within each round, with the L2 cache
overwritten before each call and the GPU held back until the CPU has launched it. q, k, v are views of one
(B, T, 3, H, D) tensor and dO is a transposed (B, T, H, D) tensor, as in training. Needs a CUDA GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attention import AttentionSpec, attend, flash
from attention.emulated import emulated

SHAPES = ("32,12,1024,64", "16,16,1024,64", "16,12,2048,64", "8,12,4096,64", "16,12,1024,128")
ARMS = ("sdpa,flash_fa2,flash_bf16,stabilized,flash_bf16+stats,stabilized+stats,flash_fp32@32,standard,sdpa/float32,"
        "flash_fp32@32/float32")
CHECKED = (((2, 4, 1000, 64), 1.0), ((2, 4, 512, 64), 4.0), ((1, 4, 512, 128), 1.0), ((1, 4, 300, 80), 1.0))
RNG = (1234567, 3, 5)

# rows, keys, warps, stages, registers. Candidates of --tune whose build for sm_90 spills little or nothing.
BF16_TILES = dict(
    forward=[(64, 64, 4, 3, 128), (64, 64, 4, 2, 128), (64, 64, 4, 3, 0), (64, 64, 4, 1, 168), (128, 64, 8, 3, 128),
             (128, 64, 8, 2, 128), (128, 64, 4, 3, 0), (128, 64, 8, 3, 0), (64, 128, 4, 2, 168), (64, 128, 4, 2, 0),
             (64, 128, 4, 1, 168), (128, 128, 8, 2, 128), (128, 128, 8, 2, 0), (64, 64, 4, 2, 0)],
    dq=[(64, 64, 4, 2, 128), (64, 64, 4, 3, 0), (64, 64, 4, 2, 0), (128, 64, 8, 2, 128), (64, 32, 4, 3, 128),
        (64, 128, 4, 2, 0), (128, 64, 8, 2, 0), (64, 32, 4, 2, 168), (64, 64, 4, 1, 128), (64, 32, 4, 4, 128)],
    dkdv=[(32, 64, 4, 3, 128), (32, 64, 4, 2, 128), (64, 64, 4, 2, 168), (64, 64, 4, 3, 168), (64, 64, 4, 2, 0),
          (32, 128, 8, 2, 128), (64, 128, 8, 2, 0), (32, 64, 4, 2, 0), (64, 64, 4, 1, 168), (32, 64, 4, 4, 128),
          (64, 64, 8, 2, 128), (32, 128, 8, 2, 0)])
FP32_TILES = dict(
    forward=[(64, 32, 4, 2, 0), (64, 64, 4, 2, 0), (64, 64, 4, 1, 0), (128, 32, 8, 2, 0), (64, 128, 4, 1, 0)],
    dq=[(64, 32, 4, 2, 0), (64, 64, 4, 2, 0), (128, 32, 8, 2, 0), (64, 32, 4, 2, 128), (64, 32, 4, 1, 0)],
    dkdv=[(32, 64, 4, 2, 0), (16, 64, 4, 2, 0), (32, 128, 8, 2, 0), (16, 64, 4, 2, 168), (32, 64, 4, 1, 0)])

SWITCHES = [dict(backend=b) for b in ("flash_fa2", "flash_bf16", "stabilized", "flash_fp32")] + [
    dict(backend="flash_fp32", dots="ieee", tile_k=32), dict(backend="flash_fa2", scores="bf16"),
    dict(backend="flash_fa2", pv="bf16"), dict(probs="fp32"), dict(probs="fp8_e4m3"), dict(probs="fp8_e5m2"),
    dict(row_sum="bf16"), dict(output="fp32"), dict(output="stochastic"), dict(output_heads=(0, 2)),
    dict(delta="dp_p"), dict(delta="do_o_recomputed"), dict(softcap=30.0), dict(tile_k=0), dict(tile_k=64),
    dict(tile_k=256), dict(tile_k=0, backend="stabilized")] + [
    dict(stabilizer=s) for s in ("paper", "capped", "clamp", "fixed", "unconditional", "lazy_max")]


def arm(text):
    """BACKEND[@TILE_K][+stats][/float32] -> spec, whether row statistics are asked for, dtype of the tensors."""
    text, _, dtype = text.partition("/")
    text, plus, _ = text.partition("+")
    backend, at, tile = text.partition("@")
    spec = AttentionSpec(backend, **({"tile_k": int(tile)} if at else {}))
    return spec, bool(plus), getattr(torch, dtype or "bfloat16")


def tensors(shape, dtype, std=1.0, seed=0):
    """q, k, v (leaves that share one packed tensor) and dO."""
    B, H, T, D = shape
    g = torch.Generator("cuda").manual_seed(seed)
    packed = (torch.randn(B, T, 3, H, D, device="cuda", generator=g) * std).bfloat16().to(dtype)
    do = torch.randn(B, T, H, D, device="cuda", generator=g).bfloat16().to(dtype).transpose(1, 2)
    return [packed[:, :, i].transpose(1, 2).detach().requires_grad_() for i in range(3)], do


class Clock:
    """Medians of calls that take turns."""

    def __init__(self):
        self.cache = torch.empty(1 << 30, dtype=torch.int8, device="cuda")

    def one(self, call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # half a millisecond, so that the launches are queued before the call's turn comes
        self.cache.zero_()
        start.record()
        call()
        end.record()
        return start, end

    def medians(self, calls: list, rounds: int) -> list[float]:
        """ms of each call, NaN where it is None."""
        for call in calls:
            for _ in range(2 if call else 0):
                call()
        events = [[self.one(call) if call else None for call in calls] for _ in range(rounds)]
        torch.cuda.synchronize()
        return [statistics.median(row[i][0].elapsed_time(row[i][1]) for row in events) if call else float("nan")
                for i, call in enumerate(calls)]


def passes(spec, qkv, do, stats=False):
    """O, and (forward, backward) of a backend to be timed."""
    def run(stats=False):
        if spec.backend == "sdpa":  # not through the backend, which rounds float32 tensors to BF16 as autocast would
            return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        return attend(*qkv, spec, stats=stats)

    def forward():
        with torch.no_grad():
            run(stats)

    o = run()
    grad = do.to(o.dtype)
    return o, forward, lambda: torch.autograd.grad(o, qkv, grad, retain_graph=True)


def errors(o, qkv, heads=4):
    """(largest, signed mean) error of O against float64 over a few heads of the first and the last sequence."""
    found = []
    for b in {0, qkv[0].shape[0] - 1}:
        q, k, v = (x.detach()[b, :heads].double() for x in qkv)
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill_(
            torch.ones(q.shape[1], q.shape[1], device="cuda", dtype=torch.bool).triu_(1), -torch.inf)
        found.append(o.detach()[b, :heads].double() - s.softmax(-1) @ v)
    error = torch.stack(found)
    return error.abs().max().item(), error.mean().item()


def bench(args):
    rows, clock = [], Clock()
    for shape in (tuple(map(int, s.split(","))) for s in args.shapes.split(";")):
        calls, kept = [], []
        for name in args.arms.split(","):
            spec, stats, dtype = arm(name)
            try:
                qkv, do = tensors(shape, dtype)
                o, forward, backward = passes(spec, qkv, do, stats)
                forward(), backward()
                largest, mean = errors(o, qkv)
            except RuntimeError as e:  # out of memory, too
                print(f"{shape} {name}: {type(e).__name__} {str(e)[:200]}")
                continue
            calls += [forward, backward]
            kept.append((name, largest, mean))
        times = clock.medians(calls, args.rounds)
        base = sum(times[:2])
        work = 2 * shape[0] * shape[1] * shape[2] ** 2 * shape[3] / 1e9  # GFLOP; causal: half of 4 B H T T D
        print(f"\n{'B,H,T,D':16s} {'backend':22s} {'fwd ms':>8s} {'bwd ms':>8s} {'ratio':>6s} {'TF/s fwd':>8s} "
              f"{'bwd':>5s} {'max err':>9s} {'mean err':>10s}")
        for (name, largest, mean), fwd, bwd in zip(kept, times[::2], times[1::2], strict=True):
            rows.append(dict(zip("BHTD", shape, strict=True)) | dict(
                backend=name, forward_ms=fwd, backward_ms=bwd, ratio_to_sdpa=(fwd + bwd) / base, max_error=largest,
                signed_mean_error=mean))
            print(f"{','.join(map(str, shape)):16s} {name:22s} {fwd:8.3f} {bwd:8.3f} {(fwd + bwd) / base:6.3f} "
                  f"{work / fwd:8.0f} {2.5 * work / bwd:5.0f} {largest:9.2e} {mean:10.2e}", flush=True)
        del calls
        torch.cuda.empty_cache()
        write(args.out, rows=rows)


def tune(args):
    """Each kernel for each format: forward by key tile, then dQ with dK/dV fixed, then the other way round."""
    end, clock = time.monotonic() + args.seconds, Clock()
    shape, rows = tuple(map(int, args.shapes.split(";")[0].split(","))), []
    for name in args.arms.split(","):
        spec, _, dtype = arm(name)
        (q, k, v), do = tensors(shape, dtype)
        q, k, v = (x.detach() for x in (q, k, v))
        key, _ = flash.launch_for(spec, shape[3], q.device)
        rng = torch.tensor(RNG, device="cuda")

        def pair(spec, q=q, k=k, v=v, do=do, rng=rng):
            """(forward, backward) without autograd, whose overhead is not the kernels'."""
            o, lse, _, _ = flash.forward(q, k, v, rng, spec, False)
            grad = do.to(o.dtype)
            return (lambda: flash.forward(q, k, v, rng, spec, False),
                    lambda: flash.backward(grad, q, k, v, o, lse, spec))

        for which, candidates in (FP32_TILES if spec.operands == "fp32" else BF16_TILES).items():
            if which != "forward" and spec.backend == "stabilized":
                continue  # its backward pass is flash_bf16's
            found = []
            for tile in (flash.Tile(*values) for values in candidates):
                if time.monotonic() > end:
                    print(f"stopped after {args.seconds} s before {name} {which} {tile}")
                    return write(args.out, tune=rows)
                entry = flash.LAUNCHES[key]
                own = AttentionSpec(spec.backend, tile_k=tile.keys) if which == "forward" else spec
                flash.LAUNCHES[key] = entry._replace(
                    **{which: entry.forward | {tile.keys: tile} if which == "forward" else tile})
                try:
                    (ms,) = clock.medians([pair(own)[which != "forward"]], args.rounds)
                except Exception as e:  # a configuration that does not fit is a result, too
                    print(f"{name} {which} {tile}: {type(e).__name__} {str(e)[:120]}")
                    continue
                finally:
                    flash.LAUNCHES[key] = entry
                rows.append(dict(arm=name, T=shape[2], D=shape[3], kernel=which, tile=str(tile), ms=ms))
                found.append((ms, tile))
            found.sort()
            print(f"{name:12s} {which:8s}" + "  ".join(f"{tile} {ms:.3f}" for ms, tile in found), flush=True)
            entry = flash.LAUNCHES[key]
            best = {tile.keys: tile for _, tile in reversed(found)} if which == "forward" else found[0][1]
            flash.LAUNCHES[key] = entry._replace(**{which: entry.forward | best if which == "forward" else best})
        launch = flash.LAUNCHES[key]
        table = ", ".join(f"{keys}: Tile{tuple(tile)}" for keys, tile in launch.forward.items())
        print(f"    {key}: Launch({{{table}}}, Tile{tuple(launch.dq)}, Tile{tuple(launch.dkdv)}),  # {name}")
        group = flash.GROUP_BYTES
        for megabytes in (4, 12, 24, 48, 4096):
            flash.GROUP_BYTES = megabytes << 20
            times = clock.medians(list(pair(spec)), args.rounds)
            rows.append(dict(arm=name, T=shape[2], D=shape[3], kernel="both", group_megabytes=megabytes, ms=times))
            print(f"{name:12s} heads side by side: {megabytes:4d} MiB  {times[0]:.3f} {times[1]:.3f} ms", flush=True)
        flash.GROUP_BYTES = group
    write(args.out, tune=rows)


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
            rng, results = torch.tensor(RNG, device="cuda"), []
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


def memory(args):
    """Peak memory of forward and backward beyond inputs and dO, over O, L, delta and the gradients."""
    rows = []
    shape = tuple(map(int, args.shapes.split(";")[0].split(",")))
    for backend in ("flash_bf16", "stabilized", "flash_fp32@32"):
        spec, _, dtype = arm(backend)
        qkv, do = tensors(shape, dtype)
        grad = do.float() if spec.stores_fp32 else do
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o = attend(*qkv, spec)
        grads = torch.autograd.grad(o, qkv, grad)
        extra = torch.cuda.max_memory_allocated() - before
        B, H, T, _ = shape
        needed = o.nbytes + sum(g.nbytes for g in grads) + 2 * 4 * B * H * T
        rows.append(dict(zip("BHTD", shape, strict=True)) | dict(backend=backend, extra=extra, needed=needed))
        print(f"{backend:13s} peak extra {extra / 2**20:8.1f} MiB, O + L + delta + gradients {needed / 2**20:8.1f} MiB")
        del o, grads  # or the next backend's peak is measured from above them
    write(args.out, memory=rows)


def write(path, **content):
    import triton

    git = subprocess.run("git rev-parse HEAD", shell=True, capture_output=True, text=True)
    head = dict(hardware=torch.cuda.get_device_name(), commit=git.stdout.strip() or os.environ.get("COMMIT", "unknown"),
                versions=dict(python=sys.version.split()[0], torch=torch.__version__, triton=triton.__version__,
                              cuda=torch.version.cuda))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(head | content, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=";".join(SHAPES), help="B,H,T,D;B,H,T,D;...")
    parser.add_argument("--arms", default=ARMS, help="BACKEND[@TILE_K][+stats][/float32],...; the first is the base")
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each pass of each backend")
    parser.add_argument("--seconds", type=float, default=120, help="budget of --tune")
    parser.add_argument("--out", help="JSON file")
    for name in ("tune", "check", "memory"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_attention needs a CUDA GPU: it times kernels; on the CPU the tests compare their results")
    mode = next((f for f in (tune, check, memory) if getattr(args, f.__name__)), bench)
    args.out = args.out or f"results/bench_attention{'' if mode is bench else '_' + mode.__name__}.json"
    mode(args)


if __name__ == "__main__":
    main()
