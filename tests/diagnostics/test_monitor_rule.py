"""The monitor's rule on synthetic records: when an episode begins, whose it is, and when it ends."""

import math
from pathlib import Path

import pytest

from config import Config
from diagnostics.monitor import RELEASE, SIGNALS, WINDOW, Alarm, MonitorRule
from diagnostics.probes import as_record
from metrics import read_metrics

ROOT = Path(__file__).parents[2]
L, H = 2, 3


def records(steps: int, **series) -> list[dict]:
    """A record a step: ties 0.05, scores 1, norms 2 and mean keys 0.5 everywhere, except what `series` plants:
    ties={(layer, head): [one value a step]}, also row_max, wq_norm and key_mean; a short list stays at its last value.
    """
    found = []
    for step in range(steps):
        values = [[[base] * H for _ in range(L)] for base in (0.05, 1.0, 2.0, 0.5, 0.5)]
        for kind, name in enumerate(("ties", "row_max", "wq_norm", "key_mean")):
            for (layer, head), planted in series.get(name, {}).items():
                values[kind][layer][head] = planted[min(step, len(planted) - 1)]
        found.append({"step": step * 100, "loss": 3.0} | as_record(values))
    return found


def alarms(records: list[dict], **thresholds) -> list[Alarm]:
    rule = MonitorRule(thresholds)
    return [alarm for record in records for alarm in rule.update(record)]


def test_quiet():
    assert alarms(records(20), ties=0.4, wq_ratio=3, wq_norm=10, row_max=100) == []
    assert alarms([{"step": 0, "loss": math.nan}, {"step": 1}], ties=0.4) == []
    assert alarms(records(20, ties={(0, 0): [1.0]})) == []  # nothing is watched


def test_ties_by_the_median():
    """The third of five high records in a row decides; before five records nothing does."""
    rising = records(20, ties={(1, 2): [0.05] * 10 + [0.9]})
    (alarm,) = alarms(rising, ties=0.4)
    assert alarm == Alarm(step=1200, layer=1, head=2, signal="ties", value=0.9, threshold=0.4)
    assert str(alarm) == ("step 1200, layer 1, head 2: ties 0.9 (median of the last 5 records) is above "
                          "monitor_ties=0.4")
    (alarm,) = alarms(records(20, ties={(0, 1): [0.9]}), ties=0.4)
    assert alarm.step == (WINDOW - 1) * 100
    noisy = records(30, ties={(0, 0): [0.05, 0.9, 0.05, 0.9, 0.05, 0.05] * 5})  # two in five at most
    assert alarms(noisy, ties=0.4) == []
    assert alarms(records(20, ties={(0, 0): [0.4]}), ties=0.4) == []  # above, not at


def test_norms_have_no_noise():
    """A ratio to the median of all heads, and the norm itself, count at once."""
    grown = records(6, wq_norm={(0, 1): [2, 2, 2, 6.5]})
    assert alarms(grown, wq_ratio=3) == [Alarm(300, 0, 1, "wq_ratio", 3.25, 3)]
    assert alarms(grown, wq_norm=6) == [Alarm(300, 0, 1, "wq_norm", 6.5, 6)]
    together = records(6, wq_norm={(layer, head): [2, 4, 8] for layer in range(L) for head in range(H)})
    assert alarms(together, wq_ratio=3) == []  # all heads grow alike, as they do early in training
    assert str(alarms(grown, wq_ratio=3)[0]) == "step 300, layer 0, head 1: wq_ratio 3.25 is above monitor_wq_ratio=3"


def test_row_max_is_of_a_layer():
    (alarm,) = alarms(records(9, row_max={(1, 0): [200.0]}), row_max=100)
    assert alarm == Alarm(400, 1, None, "row_max", 200.0, 100) and "layer 1: row_max" in str(alarm)


