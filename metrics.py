"""The log of a run: metrics.jsonl is the truth, run.json its header, tqdm and wandb are mirrors that cannot stop it."""

import datetime
import fcntl
import gzip
import json
import lzma
import math
import os
import secrets
import sys
import zlib
from pathlib import Path

from tqdm import tqdm

from config import Config, ConfigError, as_dict, read_values
from files import write_text
from mirror import Wandb

_TO_JSON = {math.inf: "Infinity", -math.inf: "-Infinity"}
_FROM_JSON = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# Kinds of a header's values, where it has them; a session tells in the same form what it changed.
_HEADER = {"name": str, "run_id": str, "config": {}, "attention": [str], "start_step": int,
           "order": {"mode": str, "path": str, "rows": int, "sha256": str},
           "data": {"path": str, "tokens": int, "sha256": str}}
_NULL = ("order", "rows", "sha256")  # which may be null instead
_NUMBERS = ("step", "loss", "val_loss", "grad_norm", "lr", "tokens", "tokens_per_s", "time")  # and probe/...


class MetricsError(RuntimeError):
    """The log cannot be written or read. Fatal: a run that leaves no record is worth nothing."""


def to_json(value, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities become the strings "NaN", "Infinity" and "-Infinity", which every reader accepts
    (the bare words that json.dumps writes are no JSON); 0-dimensional tensors and arrays become numbers."""
    return json.dumps(_plain(value), allow_nan=False, indent=indent, ensure_ascii=False)


def read_metrics(run: str | Path) -> list[dict]:
    """The records of a run, by step. `run` is its folder or a metrics file, plain or compressed (.gz, .xz).

    Where a resumed run logged a step again, the later record wins, and what an earlier session logged beyond the step
    that it resumed at is left out: that is another branch. A torn line (of a killed run) is skipped with a
    message. NaN and the infinities come back as floats. Raises MetricsError where there is no such file, and for a
    line that is no record or has something else where a number belongs.
    """
    path = find_metrics(run)
    by_step = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            if line.strip():
                print(f"{path}: line {number} is torn and was skipped", file=sys.stderr)
            continue
        if isinstance(record, dict) and type(record.get("resumed_at")) is int:
            by_step = {step: r for step, r in by_step.items() if step <= record["resumed_at"]}
            continue
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise MetricsError(f"{path}: line {number} is no record with a step; is this a metrics.jsonl file?")
        by_step[record["step"]] = record = {key: _floats(value) for key, value in record.items()}
        if wrong := [key for key, value in record.items() if not _fits(key, value)]:
            what = "list of numbers" if "_head/" in wrong[0] else "number"
            raise MetricsError(f"{path}: line {number} has {wrong[0]}={record[wrong[0]]!r:.60}, where a {what} "
                               "belongs; repair the line, or remove it")
    return [by_step[step] for step in sorted(by_step)]


def find_metrics(run: str | Path) -> Path:
    """The metrics file of a run's folder, or the file itself; raises MetricsError if there is none."""
    run = Path(run)
    candidates = [run / f"metrics.jsonl{suffix}" for suffix in ("", ".gz", ".xz")] if run.is_dir() else [run]
    for path in candidates:
        if path.is_file():
            return path
    raise MetricsError(f"{run} has no metrics.jsonl (nor .gz, .xz); give the out_dir of a run or such a file")


def read_run(run: str | Path) -> dict:
    """The header of a run: run.json of its folder, or for a file X.jsonl[.gz|.xz] the X.run.json or run.json beside
    it; {} where there is none. Its configs have their values as a Config has them. Raises MetricsError if it is no
    JSON, or has a value of another kind than its readers take for granted."""
    run = Path(run)
    name, jsonl, _ = run.name.partition(".jsonl")
    kept = jsonl and not run.is_dir()  # a folder that does not exist yet has no header, whatever lies beside it
    for path in (run.with_name(f"{name}.run.json"), run.with_name("run.json")) if kept else (run / "run.json",):
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise MetricsError(f"{path} is no valid JSON ({error}); repair it, or move it away") from error
            return _checked(found, path)
    return {}


class Metrics:
    """Writes a run's log. On ranks with enabled=False every method does nothing.

    out_dir/metrics.jsonl: one line a record, each in one write, so that a kill tears the last line at most.
    out_dir/run.json: {"run_id", "config", **run_info, "sessions": [...]}, replaced atomically. In a folder that has
    one, this run is a resumed one: what was saved stays, and a session is added that tells which values changed.
    config holds Config's fields; its wandb_* ones decide about wandb, which is imported only if asked for. The
    run id lets a resumed run continue its curve there.
    Raises MetricsError where the log cannot be written. Nothing that wandb or the progress bar does ends a run.
    """

    def __init__(self, out_dir: str | Path, config: dict, run_info: dict, enabled: bool = True):
        self.enabled, self._fd = enabled, None
        if not enabled:
            return
        out_dir = Path(out_dir)
        self.path, self._header = out_dir / "metrics.jsonl", out_dir / "run.json"
        try:
            self._open(json.loads(to_json({"config": config, **run_info})))
        except OSError as error:
            raise MetricsError(f"the log of this run cannot be kept in {out_dir}: {error.strerror} "
                               f"({error.filename or self.path})") from error
        self._bar = tqdm(total=config.get("max_iters"), initial=run_info.get("start_step", 0), unit="step",
                         disable=not sys.stderr.isatty(), dynamic_ncols=True)
        mode = config.get("wandb_mode", "disabled")
        if config.get("wandb_log") and mode == "disabled":
            mode = "online"  # nanoGPT's switch alone
        self._mirror = Wandb(mode, self.say, id=self.run_id, dir=str(out_dir), config=_plain(self._run),
                              project=config.get("wandb_project") or None,
                              name=config.get("wandb_run_name") or out_dir.name,
                              group=config.get("wandb_group") or None, tags=list(config.get("wandb_tags", ())) or None)

    def log(self, record: dict) -> None:
        """Appends one record; it has an integer "step". The same step may be logged again after a resume."""
        if not self.enabled:
            return
        line = (to_json(record) + "\n").encode()
        try:
            written = os.write(self._fd, line)
            if written < len(line):  # a disk that fills up takes a part; the second call says why
                os.write(self._fd, line[written:])
        except OSError as error:
            raise MetricsError(f"step {record['step']} could not be logged to {self.path} ({error.strerror}); make "
                               "room and go on with init_from=resume") from error
        self._bar.update(max(0, record["step"] - self._bar.n))
        if "loss" in record:
            self._bar.set_postfix_str(f"loss {float(record['loss']):.4f}", refresh=False)
        self._mirror.log(_plain(record, floats=True))

    def say(self, *values) -> None:
        """Prints without tearing the progress bar."""
        if self.enabled:
            tqdm.write(" ".join(map(str, values)))
            sys.stdout.flush()

    def update_run(self, **fields) -> None:
        """Replaces top-level fields of run.json, such as the hash of an order that has grown."""
        if self.enabled:
            self._run.update(fields)
            self._write_header()

    def close(self, exit_code: int = 0) -> None:
        """Ends the session in run.json and in wandb; may be called twice."""
        if self._fd is None:
            return
        os.close(self._fd)
        self._fd = None
        self._bar.close()
        self._run["sessions"][-1].update(ended=_now(), exit_code=exit_code)
        try:
            self._write_header()
        except MetricsError as error:  # every record is safe, and what ended the run matters more
            self.say(error)
        self._mirror.finish(exit_code)

    def _open(self, now: dict) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before, now["config"] = read_run(self.path.parent), read_values(now["config"], "this run")
        self.run_id = before.get("run_id") or secrets.token_hex(4)
        session = {"started": _now()}
        old = as_dict(Config()) | before.get("config", {})  # a key that a commit did not have yet was at its default
        if before:
            session["changed"] = {key: value for key, value in now.items() if value != before.get(key)}
            if "config" in session["changed"]:
                session["changed"]["config"] = {k: v for k, v in now["config"].items() if k not in old or v != old[k]}
        self._run = now | before | {"run_id": self.run_id, "sessions": [*before.get("sessions", ()), session]}
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held to the end: one run a folder
        except BlockingIOError:
            os.close(self._fd)
            self._fd = None
            raise MetricsError(f"another process is running in {self.path.parent}; wait for it, or give this run "
                               "another out_dir") from None
        self._write_header()
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a kill tore the last line: close it, so that only that one is lost
        if size and "start_step" in now:
            os.write(self._fd, (to_json({"resumed_at": now["start_step"]}) + "\n").encode())
        changed = session.get("changed", {}).get("config", {})
        if told := [f"{key} {old.get(key)!r} -> {value!r}" for key, value in changed.items() if key != "init_from"]:
            self.say(f"resumed with other settings than the run began with: {', '.join(told)}")

    def _write_header(self) -> None:
        try:
            write_text(self._header, to_json(self._run, indent=1) + "\n")
        except OSError as error:
            raise MetricsError(str(error)) from error


def _plain(value, floats: bool = False):
    """Python values of anything that json or wandb should store; floats=True leaves non-finite numbers as they are."""
    if isinstance(value, dict):
        return {str(key): _plain(item, floats) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, floats) for item in value]
    if not isinstance(value, bool | int | float | str | None):
        value = value.item() if hasattr(value, "item") else str(value)
    if isinstance(value, float) and not floats and not math.isfinite(value):
        return _TO_JSON.get(value, "NaN")
    return value


