"""Compares runs that saw the same batches: python scripts/compare.py RUN... -o FILE.png --json FILE

RUN is a run's out_dir, or a metrics file (.jsonl, .jsonl.gz, .jsonl.xz) with its run.json beside it. The first one is
the reference: every difference is RUN minus reference, at equal steps, so on the same sequences. Runs whose orders
differ are refused with exit status 2; one that is shorter is compared on the steps they share. Beside the step at which
a run failed (failure.FailureRule) stands where W_Q ran away (monitor.runaway) and where scores did
(monitor.scores_ran_away), which may be thousands of steps before.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from anywhere

from diagnostics.lines import label_ends, save, subplots, whole_ticks
from failure import failure_of
from files import write_text
from metrics import MetricsError, to_json
from replay.order import OrderError
from scripts.monitor import probed, runaway, scores_ran_away
from scripts.runs import CompareError, Run, columns, common_steps, difference, load_runs, nan_last, told
from scripts.targets import check_targets, named

TIES, TIES_HEAD, WQ_NORM, ROW_MAX, KEY_MEAN = (f"probe/{name}/layer" for name in ("ties", "ties_head", "wq_norm",
                                                                                   "row_max", "key_mean_head"))
STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 3)), (0, (3, 1, 1, 3)))
UNCHECKED = "DIFFERENT ORDERS: differences are not of the same batches"


def compare(runs: Sequence[Run], allow_different_orders: bool = False) -> dict:
    """The comparison as plain values: {"reference", "same_order", "label", "runs": [...]}, losses in nats per token.

    "weights" is the seed of those that it began with, None where they were another run's or are not known;
    "ran_away" and "scores_ran_away" are None for a run that was not probed. Raises CompareError where orders differ,
    unless that is allowed; the result then says so in "label".
    """
    label, rows = "", []
    for run in runs:
        try:
            shared = common_steps(runs[0], run) if run is not runs[0] else run.steps
        except CompareError as error:
            if not allow_different_orders:
                raise
            label, shared = UNCHECKED, min(runs[0].steps, run.steps)
            print(f"{UNCHECKED}: {error}", file=sys.stderr)
        losses, validation = run.series("loss")[1], run.series("val_loss")[1]
        at, signed = difference(runs[0], run, shared)
        absolute = [abs(value) for value in signed]
        alarm, scores = runaway(run.records), scores_ran_away(run.records)
        norms = [norm for norm in run.series("grad_norm")[1] if math.isfinite(norm)]
        row = {"name": run.name, "attention": run.info.get("attention"), "resumed_with": run.resumed_with(),
               "weights": run.weights(),
               "steps": run.steps,
               "final_loss": losses[-1], "final_val_loss": validation[-1] if validation else None,
               "step_of_failure": failure_of(run.records),
               "ran_away": alarm is not None if probed(run.records) else None,
               "step_of_runaway": alarm and alarm.step, "layer_of_runaway": alarm and alarm.layer,
               "scores_ran_away": scores is not None if probed(run.records) else None,
               "step_of_scores": scores and scores.step, "layer_of_scores": scores and scores.layer,
               "max_grad_norm": max(norms, default=None), "common_steps": shared,
               "difference": {"steps": at, "signed": signed, "absolute": absolute,
                              "mean_signed": _mean(signed), "mean_absolute": _mean(absolute),
                              "max_absolute": max(absolute, default=None, key=nan_last)}}
        for key, prefix in (("ties", TIES), ("wq_norm", WQ_NORM)):
            row[key] = {layer: _last_and_largest(*series) for layer, series in run.layers(prefix).items()}
        rows.append(row)
    return {"reference": runs[0].name, "same_order": not label, "label": label, "runs": rows}


def table(result: dict) -> str:
    """`compare`'s result as text, one line a run, and one a layer where ties were probed."""
    head = ("run", "steps", "loss", "val loss", "mean diff", "mean |diff|", "max |diff|", "max grad", "failed at",
            "W_Q ran away", "scores ran away")
    lines = [head]
    for row in result["runs"]:
        diff = row["difference"]
        failed = "-" if row["step_of_failure"] is None else str(row["step_of_failure"])
        lines.append((row["name"], str(row["steps"]), _number(row["final_loss"]), _number(row["final_val_loss"]),
                      _number(diff["mean_signed"], "+.2e"), _number(diff["mean_absolute"], ".2e"),
                      _number(diff["max_absolute"], ".2e"), _number(row["max_grad_norm"], ".3g"), failed,
                      _where(row, "ran_away", "runaway"), _where(row, "scores_ran_away", "scores")))
    text = [f"reference: {result['reference']}; loss and differences in nats per token"
            + (f"; {result['label']}" if result["label"] else "")]
    text += columns(lines)
    text += [f"{row['name']} went on with {told(other)}" for row in result["runs"] for other in row["resumed_with"]]
    seeds = [(row["name"], row["weights"]) for row in result["runs"] if row["weights"] is not None]
    if len({seed for _, seed in seeds}) > 1:
        began = ", ".join(f"{name} with those of seed {seed}" for name, seed in seeds)
        text.append(f"began with other weights: {began}")
    text += _sampled_differences(result)
    for key, title, form in (("ties", "share of rows with tied maxima, last (largest)", ".4f"),
                             ("wq_norm", "largest spectral norm of a head's W_Q, last (largest)", ".2f")):
        layers = sorted({layer for row in result["runs"] for layer in row[key]})
        lines = [("run", *(f"layer {layer}" for layer in layers))]
        for row in result["runs"]:
            cells = (row[key].get(layer) for layer in layers)
            lines.append((row["name"], *(f"{c['last']:{form}} ({c['max']:{form}})" if c else "-" for c in cells)))
        text += ["", title, *columns(lines)] if layers else []
    return "\n".join(text)


