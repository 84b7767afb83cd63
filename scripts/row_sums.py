"""Do the rows of dS add up to zero in your attention kernel? python scripts/row_sums.py [--arms sdpa/flash ...]

They do exactly, so what all keys have in common has no part in dQ. A kernel that takes delta = rowsum(dO * O) of the O
that it stores leaves the rounding of O over in every row, times that common part, which softmax does not see and the
loss does not hold back (results/mini/why.md). An arm is sdpa/KERNEL, torch's own by name (math, flash, efficient,
cudnn), or one of ours, BACKEND[+SWITCH=VALUE...]. For another kernel, of q, k, v (B, H, T, D):

    from diagnostics.row_sums import row_sums
    left_over, o = row_sums(attention, q, k, v, do)
    from scripts.row_sums import inputs, measure
    measure(attention, *inputs([2, 4, 512, 64], scale=4))    # the numbers that follow

q, k, v and do are normal, q and k times each --scale: the larger, the more a row is one key's. By arm and scale: what
a row of dS adds up to, over the sum of its exact sizes, root mean squares over rows; the share of rows in which it is
the larger of the two; its mean, over the same, with a standard error (sign); and its cosine with rowsum(dO * (O -
O_stored)), 1 where it is the rounding of O.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import AttentionSpec, attend, changed
from config import ConfigError
from diagnostics.row_sums import exact_rows, row_sums
from scripts.bench_attention_common import write
from scripts.runs import columns
from scripts.targets import check_targets, named

TORCHS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
          "cudnn": SDPBackend.CUDNN_ATTENTION}
ARMS = [*(f"sdpa/{name}" for name in TORCHS), "standard", "flash_fa2", "flash_fa2+delta=dp_p",
        "flash_fa2+delta=do_o_corrected", "flash_fa2+output=fp32", "flash_bf16", "flash_bf16+delta=dp_p"]


def attention_of(arm: str):
    """attention(q, k, v) of one arm. Errors: ConfigError for one that is none, or whose rows need not add up to 0."""
    name, slash, kernel = arm.partition("/")
    if slash:
        if name != "sdpa" or kernel not in TORCHS:
            raise ConfigError(f"--arms {arm}: torch's kernels are {', '.join(f'sdpa/{name}' for name in TORCHS)}")

        def attention(q, k, v):
            with sdpa_kernel(TORCHS[kernel]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return attention
    try:
        spec = changed(AttentionSpec(), arm)
    except ValueError as error:
        raise ConfigError(f"--arms {arm}: {error}") from None
    if spec.smooth_k or spec.softcap:
        raise ConfigError(f"--arms {arm}: keys and scores are changed outside of what is asked here; leave out "
                          f"{'smooth_k' if spec.smooth_k else 'softcap'}")
    return lambda q, k, v: attend(q, k, v, spec)


def measure(attention, q, k, v, do, exact=None) -> dict:
    """The script's numbers, and how many rows they are of: all but the first, whose dS is exactly 0. exact:
    `exact_rows` of the same, where they are known.

    Errors: ConfigError where there is nothing to measure by: the exact dS is 0, or of fewer than two rows.
    """
    size, exact = exact or exact_rows(q, k, v, do)
    unit = size[..., 1:].square().mean().sqrt()
    if size[..., 1:].numel() < 2:
        raise ConfigError("a standard error needs two rows besides the first of each head; take more tokens or heads")
    if not 0 < unit < math.inf:
        raise ConfigError(f"the exact sizes of rows of dS have a root mean square of {unit.item():g}, by which nothing "
                          "can be measured; take smaller scores")
    left, o = row_sums(attention, q, k, v, do)
    rounding = (do.double() * (exact - o.double())).sum(-1)
    left, size, rounding = (x[..., 1:].double().flatten() for x in (left, size, rounding))
    return {"left_over": (left.square().mean().sqrt() / unit).item(),
            "larger": (left.abs() > size).double().mean().item(), "mean": (left.mean() / unit).item(),
            "mean_se": (left.std() / unit).item() / math.sqrt(len(left)),
            "cosine": F.cosine_similarity(left, rounding, dim=0, eps=1e-200).item(), "rows": len(left)}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 with one sentence. An arm that this machine cannot run is named, and the others are run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=ARMS, metavar="ARM", help=f"default: {' '.join(ARMS)}")
    parser.add_argument("--scale", nargs="+", type=float, default=[1.0, 4.0], help="of q and of k; default: 1 4")
    parser.add_argument("--shape", nargs=4, type=int, default=[2, 4, 512, 64], metavar=tuple("BHTD"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=named, metavar="FILE", help="write the table as JSON")
    args = parser.parse_args(argv)
    rows, shape = [], f"--shape {' '.join(map(str, args.shape))}"
    try:
        check_targets(args.out)
        if min(args.shape) < 1 or args.shape[2] < 2 or args.shape[3] < 2:
            raise ConfigError(f"{shape}: B and H must be at least 1, T and D at least 2")
        if not all(math.isfinite(scale) and scale > 0 for scale in args.scale):
            raise ConfigError(f"--scale {' '.join(map(str, args.scale))}: each must be a number above 0")
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device=cuda: torch finds no GPU; use --device=cpu")
        attentions = {arm: attention_of(arm) for arm in args.arms}
        for scale in args.scale:
            tensors = [x.to(args.device) for x in inputs(args.shape, scale)]
            try:
                exact = exact_rows(*tensors)
            except RuntimeError as error:
                raise ConfigError(f"{shape}: the exact rows, which are of all tokens at once, cannot be computed here: "
                                  f"{str(error).splitlines()[0]}") from None
            for arm, attention in list(attentions.items()):
                try:
                    rows.append({"arm": arm, "scale": scale} | measure(attention, *tensors, exact))
                except ConfigError as error:
                    raise ConfigError(f"{shape} --scale {scale:g}: {error}") from None
                except (RuntimeError, ValueError) as error:
                    print(f"row_sums: {arm} does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
                    del attentions[arm]
        if not rows:
            raise ConfigError(f"none of --arms {' '.join(args.arms)} runs here; name others")
        if args.out:
            write(args.out, shape=args.shape, rows=rows)
        print("\n".join(columns([("arm", "scale", "left over", "larger in", "mean", "standard error", "cosine"), *(
            (row["arm"], f"{row['scale']:g}", f"{row['left_over']:.2e}", f"{row['larger']:.4f}", f"{row['mean']:+.1e}",
             f"{row['mean_se']:.1e}", f"{row['cosine']:.3f}") for row in rows)])))
    except (ConfigError, OSError) as error:
        print(f"row_sums: {error}", file=sys.stderr)
        return 2
    return 0


def inputs(shape: list[int], scale: float) -> list[torch.Tensor]:
    """q, k, v, do: normal numbers, q and k times `scale`, in BF16; the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
    return [x.bfloat16() for x in (scale * q, scale * k, v, do)]


if __name__ == "__main__":
    sys.exit(main())
