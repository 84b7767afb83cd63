"""Runs several arms of one experiment side by side: train.py as subprocesses, over the GPUs that are there."""

import contextlib
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from attention import specs_of
from checkpoint import checkpoints, step_of
from config import Config, ConfigError, as_dict, key_of, load, override
from distributed import place_of
from metrics import read_metrics, read_run
from plan import check_memory, open_data, remedies_of
from scripts.runs import sessions_of
from settings import read_keys

FURTHER = "Every other --key=value goes to train.py, whose keys python train.py --help lists."  # of a script's --help
ROOT = Path(__file__).resolve().parents[1]
TAIL = 1 << 17  # bytes of a log, a few hundred steps
AHEAD_S = 25  # what an arm needs to start and compile; while another's last seconds run, it takes nothing from it
RESULTS = (0, 3, 4)  # train.py's exit statuses that are an outcome: finished, non-finite, failed by the rule
# Between the sessions of an arm.
MAY_CHANGE = ("out_dir", "init_from", "max_iters", "replay", "checkpoint_interval", "keep_checkpoints")


def last_step(run: Path) -> int | None:
    """The step of a run's newest checkpoint; None without one."""
    return step_of(saved[-1]) if (saved := checkpoints(run)) else None


def outcome(run: Path, steps: int = 0) -> int | None:
    """The exit status with which a run's last session ended, or None: not begun, still running, killed, or finished
    before as many steps as are asked for now."""
    sessions = read_run(run).get("sessions", [])
    code = sessions[-1].get("exit_code") if sessions else None
    return None if code == 0 and (last_step(run) or steps) < steps else code


def check_extra(extra: list[str], own: dict[str, str], arms: dict[str, Iterable[str]]) -> None:
    """Of the flags for train.py, which all arms get, none may be one that the script sets for every arm, or it would be
    lost, or make runs that never end as they should; nor one that an arm sets itself: there it would be lost, and what
    the others have beside it would be another experiment. own: what to do instead, by key; arms: their flags. Errors:
    ConfigError."""
    of_arms = {key_of(flag): (name, flag) for name, flags in arms.items() for flag in flags}
    for flag in extra:
        if flag.startswith("--") and (key := key_of(flag)) in own:
            raise ConfigError(f"{flag} cannot be passed on to train.py, as {key} is set for every arm; {own[key]}")
        if flag.startswith("--") and key in of_arms:
            name, other = of_arms[key]
            raise ConfigError(f"{flag} cannot be passed on to train.py, as arm {name} has {other}; leave one of them "
                              "out")


def check_arm(name: str, argv: list[str]) -> Config:
    """What train.py would make of an arm's flags. Errors: ConfigError, which names the arm."""
    with contextlib.chdir(ROOT):
        try:
            config = load(argv)
            if config.init_from == "resume":
                raise ConfigError("init_from=resume: an arm that has begun is resumed anyway; leave it out")
            if config.monitor == "stop":
                raise ConfigError("monitor=stop ends a run before it is known whether it fails, so it has no outcome; "
                                  "use --monitor=warn, which logs the same warnings")
            check_memory(config)
            remedies_of(config, specs_of(config))
            *_, order = open_data(config)
            if order:
                order.close()
            place_of(config.device)
        except ValueError as error:
            raise ConfigError(f"arm {name}: {error}") from None
    return config


def config_at(header: dict, step: int) -> dict:
    """The config of the session that made a run's checkpoint of this step: the last one that began before it."""
    made = [changed for start, changed in sessions_of(header) if start < step]
    return header.get("config", {}) | (made[-1] if made else {})


def check_begun(run: Path, argv: list[str], out: str = "--out", steps: str = "--steps") -> None:
    """Whether a run that has begun in `run` is, as it stands now, the one that argv means, in all that it reads: a
    default of another key may have changed since. out, steps: the flags of the caller's that say where and how far it
    runs. Errors: ConfigError, with both values."""
    if not (begun := read_run(run)):
        return
    with contextlib.chdir(ROOT):
        config = load(argv)
    if (last_step(run) or 0) > config.max_iters:
        raise ConfigError(f"{run} is at step {last_step(run)}, past {steps}={config.max_iters}; give at least that, or "
                          f"another {out}")
    now, then, first = map(read_keys, (as_dict(config), config_at(begun, last_step(run) or 0), begun.get("config", {})))
    for name in sorted((now.keys() & then.keys()) - set(MAY_CHANGE)):
        if now[name] != then[name]:
            how = "was begun" if first.get(name) == then[name] else "went on"
            raise ConfigError(f"{run} {how} with {name}={then[name]!r}, and this command says {now[name]!r}; give "
                              f"the same, or another {out}")


def check_goes_on(run: Path, steps: int = 0) -> None:
    """Errors: ConfigError for a run that has no outcome yet, or none after `steps` steps, and no checkpoint to go on
    from any more."""
    if checkpoints(run) or not (run / "metrics.jsonl").exists() or not (records := read_metrics(run)):
        return
    code, done = outcome(run), records[-1]["step"]
    if code not in RESULTS or (code == 0 and done < steps):
        raise ConfigError(f"{run} is at step {done} and cannot go on, as its checkpoints are gone; put its ckpt_*.pt "
                          "back, or move it away to begin anew" + (f", or give --steps={done}" if code == 0 else ""))