def _sampled_differences(result: dict, count: int = 8) -> list[str]:
    """The signed difference to the reference at a few steps, spread evenly; every step is in the JSON."""
    others = [row for row in result["runs"][1:] if row["difference"]["steps"]]
    if not others:
        return []
    steps = max((row["difference"]["steps"] for row in others), key=len)  # one that was cut off has fewer
    sample = sorted({steps[i * (len(steps) - 1) // (count - 1)] for i in range(count)})
    lines = [("run", *(f"step {step}" for step in sample))]
    for row in others:
        at = dict(zip(row["difference"]["steps"], row["difference"]["signed"], strict=True))
        lines.append((row["name"], *(_number(at.get(step), "+.2e") for step in sample)))
    return ["", f"loss minus {result['reference']}'s at single steps (absolute: without the sign)", *columns(lines)]


def plot(runs: Sequence[Run], result: dict, path: str | Path) -> None:
    """Draws loss, loss difference, gradient norm and, where probed, ties and W_Q norms of the worst layer; line styles
    tell the runs apart without colour. `result` is what `compare` said of the runs."""
    probed = [(prefix, title) for prefix, title in ((TIES, "rows with tied maxima, worst layer (share)"),
                                                    (WQ_NORM, "largest W_Q spectral norm of a head"))
              if any(run.layers(prefix) for run in runs)]
    figure, grid = subplots(3 + len(probed), 1, figsize=(8, 2.7 * (3 + len(probed))), sharex=True)
    for i, run in enumerate(runs):
        look = {"linestyle": STYLES[i % len(STYLES)], "label": run.name, "linewidth": 1.4,
                "marker": "osv^"[i // len(STYLES) % 4] if i >= len(STYLES) else None, "markevery": 0.1}
        grid[0].plot(*run.series("loss"), color=f"C{i}", **look)
        if i:
            at = result["runs"][i]["difference"]
            grid[1].plot(at["steps"], at["signed"], color=f"C{i}", **look)
        grid[2].plot(*run.series("grad_norm"), color=f"C{i}", **look)
        for axis, (prefix, _) in zip(grid[3:], probed, strict=True):
            worst = max(run.layers(prefix).values(), key=lambda series: max(map(nan_last, series[1])), default=([], []))
            axis.plot(*worst, color=f"C{i}", **look)
    names = ("training loss (nats/token)", f"loss minus {runs[0].name}\n(nats/token)", "gradient norm (L2)")
    for axis, name in zip(grid, [*names, *(title for _, title in probed)], strict=True):
        axis.set_ylabel(name, fontsize=8)
        axis.grid(alpha=0.3)
    grid[1].axhline(0, color="black", linewidth=0.6)
    grid[2].set_yscale("log")
    grid[0].legend(fontsize=8)
    grid[-1].set_xlabel("optimizer step")
    if result["label"]:
        figure.suptitle(result["label"], fontsize=10)
    whole_ticks(figure)
    save(figure, path, dpi=130)


def plot_layers(runs: Sequence[Run], path: str | Path) -> None:
    """Draws one column a run: loss, then each layer's W_Q norm, largest score, mean key over what keys differ from it
    by, and tied rows, in its worst head, the layer's number where the line ends; a dotted line where W_Q, and where
    scores, ran away. Errors: CompareError where no run was probed."""
    panels = [(prefix, title) for prefix, title in
              ((WQ_NORM, "largest W_Q spectral norm\nof a head"),
               (ROW_MAX, "largest score"), (KEY_MEAN, "mean key over spread\nof keys, largest head"),
               (TIES_HEAD, "rows with tied maxima,\nworst head (share)"))
              if any(run.layers(prefix) for run in runs)]
    if not panels:
        raise CompareError("no run has probe/wq_norm or probe/ties values; train with --probe_interval=100")
    figure, grid = subplots(1 + len(panels), len(runs), figsize=(1 + 3 * len(runs), 2.2 * (1 + len(panels))),
                            sharex=True, sharey="row", squeeze=False)
    for column, run in enumerate(runs):
        grid[0][column].plot(*run.series("loss"), color="black", linewidth=0.8)
        grid[0][column].set_title(run.name, fontsize=9)
        for axis, (prefix, _) in zip(grid[1:, column], panels, strict=True):
            for layer, (steps, values) in run.layers(prefix).items():
                worst = [max(value, key=nan_last) if isinstance(value, list) else value for value in values]
                axis.plot(steps, worst, color=f"C{layer}", linestyle=STYLES[layer % len(STYLES)], linewidth=1.2,
                          label=f"layer {layer}")
            if not run.layers(prefix):
                axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", fontsize=8, color="gray")
            if prefix in (ROW_MAX, KEY_MEAN):
                axis.set_yscale("log")
            away = {WQ_NORM: runaway, ROW_MAX: scores_ran_away}.get(prefix)
            if alarm := away and away(run.records):
                axis.axvline(alarm.step, color="black", linestyle=":", linewidth=1)
                axis.set_title(f"dotted: ran away at step {alarm.step}, layer {alarm.layer}", fontsize=7)
        grid[-1][column].set_xlabel("optimizer step; numbers: layers")
    for axis, name in zip(grid[:, 0], ["training loss\n(nats/token)", *(title for _, title in panels)], strict=True):
        axis.set_ylabel(name, fontsize=8)
    for axis in grid.flat:
        axis.grid(alpha=0.3)
    for axis in grid[1:].flat:  # now that a row's limits are those of all its columns
        label_ends(axis, {line.get_label().removeprefix("layer "): (line.get_xdata()[-1], line.get_ydata()[-1])
                          for line in axis.lines if line.get_label().startswith("layer ")})
    whole_ticks(figure)
    save(figure, path, dpi=130)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _last_and_largest(steps: list[int], values: list[float]) -> dict:
    step, largest = max(zip(steps, values, strict=True), key=lambda one: nan_last(one[1]))
    return {"last": values[-1], "max": largest, "step_of_max": step}


def _where(row: dict, yes: str, event: str) -> str:
    if row[yes] is None:
        return "not probed"
    return f"{row[f'step_of_{event}']}, layer {row[f'layer_of_{event}']}" if row[yes] else "-"


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 with one sentence where runs cannot be read or compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="out_dir or metrics file; the first is the reference")
    parser.add_argument("-o", "--output", metavar="FILE.png", type=named, help="draw the curves into this file")
    parser.add_argument("--layers", metavar="FILE.png", type=named,
                        help="draw losses, and by layer W_Q norms, scores, mean keys and ties, into this file")
    parser.add_argument("--json", metavar="FILE", type=named,
                        help="write the comparison, per-step differences included, as JSON")
    parser.add_argument("--allow_different_orders", action="store_true", help="compare anyway, and label the output")
    args = parser.parse_args(argv)
    try:
        for flag, target in (("-o", args.output), ("--layers", args.layers)):
            if target and target.suffix not in (".png", ".pdf", ".svg"):
                raise CompareError(f"{flag} {target} must end in .png, .pdf or .svg")
        check_targets(args.output, args.layers, args.json)
        runs = load_runs(args.runs)
        result = compare(runs, args.allow_different_orders)
        if args.json:
            write_text(args.json, to_json(result, indent=1) + "\n")
        if args.output:
            plot(runs, result, args.output)
        if args.layers:
            plot_layers(runs, args.layers)
        print(table(result))  # last: whoever reads it may stop before its end, as head does
    except (CompareError, MetricsError, OrderError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