def _floats(value):
    """Undoes what `to_json` makes of non-finite numbers, in a value of a record or a list of them."""
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return _FROM_JSON.get(value, value) if isinstance(value, str) else value


def _fits(key: str, value) -> bool:
    """Whether a value of a record is what the key's readers take for granted: a number that a float holds, or a list of
    them by head."""
    if key not in _NUMBERS and not key.startswith("probe/"):
        return True
    values = value if "_head/" in key else [value]
    return isinstance(values, list) and bool(values) and all(
        type(one) is float or (type(one) is int and abs(one) < 2**63) for one in values)


def _checked(header, path: Path) -> dict:
    """The header that a run.json holds. Errors: MetricsError, which names the file, a key and its value."""
    if wrong := next(_misfits(header, _HEADER | {"sessions": [{"changed": _HEADER}]}), None):
        key, value = wrong
        what = f"{path} is no run's header" if not key else f"{path} has {key[1:]}={value!r:.60}, of the wrong kind"
        raise MetricsError(f"{what}; repair it, or move it away")
    for part in (header, *(session.get("changed", {}) for session in header.get("sessions", []))):
        try:
            if "config" in part:
                part["config"] = read_values(part["config"], str(path))
        except ConfigError as error:
            raise MetricsError(f"{error}; repair it, or move it away") from error
    return header


def _misfits(value, kind, at: str = ""):
    """(key, value) of what is not of its kind: a type, or of a table, or of a list, what is in it by key."""
    if not isinstance(value, kind if isinstance(kind, type) else type(kind)):
        yield at, value
    elif isinstance(kind, dict):
        for key in kind:
            if key in value and (value[key] is not None or key not in _NULL):
                yield from _misfits(value[key], kind[key], f"{at}.{key}")
    elif isinstance(kind, list):
        for i, item in enumerate(value):
            yield from _misfits(item, kind[0], f"{at}[{i}]")


def _read(path: Path) -> str:
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            return file.read().decode("utf-8", errors="replace")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise MetricsError(f"{path} cannot be read: {error}") from error


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
