"""`bench_attention.py --tune`: the fastest launch of each kernel, ready to paste into attention/flash.py.

First every candidate is built and its results are compared with the preset's, by several processes at once: a build
takes seconds of a CPU core, and one that never ends must not take the others with it. Then one process times those that
were right.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention import AttentionSpec, flash
from scripts.bench_attention_common import RNG, Clock, parse_arm, parse_shapes, tensors, write

TUNED = ("flash_fa2", "flash_bf16", "stabilized", "flash_fp32")
WORKERS = 15

# (head size, operands) -> kernel -> rows, keys, warps, stages, registers, mode of its candidates.
CANDIDATES = {
    (64, "bf16"): dict(
        forward=[(64, 64, 4, 3, 128, 0), (64, 64, 4, 3, 128, 1), (64, 64, 4, 2, 128, 1), (128, 64, 8, 3, 128, 1),
                 (128, 64, 4, 2, 0, 2), (128, 64, 4, 3, 0, 2), (128, 64, 4, 2, 0, 3), (128, 64, 4, 3, 0, 3),
                 (64, 128, 4, 2, 168, 0), (64, 128, 4, 2, 168, 1), (128, 128, 8, 2, 0, 1), (128, 128, 8, 3, 0, 1),
                 (128, 128, 4, 2, 0, 2), (128, 128, 4, 3, 0, 2), (128, 128, 4, 1, 0, 3), (128, 128, 4, 2, 0, 3)],
        dq=[(64, 64, 4, 2, 128, 0), (64, 64, 4, 2, 128, 1), (64, 64, 4, 3, 128, 1), (128, 64, 8, 2, 128, 1),
            (128, 64, 4, 2, 0, 2), (128, 64, 4, 3, 0, 2), (128, 128, 4, 1, 0, 2), (128, 128, 4, 2, 0, 2)],
        dkdv=[(32, 64, 4, 3, 128, 0), (32, 64, 4, 3, 128, 1), (64, 64, 4, 2, 168, 1), (64, 128, 8, 2, 0, 1),
              (32, 128, 4, 3, 0, 2), (64, 128, 4, 2, 0, 2), (64, 128, 4, 3, 0, 2)]),
    (128, "bf16"): dict(
        forward=[(64, 64, 4, 3, 0, 0), (64, 64, 4, 3, 0, 1), (64, 64, 4, 2, 168, 1), (128, 64, 8, 3, 0, 1),
                 (128, 64, 4, 2, 0, 2), (128, 64, 4, 2, 0, 3), (128, 64, 4, 3, 0, 2), (128, 64, 4, 1, 0, 3),
                 (128, 128, 8, 2, 0, 0), (128, 128, 8, 2, 0, 1), (64, 128, 4, 1, 0, 1),
                 (128, 128, 4, 2, 0, 2), (128, 128, 4, 1, 0, 3)],
        dq=[(64, 64, 4, 2, 0, 0), (64, 64, 4, 2, 0, 1), (64, 64, 4, 2, 168, 1), (128, 64, 8, 2, 0, 1),
            (128, 64, 4, 2, 0, 2), (128, 64, 4, 3, 0, 2), (128, 32, 4, 3, 0, 2)],
        dkdv=[(64, 64, 4, 2, 0, 0), (64, 64, 4, 2, 0, 1), (32, 64, 4, 2, 0, 1), (64, 128, 8, 2, 0, 1),
              (64, 128, 4, 2, 0, 2), (32, 128, 4, 2, 0, 2), (32, 128, 4, 3, 0, 2)]),
    (64, "fp32"): dict(
        forward=[(64, 32, 4, 2, 0, 0), (64, 64, 4, 2, 0, 0), (64, 64, 4, 1, 0, 0), (128, 32, 8, 2, 0, 0)],
        dq=[(64, 32, 4, 2, 0, 0), (64, 64, 4, 2, 0, 0), (64, 32, 4, 2, 128, 0)],
        dkdv=[(32, 128, 8, 2, 0, 0), (32, 64, 4, 2, 0, 0), (16, 64, 4, 2, 168, 0)]),
    (128, "fp32"): dict(
        forward=[(64, 32, 4, 1, 0, 0), (64, 64, 8, 1, 0, 0), (64, 32, 8, 2, 0, 0), (128, 32, 8, 2, 0, 0)],
        dq=[(64, 16, 4, 2, 0, 0), (64, 32, 8, 2, 0, 0)],
        dkdv=[(16, 64, 4, 2, 0, 0), (16, 128, 8, 2, 0, 0)]),
}


def jobs(arms, shapes) -> list[tuple]:
    """(arm, head size, kernel, tile) to try. The key tile of an arm that rounds P V is not free, and stabilized's
    backward pass is flash_bf16's."""
    found = []
    for D in sorted({shape[3] for shape in shapes}):
        for arm in arms:
            spec = parse_arm(arm)[0]
            for kernel, tiles in CANDIDATES[64 if D <= 64 else 128, spec.operands].items():
                for tile in tiles:
                    fits = kernel != "forward" or spec.pv == "fp32" or tile[1] == spec.tile_k
                    if fits and (kernel == "forward" or spec.backend != "stabilized"):
                        found.append((arm, D, kernel, tile))
    return found


