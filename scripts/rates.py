"""Rates of failure, not anecdotes: arms of one experiment over seeds, all arms of a seed on the same batches.

What isolate.py, cures.py and grid.py share. An experiment is a table of arms; this module runs them with train.py, each
until it counts as failed (failure.FailureRule) or reaches the last step, and writes `rows` by arm and seed and a
`summary` by arm. Arms that have their outcome are kept and interrupted ones resume, so that calling again goes on.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from failure import WINDOW, failure_of
from metrics import MetricsError, to_json
from scripts.arms import FURTHER, RESULTS, check_arm, outcome, run_arms
from scripts.runs import CompareError, Run, load_run
from stop import EXIT_SIGINT, EXITS_STOPPED

FAILS, STABLE, UNTRIED = "fails", "stable", "not tried"
FIRST = "flash_bf16"  # the run that fails: it proposes the layer and the heads that other arms name


@dataclass(frozen=True)
class Arm:
    """What to run: train.py's flags, in which {layer}, {head} and {heads} are what the first run's norms propose; and
    what the paper reports of it on GPT-2 small, with the section."""

    flags: tuple[str, ...] = ()
    paper: str = UNTRIED
    section: str = "-"


def propose(run: Run) -> dict:
    """The layer whose W_Q has the largest norm at the last probe, its worst head, and its heads above their mean,
    which in the paper's figure 3 are the six that it calls outliers. Errors: ValueError for a run without probes."""
    layers = run.layers("probe/wq_norm_head/layer")
    if not layers:
        raise ValueError(f"{run.name} has no probe/wq_norm_head values; run it with --probe_interval=100")
    last = {layer: values[-1] for layer, (_, values) in layers.items()}
    layer = max(last, key=lambda i: max(last[i]))
    norms = last[layer]
    mean = sum(norms) / len(norms)
    return {"layer": layer, "head": norms.index(max(norms)), "norms": norms,
            "heads": [h for h, norm in enumerate(norms) if norm > mean]}


def interval(failed: int, runs: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate of `failed` in `runs` (E. B. Wilson, 1927); (0, 1) of no runs."""
    if not runs:
        return 0.0, 1.0
    p, n = failed / runs, runs
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def row(arm: str, seed: int, folder: Path, proposal: dict | None, steps: int = 0) -> dict:
    """One line of the table. `failed` is None for a run that is not finished after `steps`; `final_loss` is the mean of
    the last 50 logged losses, in nats; `ties` and `wq_norm` are the proposed layer's at its last probe (share of rows
    with tied maxima in its worst head; largest spectral norm of W_Q of a head)."""
    status = outcome(folder, steps)
    found = dict.fromkeys(("arm", "seed", "failed", "step_of_failure", "final_loss", "last_step", "layer", "ties",
                           "wq_norm"))
    found |= {"arm": arm, "seed": seed}
    if not (folder / "metrics.jsonl").exists():
        return found
    try:
        run = load_run(folder)
    except CompareError:  # ended before it logged a loss
        return found
    losses = run.series("loss")[1]
    found |= {"final_loss": statistics.fmean(losses[-WINDOW:]), "last_step": run.steps - 1}
    if status in RESULTS:
        found |= {"failed": status != 0, "step_of_failure": failure_of(run.records)}
    if proposal:
        found["layer"] = proposal["layer"]
        for name in ("ties", "wq_norm"):
            values = run.layers(f"probe/{name}_head/layer").get(proposal["layer"], ([], []))[1]
            found[name] = max(values[-1]) if values else None
    return found


def summary(rows: list[dict], arms: dict[str, Arm]) -> list[dict]:
    """By arm: failures in finished runs, the interval of their rate, unfinished runs, the paper's outcome, and medians
    over finished runs."""
    found = []
    for name, arm in arms.items():
        mine = [r for r in rows if r["arm"] == name]
        done = [r for r in mine if r["failed"] is not None]
        failed = sum(r["failed"] for r in done)
        low, high = interval(failed, len(done))
        line = {"arm": name, "section": arm.section, "paper": arm.paper, "failed": failed, "finished": len(done),
                "unfinished": len(mine) - len(done), "rate_low": low, "rate_high": high}
        for key in ("step_of_failure", "final_loss", "ties", "wq_norm"):
            values = [r[key] for r in done if r.get(key) is not None]
            line[f"median_{key}"] = statistics.median(values) if values else None
        found.append(line)
    return found


def parser(description: str, out: str, arms: Iterable[str]) -> argparse.ArgumentParser:
    """The flags that every experiment has; `arms` are the names to choose from, all by default."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                                    epilog=FURTHER,
                                    allow_abbrev=False)  # --batch_size is train.py's, not short for --batch_sizes
    found.add_argument("--config", default="configs/mini_flash_bf16.toml", help="the failing run")
    found.add_argument("--dataset", default="mini", help="folder with train.bin and val.bin")
    found.add_argument("--out", type=Path, default=Path(out))
    found.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="of weights and order")
    found.add_argument("--steps", type=int, default=10000, help="an arm that has not failed by then is stable")
    found.add_argument("--arms", nargs="+", default=list(arms), choices=list(arms), metavar="ARM",
                       help=f"default: {' '.join(arms)}")
    found.add_argument("--parallel", type=int, default=max(1, torch.cuda.device_count()), help="arms at a time")
    found.add_argument("--minutes", type=float, default=math.inf,
                       help="after which running arms save and end; the same command goes on with them")
    return found


