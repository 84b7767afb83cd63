"""`bench_attention.py --tune`: the fastest launch of each kernel, ready to paste into attention/flash.py."""

import time

import torch

from attention import AttentionSpec, flash
from scripts.bench_attention_common import RNG, Clock, parse_arm, parse_shapes, tensors, write

TUNED = ("flash_fa2", "flash_bf16", "stabilized", "flash_fp32")

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


def tune(args):
    """Each kernel for each format: forward by key tile, then dQ with dK/dV fixed, then the other way round."""
    end, clock = time.monotonic() + args.seconds, Clock()
    shape, rows = parse_shapes(args.shapes)[0], []
    for name in args.arms.split(","):
        spec, _, dtype = parse_arm(name)
        (q, k, v), do = tensors(shape, dtype)
        q, k, v = (x.detach() for x in (q, k, v))
        key, _ = flash.launch_for(spec, shape[3], q.device)
        rng = torch.tensor(RNG, device=do.device)

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
