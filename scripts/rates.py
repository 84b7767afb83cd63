"""Rates of failure, not anecdotes: arms of one experiment over seeds, all arms of a seed on the same batches.

What isolate.py, cures.py and grid.py share. An experiment is a table of arms; this module runs them with train.py, each
until it counts as failed (failure.FailureRule) or reaches the last step, and writes `rows` by arm and seed, a `summary`
by arm and a figure (outcomes.py). Arms that have their outcome are kept and interrupted ones resume, so that
calling again goes on. With --collect it only reads what earlier calls left, on whichever machine:

    python scripts/isolate.py --collect FOLDER ... --out results/mini/rates   # merge calls, keep their logs
    python scripts/isolate.py --collect --out results/mini/rates              # the table again, from these

with the --arms, --seeds and --steps of the runs, or, where --out has a table already, with its own by default. Another
machine goes on from there with --kept results/mini/rates: what has its outcome among these logs is not run again.
Everything in table and figure comes from the runs' logs.
"""

import argparse
import contextlib
import functools
import json
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from config import Config, ConfigError, as_dict, check_once, override
from data.loader import open_tokens
from data.meta import corpus_folder
from failure import failure_of
from files import write_text
from metrics import MetricsError, to_json
from scripts.arms import FURTHER, RESULTS, ROOT, check_arm, check_extra, outcome, run_arms
from scripts.collect import collect
from scripts.outcomes import FAILS, FIRST, Arm, check_alike, draw, finished, load, propose, tabulate
from scripts.runs import Run, load_run
from scripts.targets import check_targets, named
from stop import EXIT_SIGINT, EXITS_STOPPED


