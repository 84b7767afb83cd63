"""Finished runs, read from their files, and the question whether two of them saw the same batches. For every script
that compares or plots; nothing here touches a live run."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metrics import find_metrics, read_metrics, read_run
from replay.order import OrderFile
from settings import read_keys

# Of a config, what changes no step: where and how far a run ran, and what it evaluated, saved and told on the way.
NO_STEP = {"out_dir", "dataset", "init_from", "max_iters", "checkpoint_interval", "keep_checkpoints", "eval_interval",
           "eval_iters", "collective_timeout_s", "wandb_log", "wandb_mode", "wandb_project", "wandb_run_name",
           "wandb_group", "wandb_tags"}


class CompareError(ValueError):
    """Runs that cannot be compared; one sentence with both values."""


@dataclass
class Run:
    """A run as its files tell it: header `info` (run.json) and `records` (metrics.jsonl, by step)."""

    folder: Path
    own_folder: bool  # an out_dir; else one of several metrics files in a folder
    info: dict
    records: list[dict]
    name: str
    goes_on: bool = False  # past these records, which are its first ones

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of the records that have the key."""
        found = [(r["step"], r[key]) for r in self.records if r.get(key) is not None]
        return [step for step, _ in found], [value for _, value in found]

    def layers(self, prefix: str) -> dict[int, tuple[list[int], list[float]]]:
        """The series of a probed value by layer; empty where the run was not probed."""
        keys = {key for record in self.records for key in record if key.startswith(prefix)}
        return {layer: self.series(prefix + str(layer))
                for layer in sorted(int(key[len(prefix):]) for key in keys if key[len(prefix):].isdecimal())}

    @property
    def steps(self) -> int:
        """Steps trained, as far as logged."""
        steps, _ = self.series("loss")
        return steps[-1] + 1 if steps else 0

    def resumed_with(self) -> list[dict]:
        """{"step": the first one, key: value, ...} of sessions with other settings than the run began with, of which a
        step is among the records. run.json's own config is that of the first session."""
        begun, sessions, found = self.info.get("config", {}), sessions_of(self.info), []
        for i, (start, changed) in enumerate(sessions):
            later = (first for first, _ in sessions[i + 1:])
            if changed and start < min([self.steps, *later]):  # else made again, or not made
                then, now = read_keys(begun), read_keys(begun | changed)
                other = {key: now[key] for key in sorted(now.keys() & then.keys() - NO_STEP - {"replay"})
                         if now[key] != then[key]}
                found += [{"step": start} | other] if other else []
        return found

    def weights(self) -> int | None:
        """The seed of the weights it began with; None where they were another run's, or the header does not tell."""
        config = self.info.get("config", {})
        return config.get("seed") if config.get("init_from", "scratch") == "scratch" else None


def sessions_of(header: dict) -> list[tuple[int, dict]]:
    """(first step, keys of the config that are not as the run was begun with) of each session of a run.json."""
    changes = [session.get("changed", {}) for session in header.get("sessions", [])]
    return [(change.get("start_step", header.get("start_step", 0)), change.get("config", {})) for change in changes]


def nan_last(value: float) -> float:
    """The key of a maximum that NaN is: what max makes of one by itself depends on where it stands."""
    return math.inf if math.isnan(value) else value


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column begins at one place, the others end at one."""
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]) for line in lines]


def told(other: dict) -> str:
    """One of `Run.resumed_with` in words."""
    return ", ".join(f"{key}={value}" for key, value in other.items() if key != "step") + f" from step {other['step']}"


def load_run(path: str | Path) -> Run:
    """Errors: MetricsError where files are missing or damaged, CompareError for a run without a loss."""
    file, info = find_metrics(path), read_run(path)
    own = file.name.startswith("metrics.jsonl")
    # A file that was kept is called as it is now, whatever its folder was called.
    name = info.get("name") or file.parent.resolve().name if own else file.name.split(".jsonl")[0]
    run = Run(file.parent, own, info, read_metrics(file), name)
    if run.steps == 0:
        raise CompareError(f"{file} has no logged loss, so there is nothing to compare; train for at least one step")
    return run


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Runs of one name are told apart by the paths they were given as."""
    runs = [load_run(path) for path in paths]
    names = [run.name for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({path})"
    return runs


def common_steps(first: Run, other: Run) -> int:
    """How many steps, from 0, both runs trained on the same sequences. Raises CompareError if their orders differ.

    Where both order files are at hand, the rows that both used are hashed; the hash covers the data, block size and
    sequences per step. Else the hashes in run.json decide, or that both drew their order from one seed.
    """
    steps = min(first.steps, other.steps)
    with _open_order(first) as a, _open_order(other) as b:
        if a is not None and b is not None:
            steps = min(steps, a.rows, b.rows)
            if a.sha256(steps) == b.sha256(steps):
                return steps
            for name, what in (("sha256", "training data with SHA-256"), ("block_size", "block_size"),
                               ("sequences_per_step", "sequences_per_step")):
                ours, theirs = getattr(a.header, name), getattr(b.header, name)
                if ours != theirs:
                    raise CompareError(f"{first.name} and {other.name} are not comparable: their orders are of {what} "
                                       f"{ours} and {theirs}")
            row = next(step for step in range(steps) if (a.row(step) != b.row(step)).any())
            raise CompareError(f"{first.name} and {other.name} are not comparable: their batch orders differ from step "
                               f"{row} on ({a.path}, {b.path}); replay one run's order in the other")
    hashes = [(run.info.get("order") or {}).get("sha256") for run in (first, other)]
    drawn = _draw(first)
    if (None not in hashes and hashes[0] == hashes[1]) or (drawn is not None and drawn == _draw(other)):
        return steps
    known = " and ".join(f"{run.name} has order hash {value[:12]}" if value else f"the order of {run.name} was not kept"
                         for run, value in zip((first, other), hashes, strict=True))
    raise CompareError(f"the runs are not comparable: {known}; replay one run's order in the other")


def _draw(run: Run) -> tuple | None:
    """What a drawn order is a function of, whatever its length: seed, data, tokens a sequence, sequences a step. None
    for a run that replayed a file, or whose header does not say."""
    config, data = run.info.get("config", {}), run.info.get("data", {})
    if (run.info.get("order") or {}).get("mode") not in ("recorded", "drawn"):
        return None
    found = (config.get("seed"), data.get("sha256"), data.get("tokens"), config.get("block_size"),
             config.get("batch_size"), config.get("gradient_accumulation_steps"))
    return None if None in found else (*found[:4], found[4] * found[5])


@contextlib.contextmanager
def _open_order(run: Run):
    """The order file that the run wrote, else the one that run.json says it replayed; None where neither was kept, or
    another run's is there now."""
    said = run.info.get("order") or {}
    candidates = [run.folder / "order.bin"] * run.own_folder + ([Path(said["path"])] if said.get("path") else [])
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        yield None
    else:
        with OrderFile(found) as order:
            rows, sha256 = said.get("rows") or 0, said.get("sha256")
            other = sha256 and found.parent != run.folder and (rows > order.rows or order.sha256(rows) != sha256)
            yield None if other else order


def difference(first: Run, other: Run, steps: int) -> tuple[list[int], list[float]]:
    """Steps below `steps` that both logged, and loss of `other` minus loss of `first` there, in nats per token."""
    reference = dict(zip(*first.series("loss"), strict=True))
    pairs = [(step, loss - reference[step]) for step, loss in zip(*other.series("loss"), strict=True)
             if step in reference and step < steps]
    return [step for step, _ in pairs], [value for _, value in pairs]
