"""Would the monitor have warned? Replays its rule over what finished runs logged: python scripts/monitor.py RUN...

RUN is a run's out_dir or a metrics file (.jsonl, .jsonl.gz, .jsonl.xz), recorded with --probe_interval or --monitor.
Prints by run the first warning of the default thresholds, the steps at which W_Q and scores ran away (`runaway`,
`scores_ran_away`) and at which the run failed (failure.FailureRule), and the lead of the warning over the failure; then
by threshold in how many failed runs it warned before the failure, the median lead in steps, in how many runs it warned
whose W_Q or scores had run away without a failure by their end, and in how many that had neither: false alarms. A
warning at or after the failure detects nothing, and a run that logged nothing of a signal is not counted.
"""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import Config, ConfigError
from diagnostics.monitor import FIRST, SIGNALS, Alarm, MonitorRule
from failure import failure_of
from files import write_text
from metrics import MetricsError, find_metrics, to_json
from scripts.runs import CompareError, Run, columns, load_runs
from scripts.targets import check_targets, named

# What counts as a score that ran away: ten times QK-Clip's limit (Kimi K2, section 2.1). Chosen after seeing 42 runs of
# results/mini/rates, in which it tells every flash_bf16 from every delta=dp_p, where W_Q's norm does not.
LARGE_SCORE = 1000.0
SWEEP = {"ties": (0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6), "wq_ratio": (1.5, 2, 2.5, 3, 4, 6),
         "wq_norm": (10, 20, 30, 40, 60), "row_max": (50, 100, 200, 300, 500, 1000), "key_mean": (4, 6, 8, 10, 15)}


def first_alarm(records: Sequence[dict], thresholds: dict[str, float], before: int | None = None) -> Alarm | None:
    """The first warning over a run's records below step `before`, as training would have given it."""
    rule = MonitorRule(thresholds)
    for record in records:
        if before is not None and record["step"] >= before:
            return None
        if alarms := rule.update(record):
            return alarms[0]
    return None


def probed(records: Sequence[dict]) -> bool:
    """Whether a run's records have probes, which every signal is read from."""
    return any(FIRST in record for record in records)


def runaway(records: Sequence[dict]) -> Alarm | None:
    """Where W_Q ran away: the first head whose W_Q had a spectral norm of more than 3 times the median of all heads
    (the default of monitor_wq_ratio), which may be thousands of steps before the loss fails. None where none did, and
    where the run was not `probed`."""
    return first_alarm(records, {"wq_ratio": Config().monitor_wq_ratio})


def scores_ran_away(records: Sequence[dict]) -> Alarm | None:
    """Where scores ran away: the first layer whose largest score, in the median of five probes, passed `LARGE_SCORE`. A
    W_Q may grow while its scores do not, and they may while it stays below `runaway`'s ratio. None as there."""
    return first_alarm(records, {"row_max": LARGE_SCORE})


def judge(runs: Sequence[Run], thresholds: dict[str, float]) -> dict:
    """One line of the table: failed runs that were warned of in time, and their leads in steps; of those that had not
    failed when they ended, which ran away, and which did neither, where a warning is a false alarm."""
    leads, warned, of = [], Counter(), Counter()
    for run in runs:
        if not any(f"{SIGNALS[signal]}0" in record for signal in thresholds for record in run.records):
            continue
        failure = failure_of(run.records)
        away = runaway(run.records) or scores_ran_away(run.records)
        kind = "failed" if failure is not None else "ran away" if away else "neither"
        of[kind] += 1
        if alarm := first_alarm(run.records, thresholds, before=failure):
            warned[kind] += 1
            leads += [failure - alarm.step] if failure is not None else []
    return {"thresholds": thresholds, "detected": warned["failed"], "failed": of["failed"], "leads": leads,
            "median_lead": statistics.median(leads) if leads else None, "runaways_detected": warned["ran away"],
            "only_ran_away": of["ran away"], "false_alarms": warned["neither"], "neither": of["neither"]}


def by_run(run: Run, thresholds: dict[str, float]) -> dict:
    """What the thresholds would have said of one run, and what became of it."""
    failure, alarm = failure_of(run.records), first_alarm(run.records, thresholds)
    away, scores = runaway(run.records), scores_ran_away(run.records)
    words = {"step_of_warning": None, "layer": None, "head": None, "signal": None, "value": None}
    if alarm:
        words = {"step_of_warning": alarm.step, "layer": alarm.layer, "head": alarm.head, "signal": alarm.signal,
                 "value": alarm.value}
    lead = failure - alarm.step if alarm and failure is not None else None
    return {"name": run.name, "steps": run.steps, **words, "step_of_runaway": away and away.step,
            "step_of_scores": scores and scores.step, "step_of_failure": failure, "lead": lead}


def table(lines: Sequence[Sequence]) -> str:
    return "\n".join(columns([["-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
                               for cell in line] for line in lines]))


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 with one sentence where a run cannot be read or was not probed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="out_dir or metrics file")
    for signal in SIGNALS:
        parser.add_argument(f"--{signal}", nargs="*", type=float, metavar="THRESHOLD", default=SWEEP[signal],
                            help=f"thresholds of {signal} to try (default: {' '.join(map(str, SWEEP[signal]))})")
    parser.add_argument("--json", type=named, metavar="FILE", help="write both tables as JSON")
    args = parser.parse_args(argv)
    try:
        check_targets(args.json)
        tried = [(signal, value) for signal in SIGNALS for value in getattr(args, signal)]
        for signal, value in tried:
            if signal not in Config(**{f"monitor_{signal}": value}).monitor_thresholds:
                raise ConfigError(f"--{signal} {value:g}: 0 turns monitor_{signal} off; leave it out")
        paths = list({find_metrics(path).resolve(): path for path in args.runs}.values())  # one given twice counts once
        runs = load_runs(paths)
        for run, path in zip(runs, paths, strict=True):
            if not probed(run.records):
                raise CompareError(f"{path} has no probes; record it with --probe_interval=100 or --monitor=warn")
        default = Config().monitor_thresholds
        rows = [by_run(run, default) for run in runs]
        lines = [judge(runs, default)]
        lines += [judge(runs, {signal: value}) for signal, value in tried]
        if args.json:
            write_text(args.json, to_json({"runs": rows, "thresholds": lines}, indent=1) + "\n")
        print(table([("run", "steps", "warned at", "layer", "head", "signal", "value", "W_Q ran away", "scores",
                      "failed at", "lead"),
                     *(tuple(row.values()) for row in rows)]))
        print()
        print(table([("threshold", "detected", "median lead", "ran away only", "false alarms"),
                     *((_spell(line["thresholds"], default), f"{line['detected']} of {line['failed']}",
                        line["median_lead"], f"{line['runaways_detected']} of {line['only_ran_away']}",
                        f"{line['false_alarms']} of {line['neither']}") for line in lines)]))
    except (ConfigError, CompareError, MetricsError, OSError) as error:
        print(f"monitor: {error}", file=sys.stderr)
        return 2
    return 0


def _spell(thresholds: dict[str, float], default: dict[str, float]) -> str:
    text = ", ".join(f"{name} > {value:g}" for name, value in thresholds.items())
    return f"{text} (default)" if thresholds is default else text


if __name__ == "__main__":
    sys.exit(main())