def parser(description: str, out: str, arms: Iterable[str]) -> argparse.ArgumentParser:
    """The flags that every experiment has; `arms` are the names to choose from, all by default."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                                    epilog=FURTHER,
                                    allow_abbrev=False)  # --batch_size is train.py's, not short for --batch_sizes
    found.add_argument("--config", default="configs/mini_flash_bf16.toml", help="the failing run")
    found.add_argument("--dataset", default="mini", help="folder with train.bin and val.bin")
    found.add_argument("--out", type=named, default=Path(out))
    found.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="of weights and order")
    found.add_argument("--steps", type=int, default=10000, help="an arm that has not failed by then is stable")
    found.add_argument("--arms", nargs="+", default=list(arms), choices=list(arms), metavar="ARM",
                       help=f"default: {' '.join(arms)}")
    found.add_argument("--parallel", type=int, default=torch.cuda.device_count() or 1,
                       help="arms at a time over all GPUs, each on the one with the fewest (default: one a GPU, the "
                            "next of which compiles during its last seconds)")
    found.add_argument("--minutes", type=float, default=math.inf,
                       help="after which running arms save and end; the same command goes on with them")
    found.add_argument("--collect", type=named, nargs="*", metavar="FOLDER",
                       help="run nothing: the table of the runs in --out and in these folders, each the --out of an "
                            "earlier call or what was kept of one; keeps their logs, thinned, in --out")
    found.add_argument("--kept", type=named, nargs="+", default=[], metavar="FOLDER",
                       help="folders as of --collect; an arm that has its outcome there is not run again")
    return found


def parse(options: argparse.ArgumentParser, arms: Iterable[str], file: str,
          argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """What options.parse_known_args returns; with --collect, what is not given is as in the table OUT/file, if any."""
    try:
        check_once(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        options.error(str(error))
    args, _ = options.parse_known_args(argv)
    table = args.out / file
    if args.collect is not None and table.exists():
        try:
            options.set_defaults(**json.loads(table.read_text(encoding="utf-8"))["flags"])
        except (ValueError, KeyError, TypeError) as error:
            options.error(f"{table} is no table of this script ({error!r}); move it away")
    args, extra = options.parse_known_args(argv)
    if unknown := [name for name in args.arms if name not in arms]:
        options.error(f"{table} has arms that are not known any more: {', '.join(unknown)}; give --arms")
    return args, extra


def run_experiment(arms: dict[str, Arm], args: argparse.Namespace, extra: list[str]) -> dict:
    """Runs `arms` over `args.seeds` and returns `tabulate`'s table with "errors", also as it stands when interrupted:
    log files of arms that have no outcome because train.py ended with an error; and whether it was "interrupted".

    The first runs of all seeds start first; arms whose flags name a layer wait for their seed's. Errors, before
    anything is started: ValueError for flags that cannot run; and as `run_arms`. At the end: as `check_alike`.
    """
    check_extra(extra, {"max_iters": "give --steps", "seed": "give --seeds", "out_dir": "give --out",
                        "attention": "give a --config with it"}, {name: arm.flags for name, arm in arms.items()})
    gpus, deadline = torch.cuda.device_count(), time.monotonic() + 60 * args.minutes
    waits = {name for name, arm in arms.items() if any("{" in flag for flag in arm.flags)}
    common = override([args.config, f"--dataset={args.dataset}", f"--max_iters={args.steps}",
                       "--stop_when_failed=True"], *extra)
    have = {key: run for key, (_, run) in _find(args.kept, arms, args)[0].items() if finished(run, args.steps)}
    folders = {(name, seed): f"seed{seed}/{name}" for seed in args.seeds for name in arms if (name, seed) not in have}

    def argv(name: str, seed: int, chosen: dict) -> list[str]:
        words = {"layer": chosen.get("layer"), "head": chosen.get("head"),
                 "heads": ",".join(map(str, chosen.get("heads", [])))}
        return override(common, f"--seed={seed}", *(flag.format(**words) for flag in arms[name].flags))

    def late(name: str, seed: int) -> list[str] | None:
        if (FIRST, seed) in have:
            return argv(name, seed, propose(have[FIRST, seed]))
        first = args.out / folders[FIRST, seed]
        return argv(name, seed, propose(load_run(first))) if outcome(first, args.steps) in RESULTS else None

    planned = _check(args, {name: argv(name, args.seeds[0], {"layer": 0, "head": 0, "heads": [0]}) for name in arms},
                     bool(waits))
    check_alike([*have.items(), *(((name, args.seeds[0]), run) for name, run in planned.items())] if have else [], arms)
    commands = {folders[name, seed]: functools.partial(late, name, seed) if name in waits else argv(name, seed, {})
                for name, seed in sorted(folders, key=lambda key: key[0] != FIRST)}
    codes: dict[str, int | None] = {}
    interrupted = False
    try:
        codes = run_arms(commands, args.out, args.parallel, gpus, limit_s=deadline - time.monotonic(),
                         steps=args.steps)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; the same command goes on", file=sys.stderr)
    runs = {key: run for key, folder in folders.items() if (args.out / folder / "metrics.jsonl").exists()
            and (run := load(args.out / folder, args.steps))}
    runs |= have
    check_alike(runs.items(), arms)
    return tabulate(arms, args.seeds, runs, args.steps) | {"interrupted": interrupted, "errors": [
        f"{args.out / name}.log" for name, code in codes.items() if code not in (*RESULTS, None, *EXITS_STOPPED)]}


def collect_experiment(arms: dict[str, Arm], args: argparse.Namespace, extra: list[str]) -> dict:
    """`tabulate`'s table of the runs in `args.out` and `args.collect`, without running anything. What is not in
    `args.out` yet is kept there, thinned (collect.py). Errors: ValueError for folders without runs, and as `_choose`
    and `check_alike`."""
    if extra:
        raise ValueError(f"--collect runs nothing, so {' '.join(extra)} cannot be passed on to train.py; leave it out")
    if args.steps < 1:
        raise ValueError(f"--steps={args.steps} must be positive")
    if args.kept:
        raise ValueError(f"--collect runs nothing, so --kept {' '.join(map(str, args.kept))} would be left out; give "
                         "these to --collect")
    chosen, left_out = _find([args.out, *args.collect], arms, args)
    if left_out and not chosen:
        raise ValueError(f"none of the runs is of --arms and --seeds; there are {' '.join(sorted(left_out))}")
    table = tabulate(arms, args.seeds, {key: run for key, (_, run) in chosen.items()}, args.steps)
    for (_, seed), (path, _) in chosen.items():
        if not path.absolute().is_relative_to(args.out.absolute()):
            collect(path, args.out / f"seed{seed}", order=False, thinned=True)
    if left_out:
        print(f"left out, as not of --arms and --seeds: {' '.join(sorted(left_out))}", file=sys.stderr)
    return table | {"errors": []}


def _find(folders: list[Path], arms: dict[str, Arm], args: argparse.Namespace) -> tuple[dict, set[str]]:
    """By arm and seed of `args` the run in `folders`, and its path; and what there is of other arms and seeds. Errors:
    ValueError for folders without runs (args.out may have none beside others), and as `_choose` and `check_alike`."""
    candidates, left_out = {}, set()
    for folder in folders:
        paths = [path for path in (*(log.parent for log in folder.glob("seed*/*/metrics.jsonl")),
                                   *folder.glob("seed*/*.jsonl.xz"))
                 if path.parent.name.removeprefix("seed").isdecimal()]
        if not paths and (folder != args.out or len(folders) == 1):
            raise ValueError(f"{folder} has no runs, seedN/ARM/metrics.jsonl or seedN/ARM.jsonl.xz; give the --out of "
                             "an experiment")
        for path in sorted(paths):
            name, seed = path.name.removesuffix(".jsonl.xz"), int(path.parent.name.removeprefix("seed"))
            if name not in arms or seed not in args.seeds:
                left_out.add(f"seed{seed}/{name}")
            elif run := load(path, args.steps):
                candidates.setdefault((name, seed), []).append((path, run))
    check_alike(((key, run) for key, several in candidates.items() for _, run in several), arms)
    return {key: _choose(several, args.steps) for key, several in candidates.items()}, left_out


def _choose(several: list[tuple[Path, Run]], steps: int) -> tuple[Path, Run]:
    """Of several runs of one arm and seed the first finished one, else the longest. Errors: ValueError for finished
    ones that differ, of which none may be picked."""
    done = {path: run for path, run in several if finished(run, steps)}
    failures = {path: failure_of(run.records) for path, run in done.items()}
    if len(set(failures.values())) > 1:
        raise ValueError("finished runs of one arm and seed differ: " + ", ".join(
            f"{path} {'is stable' if step is None else f'failed at step {step}'}" for path, step in failures.items())
            + "; leave all but one out")
    return next(iter(done.items())) if done else max(several, key=lambda one: one[1].steps)


def _check(args: argparse.Namespace, arms: dict[str, list[str]], proposes: bool) -> dict[str, Run]:
    """The runs that these arms would be, to hold kept ones against; empty without --kept. Errors: ValueError for what a
    user can change, before anything is started."""
    planned = {}
    for name in ("steps", "parallel", "minutes"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name}={getattr(args, name)} must be positive")
    for seed in args.seeds:
        Config(seed=seed)  # the bounds of all seeds; an arm is checked with the first
    for name, argv in arms.items():
        config = check_arm(name, argv)
        if proposes and name == FIRST and not config.probe_interval and config.monitor == "off":
            raise ValueError("arms that name a layer take it from probes of the first run, and probe_interval=0; add "
                             "--probe_interval=100")
        if args.kept:
            with contextlib.chdir(ROOT):
                data = {"sha256": open_tokens(corpus_folder(config.dataset), "train").sha256}
            info = {"config": as_dict(config), "data": data}
            planned[name] = Run(args.out, True, info, [], name)
    return planned


# Keys of `summary`: median step of an event; how many had it, of how many it is known; their interval; verdict.
EVENT_COLUMNS = (("failure", "failed", "finished", "rate", "verdict"),
                 ("runaway", "ran_away", "ran_away_or_finished", "runaway", "runaway_verdict"),
                 ("scores", "scores_ran_away", "scores_ran_away_or_finished", "scores", "scores_verdict"))


def report(found: dict) -> None:
    """An experiment's summary as a table on standard output."""
    width = max(len(line["arm"]) for line in found["summary"])
    print(f"{'arm':<{width}}  {'paper':<10}{'failed, rate, 95 %, verdict':<36}  step  {'W_Q ran away':<36}  step  "
          f"{'scores ran away':<36}  step   loss    W_Q  scores")
    for line in found["summary"]:
        if line["begun"]:
            events = [f"{_event(line, *names):<36}{_number(line[f'median_step_of_{step}'], '.0f')}  "
                      for step, *names in EVENT_COLUMNS]
            others = " ".join(_number(line[f"median_{name}"], spec) for name, spec in
                              (("final_loss", ".3f"), ("wq_norm", ".1f"), ("largest_score", ".0f")))
            print(f"{line['arm']:<{width}}  {line['paper']:<10}{''.join(events)}{others}"
                  + (f"  ({line['unfinished']} unfinished)" if line["unfinished"] else ""))
    if waiting := [line["arm"] for line in found["summary"] if not line["begun"]]:
        print(f"not begun: {' '.join(waiting)}")