def run_arms(arms: dict[str, list[str] | Callable[[], list[str] | None]], folder: Path, parallel: int, gpus: int,
             say=print, limit_s: float = math.inf, steps: int = 0) -> dict[str, int]:
    """Runs `train.py ARGV --out_dir=folder/NAME` for each {NAME: ARGV}, at most `parallel` at a time, in order; on GPUs
    the next one starts when another has AHEAD_S seconds left, to compile meanwhile: there are at most twice as many.

    An ARGV may be a function, which returns None as long as its arm has to wait: the first arm that can start takes a
    free place, and what still waits when nothing runs is left out. An arm that has its outcome after `steps` is not run
    again; one that was interrupted or has fewer is resumed. One that another call runs, or that goes on though its call
    was killed, takes a place and is waited for. Of several GPUs an arm gets the one with the fewest arms. What an arm
    prints goes to folder/NAME.log. After `limit_s` seconds no arm is started, and those that run save and end, for a
    later call to go on with; so they do at Ctrl-C and SIGTERM, which raise KeyboardInterrupt. Returns exit statuses by
    name; an arm that fails does not stop the others, since a failure may be the result.

    Errors: ConfigError, before any is started, for an arm that cannot go on, and for one that has begun with other
    flags; where these are known only later, as at Ctrl-C.
    """
    for name, argv in arms.items():
        check_goes_on(folder / name, steps)
        if (known := argv() if callable(argv) else argv) is not None:
            check_begun(folder / name, known)
    folder = folder.absolute()  # train.py runs elsewhere
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    waiting, running, codes, elsewhere, started = dict(arms), {}, {}, set(), time.monotonic()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while time.monotonic() - started <= limit_s:
            told, elsewhere = elsewhere, set()
            busy = [slot for name, (_, slot, _, since) in running.items()
                    if not (gpus and steps and seconds_left(folder / name, steps, since) < AHEAD_S)]
            while (len(busy) + len(elsewhere) < parallel and len(running) < 2 * parallel  # or short arms would pile up
                   and (found := _next(waiting, elsewhere))):
                name, argv = found
                if (log := _claim(folder / f"{name}.log")) is None:
                    elsewhere.add(name)
                    if name not in told:
                        say(f"[{time.monotonic() - started:5.0f} s] {name}: runs already, by another call; waiting for "
                            "it", flush=True)
                    continue
                del waiting[name]
                check_begun(folder / name, argv)  # again: flags that are known only now, or begun by another call since
                codes[name] = outcome(folder / name, steps)
                if codes[name] in RESULTS:
                    log.close()
                    continue
                if checkpoints(folder / name):
                    argv = override(argv, "--init_from=resume")
                environment, slot = dict(os.environ), 0
                if gpus > 1:
                    slots = [slot for _, slot, _, _ in running.values()]
                    slot = min(range(gpus), key=lambda i: (busy.count(i), slots.count(i)))
                    environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot]
                command = [sys.executable, "train.py", *argv, f"--out_dir={folder / name}"]
                log.write("$ " + " ".join(command) + "\n")
                log.flush()
                since = time.time()
                process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
                running[name] = process, slot, log, since
                busy.append(slot)
                say(f"[{time.monotonic() - started:5.0f} s] {name}: started", flush=True)
            if not running and not elsewhere:
                break
            time.sleep(0.2)
            for name in [n for n, (process, *_) in running.items() if process.poll() is not None]:
                process, _, log, _ = running.pop(name)
                log.close()
                codes[name] = process.returncode
                say(f"[{time.monotonic() - started:5.0f} s] {name}: ended with status {process.returncode}"
                    + ("" if process.returncode == 0 else f", see {folder / name}.log"), flush=True)
    finally:
        for process, *_ in running.values():  # interrupted: each arm saves and ends
            process.terminate()
        for name, (process, _, log, _) in running.items():
            codes[name] = process.wait()
            log.close()
        signal.signal(signal.SIGTERM, before)
    return codes


def seconds_left(run: Path, steps: int, since: float = 0.0) -> float:
    """Until a run that trains now has made so many steps, at the rate of what it logged last; inf before that. since:
    what it had logged by then is of an earlier session, perhaps of steps that this one makes again."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()[1:-1]  # whole ones
        logged = [record for record in map(json.loads, lines) if "loss" in record and record["time"] >= since]
        first, last = logged[0], logged[-1]
        return (steps - last["step"]) * (last["time"] - first["time"]) / (last["step"] - first["step"])
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError):
        return math.inf


def _next(waiting: dict, elsewhere: set[str]) -> tuple[str, list[str]] | None:
    """The first arm of `waiting` that need not wait and does not run elsewhere, and its flags."""
    return next(((name, flags) for name, argv in waiting.items() if name not in elsewhere
                 and (flags := argv() if callable(argv) else argv) is not None), None)


def _claim(log: Path) -> TextIO | None:
    """An arm's log, locked; None where it is already. train.py inherits the file and with it the lock, which so lasts
    from before its run has a folder until it ends, whatever becomes of its call."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = open(log, "a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
