"""What runs of one experiment came to: a line a run, a summary an arm, and a figure; from the runs' logs alone.

What rates.py writes. A run has failed where failure.FailureRule says so, is stable where it has not within as many
steps as the table is about, and is unfinished before that. Beside that stands whether W_Q ran away (monitor.runaway)
and whether scores did (monitor.scores_ran_away), which may take thousands of steps to reach the loss.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diagnostics.lines import save, subplots
from failure import WINDOW, failure_of, step_of_turn
from scripts.monitor import probed, runaway, scores_ran_away
from scripts.runs import NO_STEP, CompareError, Run, load_run, nan_last, told
from settings import read_keys

FAILS, STABLE, UNTRIED = "fails", "stable", "not tried"
FIRST = "flash_bf16"  # the run that fails: it proposes the layer and the heads that other arms name
PROPOSES = "probe/wq_norm_head/layer"
EVENTS = {"step_of_scores": (":", 3), "step_of_runaway": ("--", 1.2), "step_of_failure": ("-", 1.2)}  # as drawn


@dataclass(frozen=True)
class Arm:
    """What to run: train.py's flags, in which {layer}, {head} and {heads} are what the first run's norms propose; and
    what the paper reports of it on GPT-2 small, with the section."""

    flags: tuple[str, ...] = ()
    paper: str = UNTRIED
    section: str = "-"


def propose(run: Run) -> dict:
    """The layer whose W_Q has the largest norm, its worst head, and its heads above their mean, which in the paper's
    figure 3 are the six that it calls outliers; at the last probe before the loss turned, so at the smallest mean of 50
    logged losses. Later, when everything grows, the norms no longer tell where it began. Errors: ValueError for a run
    without probes."""
    layers = run.layers(PROPOSES)
    if not layers:
        raise ValueError(f"{run.name} has no probe/wq_norm_head values; run it with --probe_interval=100")
    turn = step_of_turn(*run.series("loss"))
    norms = {layer: values[sum(step <= turn for step in at) - 1] for layer, (at, values) in layers.items()}
    layer = max(norms, key=lambda i: max(norms[i]))
    mean, worst = statistics.fmean(norms[layer]), norms[layer].index(max(norms[layer]))
    return {"layer": layer, "head": worst, "norms": norms[layer],
            "heads": [head for head, norm in enumerate(norms[layer]) if norm > mean] or [worst]}  # one, or equals


def interval(failed: int, runs: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate of `failed` in `runs` (E. B. Wilson, 1927); (0, 1) of no runs."""
    if not runs:
        return 0.0, 1.0
    p, n = failed / runs, runs
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def fewer(first: dict[int, bool], arm: dict[int, bool]) -> float | None:
    """p of McNemar's exact one-sided test (Psychometrika 12, 1947), that an arm fails on fewer seeds than the first:
    of the seeds on which only one of the two fails, how likely at least as many would be the first one's if a coin
    decided. Both map seeds to whether they failed; None where they share none.

    A seed makes a pair: same weights at the start, same batches. Fisher's test takes two independent samples, which
    pairs are not. This one holds however strongly they depend on each other, and pays in power: five seeds on which the
    first run alone fails give p = 1/32, four give 1/16.
    """
    pairs = [(first[seed], arm[seed]) for seed in first.keys() & arm.keys()]
    cured, split = pairs.count((True, False)), sum(a != b for a, b in pairs)
    return sum(math.comb(split, k) for k in range(cured, split + 1)) / 2**split if pairs else None


def verdict(paper: str, low: float, high: float, p: float | None) -> str:
    """Whether an arm's seeds bear out what the paper reports of it. An arm "fails" where the interval of its rate lies
    above one half, and is "stable" where it lies below and it fails on fewer seeds than the first one (p < 0.05,
    `fewer`); else it is undecided. Each arm by itself: not corrected for their number."""
    seen = FAILS if low > 0.5 else STABLE if high < 0.5 and p is not None and p < 0.05 else None
    return "-" if paper == UNTRIED else "undecided" if seen is None else "agrees" if seen == paper else "disagrees"


def failed_by(rows: list[dict], event: str = "step_of_failure") -> tuple[list[int], list[float]]:
    """Steps at which a run failed, from 0, and the share that had failed by then: 1 minus Kaplan and Meier's estimate
    (JASA 53, 1958). A run that has not failed counts up to its last step. event: the entry that holds the step."""
    ends = [r["last_step"] if r[event] is None else r[event] for r in rows]
    failures = [r[event] for r in rows if r[event] is not None]
    steps, shares, left = [0], [0.0], 1.0
    for step in sorted(set(failures)):
        left *= 1 - failures.count(step) / sum(end >= step for end in ends)
        steps.append(step)
        shares.append(1 - left)
    return steps, shares


def load(path: Path, steps: int) -> Run | None:
    """The first `steps` steps of a run, from its folder or a file that was kept of it; None without a loss there."""
    try:
        run = load_run(path)
    except CompareError:
        return None
    first = [r for r in run.records if r["step"] < steps]
    run = dataclasses.replace(run, records=first, goes_on=run.steps > steps)
    return run if run.steps else None


