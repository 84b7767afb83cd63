"""`bench_attention.py --tune`: the fastest launch of each kernel, ready to paste into attention/flash.py.

First every candidate is built and its results are compared with the preset's, by several processes at once: one that
never ends must not take the others with it. Then one process times those that were right.
"""

import time
from functools import partial

import torch

from attention import AttentionSpec, flash
from scripts.bench_attention_common import RNG, Clock, parse_arm, parse_shapes, tensors, write
from scripts.bench_attention_workers import building, spread

TUNED = ("flash_fa2", "flash_bf16", "stabilized", "flash_fp32")
LIMIT = 12  # seconds of a candidate that is built and compared

# (head size, operands) -> kernel -> rows, keys, warps, stages, registers of its candidates, and whether the copy engine
# loads them.
CANDIDATES = {
    (64, "bf16"): dict(
        forward=[(64, 64, 4, 3, 128, 0), (64, 64, 4, 2, 128, 1), (128, 64, 8, 3, 128, 1), (64, 128, 4, 2, 168, 1),
                 (64, 128, 4, 1, 128, 1), (64, 128, 4, 1, 168, 1), (64, 128, 4, 2, 128, 1), (128, 128, 8, 1, 128, 1)],
        dq=[(64, 64, 4, 2, 128, 1), (64, 64, 4, 3, 128, 1), (128, 64, 8, 2, 128, 1), (128, 64, 4, 2, 0, 1)],
        dkdv=[(32, 64, 4, 3, 128, 0), (32, 64, 4, 3, 128, 1), (32, 64, 4, 2, 128, 1), (32, 128, 8, 2, 128, 1),
              (64, 64, 4, 2, 168, 1), (32, 128, 4, 2, 0, 1), (64, 128, 8, 2, 0, 1)]),
    (128, "bf16"): dict(
        forward=[(64, 64, 4, 3, 0, 1), (64, 64, 4, 1, 168, 1), (64, 64, 4, 2, 168, 1), (64, 128, 4, 1, 0, 1),
                 (64, 128, 4, 1, 168, 1), (128, 128, 8, 2, 0, 1)],
        dq=[(64, 64, 4, 2, 0, 1), (64, 64, 4, 1, 168, 1), (64, 32, 4, 2, 168, 1), (64, 128, 4, 1, 0, 1)],
        dkdv=[(64, 64, 4, 2, 0, 1), (64, 64, 4, 1, 0, 1), (64, 128, 8, 1, 0, 1)]),
    (64, "fp32"): dict(
        forward=[(64, 32, 4, 2, 0, 0), (64, 32, 4, 1, 0, 0), (64, 64, 4, 1, 0, 0)],
        dq=[(64, 32, 4, 2, 0, 0), (64, 32, 4, 1, 0, 0), (64, 64, 4, 1, 0, 0)],
        dkdv=[(32, 128, 8, 2, 0, 0), (32, 128, 8, 1, 0, 0), (32, 64, 4, 2, 0, 0)]),
    (128, "fp32"): dict(
        forward=[(64, 32, 4, 1, 0, 0), (128, 32, 8, 1, 0, 0), (64, 64, 4, 1, 0, 0)],
        dq=[(64, 16, 4, 2, 0, 0), (64, 32, 8, 1, 0, 0), (64, 32, 4, 1, 0, 0)],
        dkdv=[(16, 64, 4, 2, 0, 0), (32, 64, 8, 1, 0, 0), (32, 64, 4, 1, 0, 0)]),
    (64, "tf32x3"): dict(
        forward=[(128, 32, 8, 2, 128, 0), (128, 64, 8, 2, 0, 0), (128, 64, 8, 1, 0, 0), (64, 32, 4, 1, 128, 0)],
        dq=[(64, 64, 4, 1, 0, 0), (128, 64, 8, 1, 0, 0), (128, 32, 8, 1, 0, 0)],
        dkdv=[(32, 128, 8, 1, 0, 0), (16, 128, 8, 1, 0, 0), (32, 64, 4, 1, 0, 0)]),
    (128, "tf32x3"): dict(
        forward=[(128, 32, 8, 1, 0, 0), (128, 32, 8, 2, 0, 0), (128, 64, 8, 1, 0, 0)],
        dq=[(64, 32, 4, 1, 0, 0), (64, 16, 4, 1, 0, 0), (64, 32, 8, 1, 0, 0), (64, 64, 8, 1, 0, 0)],
        dkdv=[(32, 64, 4, 1, 0, 0), (16, 64, 4, 1, 0, 0), (32, 64, 8, 1, 0, 0), (32, 64, 4, 2, 0, 0)]),
}


def jobs(arms, shapes) -> list[tuple]:
    """(arm, head size, kernel, tile) to try. The key tile of an arm that rounds P V is not free, and stabilized's
    backward pass is flash_bf16's."""
    found = []
    for D in sorted({shape[3] for shape in shapes}):
        for arm in arms:
            spec, _, dtype = parse_arm(arm)
            for kernel, tiles in CANDIDATES[64 if D <= 64 else 128, flash.operands_of(spec, dtype)].items():
                for tile in tiles:
                    fits = kernel != "forward" or spec.pv == "fp32" or tile[1] == spec.tile_k
                    if fits and (kernel == "forward" or spec.backend != "stabilized"):
                        found.append((arm, D, kernel, tile))
    return found


