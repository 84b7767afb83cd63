"""The companion of an order file: which layers changed their attention, and at which step, so that a replay can too.

`order.bin` has `order.switches.json` beside it: {"version": 1, "switches": [{"step", "layer", "spec"}, ...]}. From
`step` on, that step included, `layer` (from 0) computes its attention by `spec`, the value of every switch by its
name. Of two for one layer the later one counts. The file is replaced atomically.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from files import write_text
from replay.header import OrderError

VERSION = 1


@dataclass(frozen=True)
class Switch:
    """spec: the JSON object in one line, as attention.AttentionSpec.key has it."""

    step: int
    layer: int
    spec: str


def companion(order: str | Path) -> Path:
    """Where the switches of an order file are kept."""
    return Path(order).with_suffix(".switches.json")


def plain(switches: list[Switch]) -> list[dict]:
    """Plain values, for JSON (where an infinite value is the word "Infinity") and checkpoints."""
    return [{"step": s.step, "layer": s.layer,
             "spec": {k: "Infinity" if v == math.inf else v for k, v in json.loads(s.spec).items()}} for s in switches]


def from_plain(values: list, origin: str | Path) -> list[Switch]:
    """Switches in order of step. Errors: OrderError that names `origin`."""
    try:
        switches = [Switch(v["step"], v["layer"], json.dumps({name: math.inf if value == "Infinity" else value
                                                              for name, value in v["spec"].items()})) for v in values]
        if not all(type(n) is int and n >= 0 for s in switches for n in (s.step, s.layer)):
            raise ValueError
    except (TypeError, KeyError, AttributeError, ValueError):
        raise OrderError(f"{origin} holds no list of switches, each with step, layer and spec; take a copy, or use "
                         "replay_switches=False") from None
    return sorted(switches, key=lambda s: s.step)


def read_switches(path: Path) -> list[Switch]:
    """Errors: OrderError where there is no such file or it holds something else."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OrderError(f"replay_switches needs {path}, which cannot be read ({error.strerror}); a run that never "
                         "switched a layer has none: replay with --replay_switches=False") from None
    except ValueError as error:
        raise OrderError(f"{path} is no valid JSON ({error}); take a copy, or replay with "
                         "--replay_switches=False") from None
    if not isinstance(table, dict) or table.get("version") != VERSION:
        raise OrderError(f"{path} is not of version {VERSION}; replay with the program that wrote it, or with "
                         "--replay_switches=False")
    return from_plain(table.get("switches"), path)


def write_switches(path: Path, switches: list[Switch]) -> None:
    """Errors: OrderError where it does not reach the disk."""
    try:
        write_text(path, json.dumps({"version": VERSION, "switches": plain(switches)}, indent=1) + "\n")
    except OSError as error:
        raise OrderError(str(error)) from None