def finished(run: Run, steps: int) -> bool:
    return run.goes_on or run.steps >= steps or failure_of(run.records) is not None


def row(arm: str, seed: int, run: Run | None, proposal: dict | None, steps: int) -> dict:
    """One line of the table, by the run's log alone. `failed` is None for a run that has neither failed nor reached
    `steps`, `ran_away` and `scores_ran_away` likewise, or for one that was not probed; `final_loss` is the mean of the
    last 50 logged losses, in nats; `largest_score` is that of all layers and probes; `ties` and `wq_norm` are the
    proposed layer's at its last probe (share of rows with tied maxima in its worst head; largest spectral norm of W_Q
    of a head)."""
    found = dict.fromkeys(("arm", "seed", "failed", "step_of_failure", "final_loss", "last_step", "ran_away",
                           "step_of_runaway", "scores_ran_away", "step_of_scores", "largest_score", "layer", "ties",
                           "wq_norm"))
    found |= {"arm": arm, "seed": seed}
    if run is None:
        return found
    failure, losses = failure_of(run.records), run.series("loss")[1]
    done = finished(run, steps)
    alarms = {("ran_away", "step_of_runaway"): runaway(run.records),
              ("scores_ran_away", "step_of_scores"): scores_ran_away(run.records)}
    found |= {"failed": failure is not None if done else None, "step_of_failure": failure,
              "final_loss": statistics.fmean(losses[-WINDOW:]), "last_step": run.steps - 1}
    for (yes, at), alarm in alarms.items():
        found |= {yes: True if alarm else False if done and probed(run.records) else None, at: alarm and alarm.step}
    largest = [value for _, values in run.layers("probe/row_max/layer").values() for value in values]
    found["largest_score"] = float(f"{max(largest, key=nan_last):.6g}") if largest else None  # as kept logs have it
    if proposal:
        found["layer"] = proposal["layer"]
        for name in ("ties", "wq_norm"):
            values = run.layers(f"probe/{name}_head/layer").get(proposal["layer"], ([], []))[1]
            found[name] = max(values[-1], key=nan_last) if values else None
    return found


def summary(rows: list[dict], arms: dict[str, Arm]) -> list[dict]:
    """By arm: failures in finished runs, the interval of their rate, unfinished runs, the paper's outcome, `fewer` and
    `verdict`; the same of runs whose W_Q ran away, and whose scores did; and medians over finished runs.

    A run that was cut off has not failed yet, so leaving such runs out would raise the rate: the interval reaches from
    where all of them turn out stable to where all fail, and p takes the worse of the two. Runs not begun are left out.
    """
    begun = [r for r in rows if r["failed"] is not None or r.get("last_step") is not None]
    found = []
    for name, arm in arms.items():
        mine = [r for r in rows if r["arm"] == name]
        done = [r for r in mine if r["failed"] is not None]
        failed = _rate(begun, name, "failed")
        line = {"arm": name, "section": arm.section, "paper": arm.paper,
                "begun": sum(r["arm"] == name for r in begun), "failed": failed["yes"],
                "finished": len(done), "unfinished": len(mine) - len(done), "rate_low": failed["low"],
                "rate_high": failed["high"], "p_fewer": failed["p"],
                "verdict": verdict(arm.paper, failed["low"], failed["high"], failed["p"])}
        for event, word in (("ran_away", "runaway"), ("scores_ran_away", "scores")):
            rate = _rate(begun, name, event)
            line |= {event: rate["yes"], f"{event}_or_finished": rate["known"], f"{word}_low": rate["low"],
                     f"{word}_high": rate["high"], f"{word}_p_fewer": rate["p"],
                     f"{word}_verdict": verdict(arm.paper, rate["low"], rate["high"], rate["p"])}
        for key in ("step_of_failure", "step_of_runaway", "step_of_scores", "final_loss", "largest_score", "ties",
                    "wq_norm"):
            values = [r[key] for r in done if r.get(key) is not None]
            line[f"median_{key}"] = statistics.median(values) if values else None
        found.append(line)
    return found


def _rate(begun: list[dict], name: str, event: str) -> dict:
    """Runs of an arm with the event, those of which it is known, the interval of the rate, and p against FIRST."""
    def seeds(arm: str, unknown: bool) -> dict[int, bool]:
        return {r["seed"]: r.get(event) is True or (unknown and r.get(event) is None) for r in begun if r["arm"] == arm}

    least, most, known = seeds(name, False), seeds(name, True), [r for r in begun if r["arm"] == name]
    return {"yes": sum(least.values()), "known": sum(r.get(event) is not None for r in known),
            "low": interval(sum(least.values()), len(least))[0], "high": interval(sum(most.values()), len(most))[1],
            "p": fewer(seeds(FIRST, False), most) if any(r["arm"] == FIRST for r in begun) else None}