def tile_of(tile):
    return flash.Tile(*tile[:5], bool(tile[5]))


class Chosen:
    """While it lasts, a kernel is launched as `tile` says."""

    def __init__(self, spec, D, kernel, tile, dtype):
        self.key, self.before = flash.launch_for(spec, D, torch.device("cuda"), dtype)[0], None
        entry = flash.LAUNCHES[self.key]
        self.entry = entry._replace(
            **{kernel: entry.forward | {tile.keys: tile} if kernel == "forward" else tile})

    def __enter__(self):
        self.before, flash.LAUNCHES[self.key] = flash.LAUNCHES[self.key], self.entry

    def __exit__(self, *_):
        flash.LAUNCHES[self.key] = self.before


class Passes:
    """The forward and the backward pass on some inputs without autograd, whose overhead is not the kernels'."""

    def __init__(self, arm, shape):
        self.spec, _, dtype = parse_arm(arm)
        qkv, do = tensors(shape, dtype)
        self.q, self.k, self.v = (x.detach() for x in qkv)
        self.rng = torch.tensor(RNG, device=do.device)
        self.o, self.lse = flash.forward(self.q, self.k, self.v, self.rng, self.spec, False, 0)[:2]
        self.do = do.to(self.o.dtype)

    def preset(self, kernel, keys):
        """Results of the pass that `kernel` belongs to, a forward pass in steps of `keys`."""
        if kernel == "forward":
            return flash.forward(self.q, self.k, self.v, self.rng, self.at(keys), False, 0)[:2]
        return flash.backward(self.do, self.q, self.k, self.v, self.o, self.lse, self.spec)

    def with_tile(self, kernel, tile):
        """The same with a candidate in the place of the preset's kernel."""
        spec, tile = self.at(tile[1]) if kernel == "forward" else self.spec, tile_of(tile)
        with Chosen(spec, self.q.shape[3], kernel, tile, self.q.dtype):
            return self.preset(kernel, tile.keys)

    def at(self, keys):
        return AttentionSpec(self.spec.backend, tile_k=keys)


def build(arm, D, kernel, tile) -> bool:
    """Builds a candidate without a launch."""
    with building(flash.kernels):
        Passes(arm, (2, 3, 1024, D)).with_tile(kernel, tile)
    return True


def compare(arm, D, kernel, tile) -> dict:
    """Results of a candidate against the preset's of the same key tile: the share of entries that differ, and the
    largest difference over the largest value."""
    passes = Passes(arm, (2, 3, 1024, D))
    base, found, again = passes.preset(kernel, tile[1]), *(passes.with_tile(kernel, tile) for _ in range(2))
    if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
        return dict(error="two calls differ")
    pairs = [(a.double(), b.double()) for a, b in zip(found, base, strict=True)]
    return dict(differ=[(a != b).double().mean().item() for a, b in pairs],
                largest=[((a - b).abs().max() / b.abs().max()).item() for a, b in pairs])


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
    answers = dict(zip(todo, spread("scripts.bench_attention_tune:compare", todo, args.workers, LIMIT,
                                    start + 0.7 * args.seconds), strict=True))
    print(f"{sum(x is not None for x in answers.values())} of {len(todo)} candidates built and compared in "
          f"{time.monotonic() - start:.0f} s")
    for job, answer in answers.items():
        if not right(job, answer):
            print("  not right:", *job[:3], tile_of(job[3]), f"no answer, of {LIMIT} s" if answer is None else
                  answer.get("error") or answer)
    rows, clock = [], Clock()
    for shape in shapes:
        times = clock.medians(sdpa(shape), args.rounds)
        rows.append(dict(zip("BHTD", shape, strict=True)) | dict(arm="sdpa", ms=times))
        print(f"{','.join(map(str, shape)):14s} sdpa       {times[0]:.3f} {times[1]:.3f}")
        for arm in arms:
            passes = Passes(arm, shape)
            for kernel in ("forward", "dq", "dkdv"):
                kept = [job[3] for job in todo if job[:3] == (arm, shape[3], kernel) and right(job, answers[job])]
                if time.monotonic() - start > args.seconds:
                    print(f"stopped after {args.seconds} s before {shape} {arm} {kernel}")
                    return write(args.out, tune=rows)
                times = clock.medians([partial(passes.preset, kernel, passes.spec.tile_k),
                                       *(partial(passes.with_tile, kernel, tile) for tile in kept)], args.rounds)
                names = ["preset", *(str(tile_of(tile)) for tile in kept)]
                found = sorted(zip(times, names, strict=True))
                rows += [dict(zip("BHTD", shape, strict=True)) | dict(arm=arm, kernel=kernel, tile=name, ms=ms)
                         for ms, name in found]
                print(f"{','.join(map(str, shape)):14s} {arm:10s} {kernel:8s}" + "  ".join(
                    f"{name} {ms:.3f}" for ms, name in found), flush=True)
            write(args.out, tune=rows)


def sdpa(shape):
    qkv, do = tensors(shape, torch.bfloat16)
    run = torch.nn.functional.scaled_dot_product_attention
    o = run(*qkv, is_causal=True)
    plain = [x.detach() for x in qkv]
    return [lambda: run(*plain, is_causal=True), lambda: torch.autograd.grad(o, qkv, do, retain_graph=True)]
