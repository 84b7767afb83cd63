"""scripts/monitor.py: the rule over finished runs; detections, leads, runaways and false alarms of planted ones."""

import json
from pathlib import Path

import pytest

from config import Config
from diagnostics.probes import as_record
from metrics import read_metrics, to_json
from scripts import monitor

ROOT = Path(__file__).parents[2]


def write(folder: Path, ties: float, at: int, fails: int | None, norm: float = 2.0) -> str:
    """A run of 3000 steps, logged every 10, probed every 100: head 1 of layer 0 ties from step `at` on, and its W_Q
    norm is `norm` times the others' from there; the loss explodes at step `fails`."""
    folder.mkdir()
    lines = []
    for step in range(0, 3000, 10):
        record = {"step": step, "loss": 9.0 if fails is not None and step >= fails else 3.0}
        if step % 100 == 0:
            now = step >= at
            tied, norms = [0.05, ties if now else 0.05, 0.05], [2.0, 2 * norm if now else 2.0, 2.0]
            record |= as_record([[tied], [[1.0] * 3], [norms], [[0.5] * 3], [[0.5] * 3]])
        lines.append(to_json(record))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run.json").write_text(json.dumps({"name": folder.name}))
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    return [write(tmp_path / "early", 0.5, 500, 2000), write(tmp_path / "late", 0.7, 1200, 2000),
            write(tmp_path / "unseen", 0.1, 0, 1500), write(tmp_path / "after", 0.9, 2200, 1500),
            write(tmp_path / "stable", 0.3, 1000, None), write(tmp_path / "away", 0.45, 1000, None, norm=3.5),
            write(tmp_path / "false", 0.5, 1000, None)]


def test_a_warning_at_the_failure_is_none_before_it(runs):
    records = read_metrics(runs[0])
    assert monitor.first_alarm(records, {"ties": 0.4}).step == 700
    assert monitor.first_alarm(records, {"ties": 0.4}, before=701).step == 700
    assert monitor.first_alarm(records, {"ties": 0.4}, before=700) is None


def test_tables(runs, tmp_path, capsys):
    """A failure is seen four records after its loss (the mean of 50 rises by 0.5 with the fifth of 9 instead of 3)."""
    out = tmp_path / "out" / "monitor.json"
    assert monitor.main([*runs, "--ties", "0.25", "0.6", "--wq_ratio", "3", "--wq_norm", "--row_max", "100",
                         "--key_mean", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    rows = {row["name"]: row for row in found["runs"]}
    assert rows["early"] == {"name": "early", "steps": 2991, "step_of_warning": 700, "layer": 0, "head": 1,
                             "signal": "ties", "value": 0.5, "step_of_runaway": None, "step_of_scores": None,
                             "step_of_failure": 2040, "lead": 1340}
    assert rows["unseen"]["step_of_warning"] is None and rows["unseen"]["step_of_failure"] == 1540
    assert rows["after"]["lead"] == 1540 - 2400 < 0
    assert rows["stable"]["step_of_warning"] is None and rows["stable"]["step_of_failure"] is None
    assert rows["away"]["signal"] == "wq_ratio" and rows["away"]["step_of_warning"] == 1000
    assert [name for name, row in rows.items() if row["step_of_runaway"] is not None] == ["away"]
    assert rows["away"]["step_of_runaway"] == 1000
    lines = [tuple(line[key] for key in ("thresholds", "detected", "failed", "median_lead", "runaways_detected",
                                         "only_ran_away", "false_alarms", "neither")) for line in found["thresholds"]]
    assert lines == [(Config().monitor_thresholds, 2, 4, 990, 1, 1, 1, 2), ({"ties": 0.25}, 2, 4, 990, 1, 1, 2, 2),
                     ({"ties": 0.6}, 1, 4, 640, 0, 1, 0, 2), ({"wq_ratio": 3}, 0, 4, None, 1, 1, 0, 2),
                     ({"row_max": 100}, 0, 4, None, 0, 1, 0, 2)]
    text = capsys.readouterr().out
    assert "ties > 0.4, wq_ratio > 3, row_max > 1000 (default)" in text and "ties > 0.6" in text and "2 of 4" in text


def test_a_run_that_logged_nothing_of_a_signal_is_not_counted(runs, tmp_path, capsys):
    """Logs older than a signal: neither a failure that it missed, nor a run that it was rightly silent of."""
    for run in runs[1:]:
        path = Path(run) / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(to_json({k: v for k, v in r.items() if "key_mean" not in k}) + "\n" for r in records))
    out = tmp_path / "monitor.json"
    assert monitor.main([*runs, "--key_mean", "0.4", "0.6", "--json", str(out)]) == 0
    lines = [[line[key] for key in ("detected", "failed", "only_ran_away", "neither")]
             for line in json.loads(out.read_text())["thresholds"] if line["thresholds"].keys() == {"key_mean"}]
    assert lines == [[1, 1, 0, 0], [0, 1, 0, 0]]


def test_recorded_runs(monkeypatch, capsys, tmp_path):
    """results/mini/monitor.json is that of the logs kept there; the failing run is warned of long before, with its
    layer and head, its twin is not."""
    monkeypatch.chdir(ROOT)
    out, folder = tmp_path / "monitor.json", Path("results/mini")
    runs = [str(path) for kept in ("*.xz", "scan/*.xz", "rates/seed*/*.xz") for path in sorted(folder.glob(kept))]
    assert monitor.main([*runs, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found == json.loads((folder / "monitor.json").read_text()), "make it again, by the command in its README"
    rows, line = {row["name"]: row for row in found["runs"]}, found["thresholds"][0]
    (default,) = [line for line in capsys.readouterr().out.splitlines() if "(default)" in line]
    assert default.split("(default)")[1].split() == (
        f"{line['detected']} of {line['failed']} {line['median_lead']:.4g} {line['runaways_detected']} of "
        f"{line['only_ran_away']} {line['false_alarms']} of {line['neither']}").split()
    assert [rows["seed1_b64_flash_bf16"][key] for key in (
        "step_of_warning", "layer", "head", "signal", "step_of_runaway", "step_of_failure")] == [
        3300, 1, 2, "ties", 3800, 8030]
    assert rows["seed1_b64_delta_dp_p"]["step_of_warning"] is None


def test_refused(tmp_path, capsys):
    assert monitor.main([str(tmp_path / "nowhere")]) == 2
    assert "monitor: " in capsys.readouterr().err
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    assert monitor.main([str(folder)]) == 2
    assert f"monitor: {folder} has no probes; record it with --probe_interval=100" in capsys.readouterr().err


@pytest.mark.parametrize("flags, message", [
    (["--ties", "nan"], "monitor_ties=nan must be zero or more"),
    (["--ties", "0.3", "1.5"], "monitor_ties=1.5 is a share of rows"),
    (["--wq_ratio", "-1"], "monitor_wq_ratio=-1.0 must be zero or more"),
    (["--wq_norm", "inf"], "monitor_wq_norm=inf cannot be computed with"),
    (["--row_max", "0"], "--row_max 0: 0 turns monitor_row_max off; leave it out")])
def test_a_threshold_that_training_would_not_take(runs, flags, message, capsys):
    assert monitor.main([runs[0], *flags]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"monitor: {message}") and not said.out


def test_a_run_that_is_given_twice_counts_once(runs, tmp_path, monkeypatch):
    out = tmp_path / "monitor.json"
    monkeypatch.chdir(tmp_path)
    assert monitor.main([*runs, "early", f"{runs[0]}/metrics.jsonl", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert len(found["runs"]) == len(runs) and found["thresholds"][0]["failed"] == 4
