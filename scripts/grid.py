"""Two failures told apart: learning rate x batch size x what is rounded, and where each combination fails.

    python scripts/grid.py --dataset data/mini [--seeds 1] [--learning_rates 3e-3 4e-3 6e-3] [--batch_sizes 32 64]

Arms differ in whether scores, P V and delta are rounded. A failure that delta = rowsum(dP * P) or P V in FP32 takes
away is the paper's (bias of P V through delta); one that only FP32 scores take away is another. How runs are made and
counted: rates.py. Writes grid.json and grid.png into --out.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.rates import Arm, exit_status, parser, run_and_write

ROUNDED = {  # what stays rounded to BF16 beside operands and probabilities, by the flags that take the rest away
    "scores_pv_delta": (),
    "scores_pv": ("--delta=dp_p",),
    "scores_output": ("--pv=fp32",),
    "pv_delta": ("--scores=fp32",),
    "output": ("--attention=flash_fa2",),
    "nothing": ("--attention=flash_fp32",),
}


def figure(rows: list[dict], points: dict[str, tuple[str, float, int]], path: Path) -> None:
    """One panel an arm: learning rate by sequences a step, a cross where a run failed (with its step), a ring where it
    was stable, a dot where it is unfinished."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [name for name in ROUNDED if any(points[r["arm"]][0] == name for r in rows)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.2), sharex=True, sharey=True,
                                   squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], panels, strict=True):
        axis.set(title=f"rounded: {name}", xscale="log", yscale="log", xlabel="learning rate")
        for r in rows:
            arm, rate, batch = points[r["arm"]]
            if arm == name:
                axis.plot(rate, batch, {True: "kx", False: "ko", None: "k."}[r["failed"]], markerfacecolor="none",
                          markersize=9)
                if r["step_of_failure"]:
                    axis.annotate(str(r["step_of_failure"]), (rate, batch), xytext=(5, 5), textcoords="offset points",
                                  fontsize=7)
    axes[0][0].set_ylabel("sequences a step")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__, "runs/grid", ROUNDED)
    options.set_defaults(seeds=[1])
    options.add_argument("--learning_rates", type=float, nargs="+", default=[3e-3, 4e-3, 6e-3])
    options.add_argument("--batch_sizes", type=int, nargs="+", default=[32, 64], help="sequences a step")
    args, extra = options.parse_known_args(argv)
    points = {f"{name}_{rate:g}_{batch}": (name, rate, batch) for name, rate, batch in
              itertools.product(args.arms, args.learning_rates, args.batch_sizes)}
    arms = {arm: Arm((*ROUNDED[name], f"--learning_rate={rate:g}", f"--batch_size={batch}"))
            for arm, (name, rate, batch) in points.items()}
    args.arms = list(arms)
    found = run_and_write(arms, args, extra, args.out / "grid.json")
    if found:
        figure(found["rows"], points, args.out / "grid.png")
    return exit_status(found)


if __name__ == "__main__":
    sys.exit(main())