def _event(line: dict, yes: str, known: str, rate: str, verdict: str) -> str:
    return (f"{line[yes]} of {line[known]}  {line[f'{rate}_low']:.2f} to {line[f'{rate}_high']:.2f}  "
            f"{line[verdict].replace('-', '')}")


def _number(value: float | None, spec: str) -> str:
    return f"{'-' if value is None else format(value, spec):>6}"


def make(arms: dict[str, Arm], args: argparse.Namespace, extra: list[str], path: Path, figure=draw) -> int:
    """Runs the experiment, or collects it, and writes its table to `path`, with the flags that make it again, and its
    figure beside it. Returns the exit status: 130 where it was interrupted, 1 where arms ended with an error, 2, and a
    sentence, where nothing could be done."""
    script = Path(sys.argv[0]).name
    if FIRST not in arms and any("{" in flag for arm in arms.values() for flag in arm.flags):
        arms = {FIRST: Arm((), FAILS, "3.1")} | arms
    flags = ("arms", "datasets", "learning_rates", "batch_sizes", "seeds", "steps")
    args.seeds = list(dict.fromkeys(args.seeds))  # one that is given twice counts once
    found = {"flags": {name: getattr(args, name) for name in flags if hasattr(args, name)}}
    try:
        check_targets(path, path.with_suffix(".png"), folders=(args.out,))
        found |= (run_experiment if args.collect is None else collect_experiment)(arms, args, extra)
        interrupted = found.pop("interrupted", False)  # of this call, not of its table
        write_text(path, to_json(found, indent=1) + "\n")
        figure(found, path.with_suffix(".png"))
        report(found)
    except (ValueError, MetricsError, OSError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 2
    if found["errors"]:
        print(f"{script}: {len(found['errors'])} arm(s) ended with an error, see {found['errors'][0]}; the same "
              "command goes on", file=sys.stderr)
    return EXIT_SIGINT if interrupted else 1 if found["errors"] else 0


def main(description: str, arms: dict[str, Arm], out: str, file: str, argv: list[str] | None = None) -> int:
    """A script of one experiment: parses, runs or collects, writes OUT/FILE and a figure. Further --key=value go to
    train.py."""
    args, extra = parse(parser(description, out, arms), arms, file, argv)
    return make({name: arms[name] for name in args.arms}, args, extra, args.out / file)