def check_alike(runs: Iterable[tuple[tuple[str, int], Run]], arms: dict[str, Arm]) -> None:
    """Runs of one table have the seed and the flags that they are filed under, to the end, and differ in what these
    name, in what changes no step, and in nothing else. Errors: ValueError, which names the first that does, and what it
    differs from, with folders and values."""
    free, reference = NO_STEP | {"seed"}, None
    for (name, seed), run in runs:
        where = f"{name} of seed {seed}, in {run.folder},"
        if not (settings := dict(run.info.get("config", {}))):
            raise ValueError(f"{where} has no run.json or {name}.run.json, which says what it ran with; leave it out")
        settings, flags = read_keys(settings), dict(flag.removeprefix("--").split("=", 1) for flag in arms[name].flags)
        resolved = dict(re.findall(r"(\w+)=([^\s,()]+)", " ".join(run.info.get("attention", [])[:1])))
        for key, text in (flags | {"seed": str(seed)}).items():
            value = resolved.get(key) if settings.get(key) is None else settings[key]  # None is the commit's default
            if key != "dataset" and "{" not in text and value is not None and not _says(text, value):
                raise ValueError(f"{where} has {key}={value}, not {text}; file it as what it is, or leave it out")
        if other := run.resumed_with():
            raise ValueError(f"{where} went on with {told(other[0])}: it is of no one arm; leave it out")
        if "dataset" not in flags:
            settings["training data with SHA-256"] = run.info.get("data", {}).get("sha256")
        reference = reference or (where, flags, settings)
        for key in sorted((settings.keys() & reference[2].keys()) - flags.keys() - reference[1].keys() - free):
            if settings[key] != reference[2][key]:
                raise ValueError(f"{where} has {key}={settings[key]}, and {reference[0]} {key}={reference[2][key]}: "
                                 "they are not of one experiment; leave one out")


def _says(text: str, value) -> bool:
    """Whether a flag's text is a config's value: "1e-5" is 0.00001."""
    try:
        return float(text) == float(value)
    except ValueError:
        return text == str(value)


def tabulate(arms: dict[str, Arm], seeds: list[int], runs: dict[tuple[str, int], Run], steps: int) -> dict:
    """{"made_with", "proposals", "rows", "summary"} of runs by arm and seed, cut at `steps`, that belong together
    (`check_alike`); an arm without one is unfinished."""
    proposals = {seed: propose(run) for seed in seeds if (run := runs.get((FIRST, seed)))
                 and run.layers(PROPOSES) and finished(run, steps)}
    rows = [row(name, seed, runs.get((name, seed)), proposals.get(seed), steps) for name in arms for seed in seeds]
    made = {key: sorted({str(run.info.get(key)) for run in runs.values()}) for key in ("git_commit", "device_name")}
    made["data"] = sorted({str(run.info.get("data", {}).get("sha256")) for run in runs.values()})
    return {"made_with": made, "proposals": proposals, "rows": rows, "summary": summary(rows, arms)}


def draw(found: dict, path: Path) -> None:
    """One panel an arm with a run: the share of its seeds that failed by a step (`failed_by`), and the shares whose W_Q
    (dashed) and whose scores (dotted) had run away; the first arm's in grey; ticks where a run that has not failed
    ends; at the right the interval of the rate at which scores run away."""
    rows = {line["arm"]: [r for r in found["rows"] if r["arm"] == line["arm"] and r["last_step"] is not None]
            for line in found["summary"]}
    lines, steps = [line for line in found["summary"] if rows[line["arm"]]], found["flags"]["steps"]
    if not lines:
        return
    columns = min(5, len(lines))
    figure, axes = subplots(-(-len(lines) // columns), columns, sharex=True, sharey=True, squeeze=False,
                            figsize=(2.4 * columns, 1.9 * -(-len(lines) // columns)))
    for axis in axes.flat[len(lines):]:
        axis.set_visible(False)
    for axis, line in zip(axes.flat, lines, strict=False):
        for name, color in ((FIRST, "0.7"), (line["arm"], "black")):
            for event, (dashes, width) in EVENTS.items() if rows.get(name) else ():
                at, shares = failed_by(rows[name], event)
                axis.step([*at, max(r["last_step"] for r in rows[name])], [*shares, shares[-1]], where="post",
                          linestyle=dashes, linewidth=width, color=color)
        ends = [r["last_step"] for r in rows[line["arm"]] if r["step_of_failure"] is None]
        axis.plot(ends, [shares[sum(step <= end for step in at) - 1] for end in ends], "k|", markersize=9)
        if line["scores_ran_away_or_finished"]:
            axis.plot([1.04 * steps] * 2, [line["scores_low"], line["scores_high"]], "k_-", linewidth=1)
        axis.set_title(f"{line['arm']}\n{line['failed']} of {line['finished']} failed; ran away: W_Q "
                       f"{line['ran_away']}, scores {line['scores_ran_away']} of {line['scores_ran_away_or_finished']}",
                       fontsize=6)
        axis.set(xlim=(0, 1.08 * steps), ylim=(-0.05, 1.05))
        axis.tick_params(labelsize=7, labelbottom=True)
    figure.supxlabel("step (solid: the loss failed, dashed: W_Q ran away, dotted: scores did; grey: the same of "
                     f"{FIRST}; bar: 95 % interval of the rate of scores)", fontsize=8)
    figure.supylabel("share of seeds", fontsize=8)
    save(figure, path, dpi=150)