def test_one_warning_an_episode():
    """Noise around the threshold, and a second signal, are the same episode; after RELEASE it may begin again."""
    around = ([0.45] * 5 + [0.39] * 5) * 3  # so the median is on either side in turn
    assert RELEASE * 0.4 < min(around)
    assert len(alarms(records(30, ties={(0, 0): around}), ties=0.4)) == 1
    assert len(alarms(records(30, wq_norm={(0, 0): [6.5, 5.5] * 15}), wq_norm=6)) == 1
    both = records(30, ties={(0, 0): [0.9]}, wq_norm={(0, 0): [2] * 10 + [50.0]})
    assert [a.signal for a in alarms(both, ties=0.4, wq_ratio=3)] == ["ties"]
    two = records(40, ties={(0, 0): [0.9] * 10 + [0.05] * 10 + [0.9]})
    assert [a.step for a in alarms(two, ties=0.4)] == [400, 2200]
    heads = records(20, ties={(0, 0): [0.9], (1, 1): [0.05] * 5 + [0.8]})
    assert [(a.layer, a.head, a.step) for a in alarms(heads, ties=0.4)] == [(0, 0, 400), (1, 1, 700)]


def test_not_numbers():
    """A norm that is NaN or infinite is above every threshold, and does not end the rule."""
    broken = records(8, wq_norm={(0, 0): [2, math.nan]}, row_max={(1, 1): [math.inf]})
    found = alarms(broken, wq_norm=100, row_max=100)
    assert [(a.step, a.signal, a.value) for a in found] == [(100, "wq_norm", math.inf), (400, "row_max", math.inf)]

    for at in range(H):  # one head among those whose median the others are held against, wherever it stands
        found = alarms(records(1, wq_norm={(0, at): [math.nan], (1, 1): [7.0]}), wq_ratio=3)
        assert [(a.layer, a.head, a.value) for a in found] == [(0, at, math.inf), (1, 1, 3.5)]


def test_zero_norms():
    """Beside heads whose W_Q is 0 no ratio means anything."""
    zero = {(i, j): [0.0] for i in range(L) for j in range(H)}
    for norms in (zero, zero | {(0, 0): [5.0]}):
        assert alarms(records(3, wq_norm=norms), wq_ratio=3) == []


def test_unknown_signal():
    with pytest.raises(ValueError, match=f"tie is no signal; choose from {', '.join(SIGNALS)}"):
        MonitorRule({"tie": 0.4})


def test_every_signal_has_a_threshold_in_the_config():
    thresholds = {name: 0.5 for name in SIGNALS}
    assert Config(**{f"monitor_{name}": value for name, value in thresholds.items()}).monitor_thresholds == thresholds


def test_mean_keys():
    """By head, by the median, where the log has them; no number counts as above."""
    longer = records(20, key_mean={(1, 2): [0.5] * 10 + [9.0]})
    assert alarms(longer, key_mean=8) == [Alarm(1200, 1, 2, "key_mean", 9.0, 8)]
    assert "(median of the last 5 records) is above monitor_key_mean=8" in str(alarms(longer, key_mean=8)[0])
    assert alarms(longer, key_mean=9) == []
    older = [{k: v for k, v in record.items() if "key_mean" not in k} for record in longer]
    assert alarms(older, key_mean=8) == []
    broken = records(8, key_mean={(0, 0): [0.5, math.nan]})
    assert [(a.step, a.value) for a in alarms(broken, key_mean=8)] == [(400, math.inf)]


def test_a_rule_that_goes_on_is_one_that_never_stopped():
    """Rebuilt from the records before, as a resumed run does it."""
    noisy = records(40, ties={(0, 0): [0.1, 0.5, 0.7, 0.2, 0.45, 0.6, 0.3] * 6})
    whole = alarms(noisy, ties=0.4)
    assert whole
    for cut in range(40):
        rule = MonitorRule({"ties": 0.4})
        before = [a for r in noisy[:cut] for a in rule.update(r)]
        again = MonitorRule({"ties": 0.4})
        for r in noisy[:cut]:
            again.update(r)
        assert before + [a for r in noisy[cut:] for a in again.update(r)] == whole


@pytest.mark.parametrize("name", ["flash_bf16", "flash_bf16_delta_dp_p"])
def test_recorded_stable_runs(name):
    """The two runs of results/mini, neither of which failed: the defaults are silent, lower thresholds are not."""
    run = read_metrics(ROOT / "results" / "mini" / f"seed1_{name}.jsonl.xz")
    assert alarms(run, ties=0.4, wq_ratio=3) == []
    assert alarms(run, ties=0.2) and alarms(run, wq_ratio=1.5) and alarms(run, wq_norm=20) and alarms(run, row_max=100)
