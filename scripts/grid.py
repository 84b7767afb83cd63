"""Two failures told apart: corpus x learning rate x batch size x what is rounded, and where each combination fails.

    python scripts/grid.py --datasets data/mini [FOLDER ...] [--seeds 1] [--learning_rates 3e-3 4e-3 6e-3]
                           [--batch_sizes 32 64]

Arms differ in whether scores, P V and delta are rounded. A failure that delta = rowsum(dP * P) or P V in FP32 takes
away is the paper's (bias of P V through delta); one that only FP32 scores take away is another. How runs are made and
counted: rates.py. Writes grid.json and grid.png into --out.
"""

import functools
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from diagnostics.lines import save, subplots
from scripts.outcomes import Arm
from scripts.rates import make, parse, parser

ROUNDED = {  # what stays rounded to BF16 beside operands and probabilities, by the flags that take the rest away
    "scores_pv_delta": (),
    "scores_pv": ("--delta=dp_p",),
    "scores_output": ("--pv=fp32",),
    "pv_delta": ("--scores=fp32",),
    "output": ("--attention=flash_fa2",),
    "nothing": ("--attention=flash_fp32",),
}


def figure(points: dict[str, tuple[str, str, float, int]], found: dict, path: Path) -> None:
    """One row of panels a corpus, one column what is rounded: learning rate by sequences a step, a cross where all
    seeds failed, a half-filled ring where some did, a ring where none did, a dot where none is finished; with how many
    did where there are several, and their median step."""
    columns, corpora, rates, batches = (list(dict.fromkeys(values)) for values in zip(*points.values(), strict=True))
    figure, axes = subplots(len(corpora), len(columns), figsize=(3.2 * len(columns), 3.2 * len(corpora)),
                            sharex=True, sharey=True, squeeze=False)
    for line in found["summary"]:
        name, corpus, rate, batch = points[line["arm"]]
        axis, failed, runs = axes[corpora.index(corpus)][columns.index(name)], line["failed"], line["finished"]
        look = {"marker": "."} if not runs else {"marker": "x"} if failed == runs else {
            "marker": "o", "fillstyle": "left" if failed else "none", "markerfacecoloralt": "none"}
        axis.plot(rate, batch, color="black", markersize=9, **look)
        text = f"{failed} of {runs}\n" if runs > 1 else ""
        text += f"{line['median_step_of_failure']:.0f}" if failed else ""
        axis.annotate(text, (rate, batch), xytext=(6, 5), textcoords="offset points", fontsize=7)
    for i, corpus in enumerate(corpora):
        for j, name in enumerate(columns):
            axes[i][j].set_title(f"{corpus}, rounded: {name}", fontsize=8)
            axes[i][j].set(xscale="log", yscale="log")
            axes[i][j].margins(0.25)
            axes[i][j].minorticks_off()
            axes[i][j].set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes[i][j].set_yticks(batches, batches)
        axes[i][0].set_ylabel("sequences a step")
    for axis in axes[-1]:
        axis.set_xlabel("learning rate")
    save(figure, path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__, "runs/grid", ROUNDED)
    options.set_defaults(seeds=[1])
    options.add_argument("--datasets", nargs="+", metavar="FOLDER", help="corpora, instead of --dataset")
    options.add_argument("--learning_rates", type=float, nargs="+", default=[3e-3, 4e-3, 6e-3])
    options.add_argument("--batch_sizes", type=int, nargs="+", default=[32, 64], help="sequences a step")
    args, extra = parse(options, ROUNDED, "grid.json", argv)
    folders = args.datasets or [args.dataset]
    corpora = {Path(folder).name: folder for folder in folders}
    if len(corpora) < len(folders):
        options.error(f"--datasets {' '.join(folders)}: two corpora share a name, by which arms are called")
    args.datasets = list(corpora)
    points = {f"{name}_{corpus}_{rate:g}_{batch}": (name, corpus, rate, batch) for name, corpus, rate, batch in
              itertools.product(args.arms, corpora, args.learning_rates, args.batch_sizes)}
    arms = {arm: Arm((*ROUNDED[name], f"--dataset={corpora[corpus]}", f"--learning_rate={rate:g}",
                      f"--batch_size={batch}")) for arm, (name, corpus, rate, batch) in points.items()}
    return make(arms, args, extra, args.out / "grid.json", functools.partial(figure, points))


if __name__ == "__main__":
    sys.exit(main())