class Chosen:
    """While it lasts, a kernel is launched as `tile` says."""

    def __init__(self, spec, D, kernel, tile):
        self.key, self.before = flash.launch_for(spec, D, torch.device("cuda"))[0], None
        entry, tile = flash.LAUNCHES[self.key], flash.Tile(*tile)
        self.entry = entry._replace(
            **{kernel: entry.forward | {tile.keys: tile} if kernel == "forward" else tile})

    def __enter__(self):
        self.before, flash.LAUNCHES[self.key] = flash.LAUNCHES[self.key], self.entry

    def __exit__(self, *_):
        flash.LAUNCHES[self.key] = self.before


def passes(spec, qkv, do, rng):
    """(forward, backward) without autograd, whose overhead is not the kernels'."""
    q, k, v = (x.detach() for x in qkv)
    o, lse, _, _ = flash.forward(q, k, v, rng, spec, False)
    grad = do.to(o.dtype)
    return lambda: flash.forward(q, k, v, rng, spec, False), lambda: flash.backward(grad, q, k, v, o, lse, spec)


def forward_spec(spec, tile):
    return AttentionSpec(spec.backend, tile_k=tile[1])


def compare(arm, D, kernel, tile) -> dict:
    """Results of a candidate against the preset's of the same key tile: the share of entries that differ, and the
    largest difference over the largest value."""
    spec, _, dtype = parse_arm(arm)
    own = forward_spec(spec, tile) if kernel == "forward" else spec
    qkv, do = tensors((2, 3, 1024, D), dtype)
    rng, which = torch.tensor(RNG, device="cuda"), kernel != "forward"
    base = passes(own, qkv, do, rng)[which]()
    with Chosen(own, D, kernel, tile):
        call = passes(own, qkv, do, rng)[which]
        found, again = call(), call()
    if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
        return dict(error="two calls differ")
    pairs = [(a.double(), b.double()) for a, b in zip(found, base, strict=True) if b.numel()]
    return dict(differ=[(a != b).double().mean().item() for a, b in pairs],
                largest=[((a - b).abs().max() / b.abs().max()).item() for a, b in pairs])


def work(path):
    """A worker: `compare` for each line of the file, its answers beside it."""
    with Path(path).open() as lines, Path(path + ".out").open("w") as out:
        for job in map(json.loads, lines):
            try:
                answer = compare(*job[:3], tuple(job[3]))
            except Exception as e:  # a configuration that does not fit or build is a result, too
                answer = dict(error=f"{type(e).__name__} {str(e)[:200]}")
            print(json.dumps([job, answer]), file=out, flush=True)


