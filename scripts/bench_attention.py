"""Times attention backends beside torch SDPA, and compares the Triton kernels with float64 and with `emulated`.

    python scripts/bench_attention.py                      # the table, and results/bench_attention.json
    python scripts/bench_attention.py --tune --seconds=120 # best launch configurations, ready to paste into flash.py
    python scripts/bench_attention.py --check              # per switch: entries that differ from `emulated`
    python scripts/bench_attention.py --bias               # errors against float64 where row maxima repeat
    python scripts/bench_attention.py --memory             # peak memory beyond what must exist

Times are medians of single calls between CUDA events, backends taking turns within each round, with the L2 cache
overwritten before each call and the GPU held back until the CPU has launched it. q, k, v are views of one
(B, T, 3, H, D) tensor and dO is a transposed (B, T, H, D) tensor, as in training. Kernels are built first, by
--workers processes; --build does only that, for every other mode. Needs a CUDA GPU.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention import AttentionSpec, attend
from scripts.bench_attention_check import bias, check, needs
from scripts.bench_attention_common import Clock, parse_arm, parse_shapes, tensors, write
from scripts.bench_attention_tune import TUNED, jobs, tune
from scripts.bench_attention_workers import build_all, builds, spread
from scripts.targets import check_targets, named

SHAPES = "32,12,1024,64;16,16,1024,64;16,12,2048,64;8,12,4096,64;16,12,1024,128"
ARMS = ("sdpa,flash_fa2,flash_bf16,stabilized,flash_bf16+stats,flash_bf16+stats2,stabilized+stats,flash_fp32,standard,"
        "sdpa/float32,flash_fp32/float32")


def passes(spec, qkv, do, counted=None):
    """O, and (forward, backward) of a backend to be timed."""
    def run(stats=False):
        if spec.backend == "sdpa":  # not through the backend, which rounds float32 tensors to BF16 as autocast would
            return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        return attend(*qkv, spec, stats=stats, counted=None if counted == -1 else counted)

    def forward():
        with torch.no_grad():
            run(counted is not None)

    o = run()
    grad = do.to(o.dtype)
    return o, forward, lambda: torch.autograd.grad(o, qkv, grad, retain_graph=True)


def errors(o, qkv, heads=4):
    """(largest, signed mean) error of O against float64 over a few heads of the first and the last sequence."""
    found = []
    for b in {0, qkv[0].shape[0] - 1}:
        q, k, v = (x.detach()[b, :heads].double() for x in qkv)
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill_(
            torch.ones(q.shape[1], q.shape[1], device=q.device, dtype=torch.bool).triu_(1), -torch.inf)
        found.append(o.detach()[b, :heads].double() - s.softmax(-1) @ v)
    error = torch.stack(found)
    return error.abs().max().item(), error.mean().item()


def rows_of(shape, names, found, times) -> list[dict]:
    """The rows of results/bench_attention.json for one shape.

    names: the arms, the base of the ratio first; found: their `errors`; times: (forward, backward) ms of each.
    """
    base = sum(times[0])
    return [dict(zip("BHTD", shape, strict=True)) | dict(
        backend=name, forward_ms=fwd, backward_ms=bwd, ratio_to_sdpa=(fwd + bwd) / base, max_error=largest,
        signed_mean_error=mean) for name, (largest, mean), (fwd, bwd) in zip(names, found, times, strict=True)]


def table(rows) -> str:
    """Rows of one shape as text, with the rate of the causal half of the products that the pass cannot avoid."""
    lines = [f"{'B,H,T,D':16s} {'backend':22s} {'fwd ms':>8s} {'bwd ms':>8s} {'ratio':>6s} {'TF/s fwd':>8s} "
             f"{'bwd':>5s} {'max err':>9s} {'mean err':>10s}"]
    for row in rows:
        shape = [row[name] for name in "BHTD"]
        work = 2 * row["B"] * row["H"] * row["T"] ** 2 * row["D"] / 1e9  # GFLOP; causal: half of 4 B H T T D
        lines.append(f"{','.join(map(str, shape)):16s} {row['backend']:22s} {row['forward_ms']:8.3f} "
                     f"{row['backward_ms']:8.3f} {row['ratio_to_sdpa']:6.3f} {work / row['forward_ms']:8.0f} "
                     f"{2.5 * work / row['backward_ms']:5.0f} {row['max_error']:9.2e} {row['signed_mean_error']:10.2e}")
    return "\n".join(lines)


def needed(args):
    """What `bench` launches, for `builds`."""
    shapes = parse_shapes(args.shapes)
    fields = [field.name for field in dataclasses.fields(AttentionSpec) if field.name != "output_heads"]
    return [({name: getattr(spec, name) for name in fields}, dtype, *shape[2:], counted is not None)
            for arm in args.arms.split(",") for spec, counted, dtype in [parse_arm(arm)] for shape in shapes]


def build(args):
    """Builds what every mode launches."""
    start = time.monotonic()
    build_all(builds(needed(args) + needs()), args.workers, start + args.seconds)
    todo = jobs(TUNED[:2], parse_shapes(args.shapes))
    answers = spread("scripts.bench_attention_tune:build", todo, args.workers, 60, start + args.seconds)
    print(f"{answers.count(True)} of {len(todo)} candidates, all in {time.monotonic() - start:.0f} s")
    for job, answer in zip(todo, answers, strict=True):
        if answer is not True:
            print("not built:", *job, "no answer" if answer is None else answer["error"])


def bench(args):
    build_all(builds(needed(args)), args.workers, time.monotonic() + args.seconds)
    rows, clock, names = [], Clock(), args.arms.split(",")
    for shape in parse_shapes(args.shapes):
        calls, kept, found = [], [], []
        for name in names:
            spec, counted, dtype = parse_arm(name)
            try:
                qkv, do = tensors(shape, dtype)
                o, forward, backward = passes(spec, qkv, do, counted)
                forward(), backward()
                found.append(errors(o, qkv))
            except RuntimeError as e:  # out of memory, too
                if name == names[0]:
                    raise  # nothing to divide by
                print(f"{shape} {name}: {type(e).__name__} {str(e)[:200]}")
                continue
            calls += [forward, backward]
            kept.append(name)
        times = clock.medians(calls, args.rounds)
        new = rows_of(shape, kept, found, list(zip(times[::2], times[1::2], strict=True)))
        print("\n" + table(new), flush=True)
        rows += new
        del calls
        torch.cuda.empty_cache()
        write(args.out, rows=rows)


def memory(args):
    """Peak memory of forward and backward beyond inputs and dO, over O, L, delta and the gradients."""
    rows = []
    for shape in parse_shapes(args.shapes):
        for backend in ("flash_fa2", "flash_bf16", "stabilized", "flash_fp32"):
            spec, (qkv, do) = AttentionSpec(backend), tensors(shape, torch.bfloat16)
            extra, needed = peak(qkv, do.float() if spec.stores_fp32 else do, spec)
            rows.append(dict(zip("BHTD", shape, strict=True)) | dict(backend=backend, extra=extra, needed=needed))
            print(f"{','.join(map(str, shape)):16s} {backend:13s} peak extra {extra / 2**20:8.2f} MiB, O + L + delta + "
                  f"gradients {needed / 2**20:8.2f} MiB", flush=True)
    write(args.out, memory=rows)


def peak(qkv, do, spec) -> tuple[int, int]:
    """(bytes that forward and backward ask for at their peak, bytes of O, what its rounding left over where that is
    kept, L, delta and the gradients). The first call leaves behind what exists once."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        o = attend(*qkv, spec)
        grads = torch.autograd.grad(o, qkv, do)
        extra = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        needed = o.nbytes + sum(g.nbytes for g in grads) + 2 * 4 * o[..., 0].numel() + 2 * spec.keeps_rest * o.numel()
        del o, grads
    return extra, needed


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="B,H,T,D;B,H,T,D;...")
    parser.add_argument("--arms", help="BACKEND[@TILE_K][+SWITCH=VALUE...][+stats[N]][/DTYPE],...; the first is "
                                       "the base; +stats2: row statistics, ties of the first 2 sequences alone")
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each pass of each backend")
    parser.add_argument("--seconds", type=float, default=120, help="budget of --tune, --check and of builds")
    parser.add_argument("--workers", type=int, default=12, help="processes that build; 0 builds on the way")
    parser.add_argument("--out", type=named, help="JSON file")
    for name in ("tune", "check", "bias", "memory", "build"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args(argv)
    args.arms = args.arms or (",".join(TUNED) if args.tune else ARMS)
    try:
        parse_shapes(args.shapes)
        arms = [parse_arm(name)[0].backend for name in args.arms.split(",")]
    except ValueError as e:
        parser.error(str(e))
    if args.rounds < 1 or args.workers < 0 or not args.seconds > 0:
        parser.error(f"--rounds={args.rounds} must be at least 1, --workers={args.workers} zero or more, and "
                     f"--seconds={args.seconds} positive")
    if args.tune and not set(arms) <= set(TUNED):
        parser.error(f"--tune times the kernels of {', '.join(TUNED)}; --arms={args.arms} names others")
    if args.tune and args.workers < 1:
        parser.error(f"--tune compares candidates in processes of their own; --workers={args.workers} gives it none")
    if not torch.cuda.is_available():
        sys.exit("bench_attention needs a CUDA GPU: it times kernels; on the CPU the tests compare their results")
    mode = next((f for f in (tune, check, bias, memory, build) if getattr(args, f.__name__)), bench)
    args.out = args.out or f"results/bench_attention{'' if mode is bench else '_' + mode.__name__}.json"
    try:
        check_targets(args.out)
    except OSError as e:
        parser.error(str(e))
    mode(args)


if __name__ == "__main__":
    main()
