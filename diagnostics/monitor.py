"""The early warning: one rule over what a run's log records, the same while training and over a finished run's metrics.

A signal is a number by layer and head, or by layer, that `probes.as_record` writes:

    ties      share of a head's score rows whose maximum repeats (paper Algorithm 3, rs > 1; figure 13 counts them)
    wq_ratio  spectral norm of a head's W_Q over the median of all heads of the model at the same step
    wq_norm   that norm itself (paper figure 3)
    row_max   largest score of a layer (head None), what QK-Clip limits (Kimi K2 technical report, section 2.1)
    key_mean  length of a head's mean key over what its keys differ from it by: what delta's error is multiplied by

All but the norms are of a few sequences, so the median of the last WINDOW records decides; the norms are exact.
docs/monitor.md says where the default thresholds come from. Imports nothing of ours.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

WINDOW = 5  # records in a median: a head that ties in one batch alone warns nobody
RELEASE = 0.8  # an episode ends below this part of every threshold, or noise around one would begin many
SMOOTHED = ("ties", "row_max", "key_mean")
# By signal, what a record holds of it, a layer's number behind; older logs lack the last.
SIGNALS = {"ties": "probe/ties_head/layer", "wq_ratio": "probe/wq_norm_head/layer",
           "wq_norm": "probe/wq_norm_head/layer", "row_max": "probe/row_max/layer",
           "key_mean": "probe/key_mean_head/layer"}
FIRST = SIGNALS["wq_norm"] + "0"  # every record of a probe has it


@dataclass(frozen=True)
class Alarm:
    """A signal that passed its threshold: the begin of an episode of this layer and head."""

    step: int
    layer: int
    head: int | None  # None: a signal of the whole layer
    signal: str
    value: float
    threshold: float

    def __str__(self):
        head = "" if self.head is None else f", head {self.head}"
        of = f" (median of the last {WINDOW} records)" if self.signal in SMOOTHED else ""
        return (f"step {self.step}, layer {self.layer}{head}: {self.signal} {self.value:.4g}{of} is above "
                f"monitor_{self.signal}={self.threshold:g}")


class MonitorRule:
    """When to warn; a pure function of the records that it is given, in order of step.

    thresholds: by signal, a signal without one is not watched. Errors: ValueError for an unknown signal.
    """

    def __init__(self, thresholds: dict[str, float]):
        if unknown := thresholds.keys() - SIGNALS.keys():
            raise ValueError(f"{', '.join(sorted(unknown))} is no signal; choose from {', '.join(SIGNALS)}")
        self.thresholds, self.windows = thresholds, {}
        self.active: set[tuple[int, int | None]] = set()  # (layer, head) of the episodes that go on

    def update(self, record: dict) -> list[Alarm]:
        """The episodes that begin with this record of metrics.jsonl; none with one that holds no probe."""
        if FIRST not in record:
            return []
        above, held = {}, set()
        for signal, layer, head, value in signals(record):
            if signal not in self.thresholds:
                continue
            if signal in SMOOTHED:
                window = self.windows.setdefault((signal, layer, head), deque(maxlen=WINDOW))
                window.append(value)
                if len(window) < WINDOW:
                    continue
                value = statistics.median(window)
            threshold = self.thresholds[signal]
            if value > threshold:
                above.setdefault((layer, head), Alarm(record["step"], layer, head, signal, value, threshold))
            if value > RELEASE * threshold:
                held.add((layer, head))
        alarms = [alarm for place, alarm in above.items() if place not in self.active]
        self.active = (self.active & held) | above.keys()
        return alarms


def signals(record: dict) -> Iterator[tuple[str, int, int | None, float]]:
    """(signal, layer, head, value) of a record; what is not a number counts as infinite, but for ties."""
    norms = _layers(record, SIGNALS["wq_norm"])
    median = statistics.median(_number(value) for heads in norms.values() for value in heads) if norms else 0.0
    for layer, heads in _layers(record, SIGNALS["ties"]).items():
        yield from (("ties", layer, head, value) for head, value in enumerate(heads))
    for layer, heads in norms.items():
        for head, value in enumerate(heads):
            yield "wq_ratio", layer, head, _number(value / median if median else 0.0)
            yield "wq_norm", layer, head, _number(value)
    for layer, value in _layers(record, SIGNALS["row_max"]).items():
        yield "row_max", layer, None, _number(value)
    for layer, heads in _layers(record, SIGNALS["key_mean"]).items():
        yield from (("key_mean", layer, head, _number(value)) for head, value in enumerate(heads))


def _layers(record: dict, prefix: str) -> dict:
    return {int(key[len(prefix):]): value for key, value in record.items() if key.startswith(prefix)}


def _number(value: float) -> float:
    return math.inf if math.isnan(value) else value