def verify(todo, end) -> dict:
    """job -> answer of `compare`, by WORKERS processes until `end`; jobs without an answer are missing."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / str(i)) for i in range(min(WORKERS, len(todo)))]
        for i, path in enumerate(paths):
            Path(path).write_text("".join(json.dumps(job) + "\n" for job in todo[i::len(paths)]))
        workers = [subprocess.Popen([sys.executable, __file__, path], stdout=subprocess.DEVNULL,
                                    stderr=Path(path + ".err").open("w")) for path in paths]
        while any(w.poll() is None for w in workers) and time.monotonic() < end:
            time.sleep(0.2)
        for w in workers:
            w.kill()
        for path in paths:
            out = Path(path + ".out")
            for line in out.read_text().splitlines() if out.exists() else []:
                (arm, D, kernel, tile), answer = json.loads(line)
                found[arm, D, kernel, tuple(tile)] = answer
            if not out.exists():
                print(Path(path + ".err").read_text()[-500:])
    return found


def right(job, answer) -> bool:
    """Whether sums in another order explain all that differs: one BF16 step of the largest value, in few entries."""
    if answer is None or "error" in answer:
        return False
    fp32 = parse_arm(job[0])[0].operands == "fp32"
    return max(answer["largest"]) < (1e-5 if fp32 else 2**-6) and (fp32 or answer["differ"][0] < 0.05)


def tune(args):
    start = time.monotonic()
    shapes, arms = parse_shapes(args.shapes), args.arms.split(",")
    todo = jobs(arms, shapes)
    answers = verify(todo, start + 0.55 * args.seconds)
    print(f"{len(answers)} of {len(todo)} candidates built and compared in {time.monotonic() - start:.0f} s")
    for job in todo:
        answer = answers.get(job)
        if not right(job, answer):
            print("  not right:", *job[:3], flash.Tile(*job[3]), "no answer" if answer is None else
                  answer.get("error") or answer)
    rows, clock = [], Clock()
    for shape in shapes:
        times = clock.medians(sdpa(shape), args.rounds)
        rows.append(dict(zip("BHTD", shape, strict=True)) | dict(arm="sdpa", ms=times))
        print(f"{','.join(map(str, shape)):14s} sdpa       {times[0]:.3f} {times[1]:.3f}")
        for arm in arms:
            spec, _, dtype = parse_arm(arm)
            qkv, do = tensors(shape, dtype)
            rng = torch.tensor(RNG, device="cuda")
            for kernel in ("forward", "dq", "dkdv"):
                calls, kept = [], []
                for job in todo:
                    if job[:3] == (arm, shape[3], kernel) and right(job, answers.get(job)):
                        own = forward_spec(spec, job[3]) if kernel == "forward" else spec
                        call = passes(own, qkv, do, rng)[kernel != "forward"]
                        calls.append(lambda call=call, own=own, job=job: chosen(own, job, call))
                        kept.append(job[3])
                if not kept:
                    continue
                if time.monotonic() - start > args.seconds:
                    print(f"stopped after {args.seconds} s before {shape} {arm} {kernel}")
                    return write(args.out, tune=rows)
                times = clock.medians(calls, args.rounds)
                found = sorted(zip(times, kept, strict=True))
                for ms, tile in found:
                    rows.append(dict(zip("BHTD", shape, strict=True)) | dict(
                        arm=arm, kernel=kernel, tile=str(flash.Tile(*tile)), ms=ms,
                        differ=answers[arm, shape[3], kernel, tile]["differ"]))
                print(f"{','.join(map(str, shape)):14s} {arm:10s} {kernel:8s}" + "  ".join(
                    f"{flash.Tile(*tile)} {ms:.3f}" for ms, tile in found), flush=True)
            del qkv, do, calls
        write(args.out, tune=rows)


def sdpa(shape):
    qkv, do = tensors(shape, torch.bfloat16)
    run = torch.nn.functional.scaled_dot_product_attention
    o = run(*qkv, is_causal=True)
    plain = [x.detach() for x in qkv]
    return [lambda: run(*plain, is_causal=True), lambda: torch.autograd.grad(o, qkv, do, retain_graph=True)]


def chosen(spec, job, call):
    with Chosen(spec, job[1], job[2], job[3]):
        return call()


if __name__ == "__main__":
    work(sys.argv[1])