def run_experiment(arms: dict[str, Arm], args: argparse.Namespace, extra: list[str]) -> dict:
    """Runs `args.arms` over `args.seeds` and returns {"steps", "proposals", "rows", "summary", "errors",
    "interrupted"}, also as it stands when interrupted; errors: log files of arms without an outcome as train.py ended
    with an error.

    Arms whose flags name a layer wait for their seed's first run. Errors, before anything is started: ValueError for
    flags that cannot run, and for runs in `args.out` that are past `args.steps`.
    """
    gpus, deadline = torch.cuda.device_count(), time.monotonic() + 60 * args.minutes
    waits = {name: any("{" in flag for flag in arms[name].flags) for name in args.arms}
    first = [FIRST] if any(waits.values()) and FIRST not in args.arms else []
    common = [args.config, f"--dataset={args.dataset}", f"--max_iters={args.steps}", "--stop_when_failed=True", *extra]
    folders = {(name, seed): f"seed{seed}/{name}" for name in [*first, *args.arms] for seed in args.seeds}
    proposals: dict[int, dict] = {}

    def argv(name: str, seed: int, chosen: dict) -> list[str]:
        words = {"layer": chosen.get("layer"), "head": chosen.get("head"),
                 "heads": ",".join(map(str, chosen.get("heads", [])))}
        return [*common, f"--seed={seed}", *(flag.format(**words) for flag in arms[name].flags)]

    _check(args, {name: argv(name, args.seeds[0], {"layer": 0, "head": 0, "heads": [0]})
                  for name in [*first, *args.arms]}, any(waits.values()))
    codes: dict[str, int | None] = {}
    interrupted = False

    def run(names: list[str]) -> None:
        commands = {folders[name, seed]: argv(name, seed, proposals.get(seed, {})) for seed in args.seeds
                    for name in names if seed in proposals or not waits.get(name)}
        codes.update(run_arms(commands, args.out, args.parallel, gpus, limit_s=deadline - time.monotonic(),
                              steps=args.steps))

    try:
        run([*first, *(name for name in args.arms if not waits[name])])
        for seed in args.seeds if (FIRST, args.seeds[0]) in folders else ():
            if outcome(folder := args.out / folders[FIRST, seed], args.steps) in RESULTS and any(waits.values()):
                proposals[seed] = propose(load_run(folder))
        if late := [name for name in args.arms if waits[name]]:
            run(late)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; the same command goes on", file=sys.stderr)
    rows = [row(name, seed, args.out / folder, proposals.get(seed), args.steps)
            for (name, seed), folder in folders.items()]
    return {"steps": args.steps, "proposals": proposals, "rows": rows, "summary": summary(rows, arms),
            "errors": [f"{args.out / name}.log" for name, code in codes.items()
                       if code not in (*RESULTS, None, *EXITS_STOPPED)], "interrupted": interrupted}


def _check(args: argparse.Namespace, arms: dict[str, list[str]], proposes: bool) -> None:
    """Errors: ValueError for what a user can change, before anything is started."""
    for name in ("steps", "parallel", "minutes"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name}={getattr(args, name)} must be positive")
    for name, argv in arms.items():
        config = check_arm(name, argv)
        if proposes and name == FIRST and not config.probe_interval and config.monitor == "off":
            raise ValueError("arms that name a layer take it from probes of the first run, and probe_interval=0; add "
                             "--probe_interval=100")


def write(found: dict, path: Path) -> None:
    """The experiment as JSON, and its summary as a table on standard output."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(found, indent=1) + "\n")
    width = max(len(line["arm"]) for line in found["summary"])
    print(f"{'arm':<{width}}  {'paper':<10}failed  rate, 95 %    step   loss   ties    W_Q")
    for line in found["summary"]:
        if line["finished"] or line["unfinished"]:
            numbers = [line[f"median_{key}"] for key in ("step_of_failure", "final_loss", "ties", "wq_norm")]
            shown = [f"{'-' if n is None else format(n, spec):>6}" for n, spec in
                     zip(numbers, (".0f", ".3f", ".2f", ".1f"), strict=True)]
            print(f"{line['arm']:<{width}}  {line['paper']:<10}{line['failed']} of {line['finished']}  "
                  f"{line['rate_low']:.2f} to {line['rate_high']:.2f}  {' '.join(shown)}"
                  + (f"  ({line['unfinished']} unfinished)" if line["unfinished"] else ""))


def run_and_write(arms: dict[str, Arm], args: argparse.Namespace, extra: list[str], path: Path) -> dict | None:
    """`run_experiment`, then `write`; None, and a sentence, where that cannot be."""
    try:
        found = run_experiment(arms, args, extra)
        write(found, path)
    except (ValueError, MetricsError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return None
    if found["errors"]:
        print(f"{Path(sys.argv[0]).name}: {len(found['errors'])} arm(s) ended with an error, see "
              f"{found['errors'][0]}; the same command goes on", file=sys.stderr)
    return found


def exit_status(found: dict | None) -> int:
    """0; 2 where nothing could be run, 130 where it was interrupted, 1 where arms ended with an error."""
    return 2 if found is None else EXIT_SIGINT if found["interrupted"] else 1 if found["errors"] else 0


def main(description: str, arms: dict[str, Arm], out: str, file: str, argv: list[str] | None = None) -> int:
    """A script of one experiment: parses, runs, writes OUT/FILE; returns `exit_status`. Further --key=value go to
    train.py."""
    args, extra = parser(description, out, arms).parse_known_args(argv)
    return exit_status(run_and_write(arms, args, extra, args.out / file))
