"""The local log is complete and strict; wandb, offline, broken or absent, never touches it."""

import gzip
import json
import lzma
import math
import os
import random
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from failure import failure_of, step_of_turn
from metrics import Metrics, MetricsError, read_metrics, read_run, to_json

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {"wandb_log": False, "wandb_mode": "disabled", "wandb_project": "p", "wandb_run_name": "arm",
          "wandb_group": "pair", "wandb_tags": ("one", "two"), "max_iters": 100, "learning_rate": 1e-3}


def strict(text: str):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")
    return json.loads(text, parse_constant=refuse)


def child(script: str, *args, home: Path | None = None) -> subprocess.Popen:
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    env |= {"PYTHONPATH": str(ROOT)} | ({"HOME": str(home)} if home else {})
    return subprocess.Popen([sys.executable, "-c", script, *map(str, args)], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


# ---- metrics.jsonl ----

def test_records_come_back_by_step(tmp_path):
    metrics = Metrics(tmp_path, CONFIG, {"name": "n"})
    records = [{"step": 0, "loss": 10.5, "probe/ties_head/layer0": [1.0, 2.0]},
               {"step": 5, "loss": 9.25, "val_loss": 9.5}]
    for record in records:
        metrics.log(record)
    metrics.close()
    metrics.close()
    assert read_metrics(tmp_path) == records == read_metrics(tmp_path / "metrics.jsonl")


def test_non_finite_values_are_strict_json_and_come_back_as_floats(tmp_path):
    metrics = Metrics(tmp_path, CONFIG, {})
    metrics.log({"step": 1, "loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "list": [math.nan, 1.0]})
    metrics.log({"step": 2, "loss": torch.tensor(math.nan), "a": np.float32(0.5), "b": torch.tensor(3), "c": np.inf})
    metrics.close()
    lines = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == "NaN" and lines[0]["grad_norm"] == "Infinity" and lines[0]["low"] == "-Infinity"
    first, second = read_metrics(tmp_path)
    assert math.isnan(first["loss"]) and first["grad_norm"] == math.inf and first["low"] == -math.inf
    assert math.isnan(first["list"][0]) and first["list"][1] == 1.0
    assert math.isnan(second["loss"]) and (second["a"], second["b"], second["c"]) == (0.5, 3, math.inf)


def test_to_json_takes_what_a_run_header_holds():
    assert strict(to_json({"path": Path("a/b"), "tags": ("x",), 3: None, "shift_cap": math.inf})) == {
        "path": "a/b", "tags": ["x"], "3": None, "shift_cap": "Infinity"}


def test_resumed_run_closes_a_torn_line_and_wins_where_steps_repeat(tmp_path, capsys):
    metrics = Metrics(tmp_path, CONFIG, {})
    for step in range(4):
        metrics.log({"step": step, "loss": 1.0})
    metrics.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert "line 5 is torn" in capsys.readouterr().err
    metrics = Metrics(tmp_path, CONFIG, {})
    for step in (2, 3, 4):
        metrics.log({"step": step, "loss": 2.0})
    metrics.close()
    assert [record["loss"] for record in read_metrics(tmp_path)] == [1.0, 1.0, 2.0, 2.0, 2.0]


def test_what_was_logged_beyond_the_step_that_a_session_resumed_at_is_another_branch(tmp_path):
    for start, steps, loss in ((0, range(6), 1.0), (2, (2, 3), 2.0)):
        metrics = Metrics(tmp_path, CONFIG, {"start_step": start})
        for step in steps:
            metrics.log({"step": step, "loss": loss})
        metrics.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)]


@pytest.mark.parametrize("opener, suffix", [(gzip.open, ".gz"), (lzma.open, ".xz")])
def test_compressed_logs(tmp_path, opener, suffix):
    with opener(tmp_path / f"metrics.jsonl{suffix}", "wt") as file:
        file.write('{"step": 1, "loss": "NaN"}\n')
    for source in (tmp_path, tmp_path / f"metrics.jsonl{suffix}"):
        assert math.isnan(read_metrics(source)[0]["loss"])
    (tmp_path / f"metrics.jsonl{suffix}").write_bytes(b"not compressed")
    with pytest.raises(MetricsError, match="cannot be read"):
        read_metrics(tmp_path)


def test_a_damaged_compressed_log_is_named(tmp_path):
    raw = bytearray(gzip.compress("".join(f'{{"step": {i}}}\n' for i in range(1000)).encode()))
    raw[20] ^= 255
    (tmp_path / "log.jsonl.gz").write_bytes(raw)
    with pytest.raises(MetricsError, match="cannot be read"):
        read_metrics(tmp_path / "log.jsonl.gz")


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(MetricsError, match=r"has no metrics\.jsonl"):
        read_metrics(tmp_path)
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    with pytest.raises(MetricsError, match=r"list\.jsonl: line 1 is no record with a step"):
        read_metrics(tmp_path / "list.jsonl")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(MetricsError, match=r"run\.json is no valid JSON"):
        Metrics(tmp_path, CONFIG, {})


@pytest.mark.parametrize("key, value, what", [
    ("loss", "2.5", "number"), ("loss", None, "number"), ("grad_norm", True, "number"), ("time", {}, "number"),
    ("val_loss", [2.5], "number"), ("probe/ties/layer0", "nan", "number"), ("probe/row_max/layer0", [1.0], "number"),
    ("probe/wq_norm_head/layer0", 1.0, "list of numbers"), ("probe/wq_norm_head/layer0", [], "list of numbers"),
    ("probe/ties_head/layer0", [1.0, "0.5"], "list of numbers"), ("loss", "x" * 999, "number"),
    ("loss", 10**400, "number"), ("step", 10**400, "number"), ("probe/ties_head/layer0", [-10**30], "list of numbers")])
def test_what_is_no_number_where_one_belongs_is_named(tmp_path, key, value, what):
    log = tmp_path / "metrics.jsonl"
    good = {"step": 1, "loss": 2, "probe/row_max/layer0": "Infinity", "probe/ties_head/layer0": ["NaN", 1], "note": "x"}
    log.write_text(f"{json.dumps(good)}\n{json.dumps(good | {'step': 2, key: value})}\n")
    with pytest.raises(MetricsError) as error:
        read_metrics(tmp_path)
    words = f"{log}: line 2 has {key}={value!r:.60}, where a {what} belongs; repair the line, or remove it"
    assert str(error.value) == words


def test_killed_while_logging_tears_the_last_line_at_most(tmp_path):
    script = """
import sys, metrics
log = metrics.Metrics(sys.argv[1], {}, {})
for step in range(int(sys.argv[2]), 10**9):
    log.log({"step": step, "loss": 1.0, "padding": "x" * 2000})
    if step % 100 == 99: print(step, flush=True)
"""
    rng, first = random.Random(0), 0
    for _ in range(3):
        process = child(script, tmp_path, first)
        reported = int(process.stdout.readline())
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate(timeout=30)
        reported = int(([str(reported), *out.split()])[-1])
        steps = [record["step"] for record in read_metrics(tmp_path)]
        assert steps == list(range(len(steps))) and len(steps) > reported
        first = len(steps)
    assert len(read_run(tmp_path)["sessions"]) == 3


def test_full_disk_is_fatal_and_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics = Metrics(tmp_path, CONFIG, {})
    with pytest.raises(MetricsError, match=r"step 7 could not be logged to .*No space left.*init_from=resume"):
        metrics.log({"step": 7, "loss": 1.0})
    metrics.close(1)
    assert read_run(tmp_path)["sessions"][0]["exit_code"] == 1


def test_a_short_write_is_completed(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path, CONFIG, {})
    write = os.write
    monkeypatch.setattr("metrics.os.write", lambda fd, data: write(fd, data[:5]) if len(data) > 9 else write(fd, data))
    metrics.log({"step": 1})
    monkeypatch.undo()
    metrics.close()
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_out_dir_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MetricsError, match=r"cannot be kept in .*file"):
        Metrics(tmp_path / "file", CONFIG, {})


def test_other_ranks_write_nothing(tmp_path):
    metrics = Metrics(tmp_path / "run", CONFIG, {}, enabled=False)
    metrics.log({"step": 1})
    metrics.update_run(order=1)
    metrics.say("nothing")
    metrics.close()
    assert not (tmp_path / "run").exists()


# ---- run.json ----

def test_resume_keeps_the_header_and_tells_what_changed(tmp_path):
    info = {"name": "n", "git_commit": "aaa", "order": {"mode": "recorded", "rows": None}}
    first = Metrics(tmp_path, CONFIG, info)
    first.update_run(order={"mode": "recorded", "rows": 10, "sha256": "ff"})
    first.close(143)
    second = Metrics(tmp_path, CONFIG | {"max_iters": 200}, info | {"git_commit": "bbb"})
    assert second.run_id == first.run_id and len(first.run_id) == 8
    second.close(0)
    run = strict((tmp_path / "run.json").read_text())
    assert run["git_commit"] == "aaa" and run["config"]["max_iters"] == 100 and run["order"]["rows"] == 10
    before, after = run["sessions"]
    assert before["exit_code"] == 143 and "changed" not in before and before["started"] <= before["ended"]
    assert after["changed"] == {"git_commit": "bbb", "config": {"max_iters": 200}, "order": info["order"]}
    assert run["run_id"] == first.run_id and not list(tmp_path.glob("*.tmp"))


def test_a_key_that_the_run_began_without_was_at_its_default(tmp_path, capsys):
    """A run of a commit that did not have it yet goes on with the same settings, or with others."""
    Metrics(tmp_path, CONFIG, {}).close()
    for value, told in ((0.0, ""), (8.0, "monitor_key_mean 0.0 -> 8.0")):
        Metrics(tmp_path, CONFIG | {"max_iters": 200, "monitor_key_mean": value}, {}).close()
        said = capsys.readouterr().out
        assert "max_iters 100 -> 200" in said and told in said and ("monitor_key_mean" in said) == bool(told)


def test_a_header_that_cannot_be_saved_at_the_end_is_a_message(tmp_path, monkeypatch, capsys):
    metrics = Metrics(tmp_path, CONFIG, {})
    monkeypatch.setattr("metrics.os.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left")))
    metrics.close(1)
    assert "run.json could not be written (No space left)" in capsys.readouterr().out


# ---- wandb ----

def test_disabled_imports_neither_wandb_nor_torch(tmp_path):
    out = finish(child("import sys, metrics\nm = metrics.Metrics(sys.argv[1], {}, {}); m.log({'step': 0}); m.close()\n"
                       "print([name for name in ('wandb', 'torch') if name in sys.modules])", tmp_path))
    assert out.strip() == "[]"


class FakeRun:
    def __init__(self, broken):
        self.broken, self.logged, self.finished = broken, [], None

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, record):
        if self.broken == "log":
            raise RuntimeError("connection\nlost")
        self.logged.append(record)

    def finish(self, exit_code):
        if self.broken == "finish":
            raise RuntimeError("no network")
        self.finished = exit_code


def fake_wandb(monkeypatch, broken="", key=True):
    run, asked = FakeRun(broken), {}

    def init(**options):
        if broken == "init":
            raise RuntimeError("no server")
        asked.update(options)
        return run

    module = types.SimpleNamespace(init=init, login=lambda verify, prompt: key, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "wandb", None if broken == "import" else module)
    return run, asked


@pytest.mark.parametrize("broken, reason", [("import", "ModuleNotFoundError|ImportError"), ("init", "no server"),
                                            ("log", "connection lost"), ("finish", "no network")])
def test_wandb_that_breaks_is_one_message(tmp_path, monkeypatch, capsys, broken, reason):
    fake_wandb(monkeypatch, broken)
    metrics = Metrics(tmp_path, CONFIG | {"wandb_mode": "online"}, {})
    for step in range(3):
        metrics.log({"step": step, "loss": 1.0})
    metrics.close()
    out = capsys.readouterr().out
    assert out.count("wandb failed") == 1 and any(word in out for word in reason.split("|"))
    assert out.count("\n") == 1 and len(read_metrics(tmp_path)) == 3


def test_wandb_gets_group_tags_and_the_kept_id(tmp_path, monkeypatch):
    for session in range(2):
        run, asked = fake_wandb(monkeypatch)
        metrics = Metrics(tmp_path, CONFIG | {"wandb_log": True}, {"name": "n"})
        metrics.log({"step": 3, "loss": math.nan})
        metrics.close(session)
        assert asked["mode"] == "online" and asked["resume"] == "allow"  # wandb_log alone means online
        assert asked["id"] == read_run(tmp_path)["run_id"]
        assert (asked["project"], asked["name"], asked["group"], asked["tags"]) == ("p", "arm", "pair", ["one", "two"])
        assert asked["config"]["config"]["learning_rate"] == 1e-3
        assert math.isnan(run.logged[0]["loss"]) and run.logged[0]["step"] == 3 and run.finished == session


def test_online_without_a_key_says_what_to_do(tmp_path):
    pytest.importorskip("wandb", reason="wandb is optional")
    out = finish(child("import sys, metrics\nm = metrics.Metrics(sys.argv[1], {'wandb_mode': 'online'}, {})\n"
                       "m.log({'step': 0}); m.close()", tmp_path / "run", home=tmp_path))
    assert "wandb has no API key" in out and "WANDB_API_KEY" in out and out.count("\n") == 1
    assert read_metrics(tmp_path / "run") == [{"step": 0}]


def test_offline_run_is_written_and_continued_under_one_id(tmp_path):
    pytest.importorskip("wandb", reason="wandb is optional")
    script = """
import sys, metrics
m = metrics.Metrics(sys.argv[1], {"wandb_mode": "offline", "wandb_project": "p", "wandb_tags": ("t",)}, {})
for step in range(*map(int, sys.argv[2:])):
    m.log({"step": step, "loss": 1 / (step + 1)})
m.close(0)
"""
    for first, last in ((0, 4), (2, 6)):  # the resumed run repeats steps 2 and 3
        finish(child(script, tmp_path / "run", first, last, home=tmp_path))
    run_id = read_run(tmp_path / "run")["run_id"]
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(folder.name.endswith(run_id) for folder in folders)
    for folder, steps in zip(folders, ((0, 1, 2, 3), (2, 3, 4, 5)), strict=True):
        lines = subprocess.run([Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", folder],
                               capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        history = [line["history"]["item"] for line in map(json.loads, lines) if line["type"] == "history"]
        assert [(item["step"], item["loss"]) for item in history] == [(step, 1 / (step + 1)) for step in steps]


# ---- the rule of failure ----

def step_of_failure(steps, losses):
    return failure_of([{"step": step, "loss": loss} for step, loss in zip(steps, losses, strict=True)])


def test_failure_is_the_first_non_finite_loss():
    assert step_of_failure([0, 10, 20], [3.0, math.nan, math.inf]) == 10
    assert step_of_failure([0, 10, 20], [3.0, 2.0, math.inf]) == 20
    assert step_of_failure([], []) is None


def test_a_run_that_stopped_at_a_gradient_that_is_not_finite_failed_there():
    """Its loss may still be finite. A step that was left out for it, and records without a loss, end nothing."""
    records = [{"step": 0, "val_loss": 3.0}, {"step": 1, "loss": 3.0, "skipped": True}, {"step": 2, "loss": 3.0}]
    assert failure_of(records) is None
    assert failure_of([*records, {"step": 3, "loss": 3.0, "grad_norm": math.nan, "stopped": True}]) == 3


def test_failure_is_a_rise_of_the_running_mean_by_more_than_half_a_nat():
    # Each loss of 5.5 after 50 of 3.0 raises the mean by 2.5 / 50 = 0.05: 0.5 after ten, more than 0.5 after eleven.
    losses = [3.0] * 50 + [5.5] * 20
    assert step_of_failure(range(0, 700, 10), losses) == 600
    assert step_of_failure(range(60), losses[:60]) is None
    # The minimum is of all earlier windows: a slow climb counts.
    slow = [4 - i / 100 for i in range(200)] + [2 + i / 1000 for i in range(800)]
    means = [sum(slow[i - 49:i + 1]) / 50 for i in range(49, 1000)]
    expected = next(i for i in range(951) if means[i] > min(means[:i + 1]) + 0.5) + 49
    assert step_of_failure(range(1000), slow) == expected > 600
    # One outlier, a falling curve and a short run are no failures.
    assert step_of_failure(range(200), [3.0] * 100 + [20.0] + [3.0] * 99) is None
    assert step_of_failure(range(1000), [11 / (1 + i / 50) for i in range(1000)]) is None
    assert step_of_failure(range(49), [3.0] * 20 + [9.0] * 29) is None


def test_a_run_turns_at_the_smallest_of_the_rules_means():
    """The first of equal ones; a window with a loss that is not finite has none; without a mean, the last step."""
    assert step_of_turn(range(0, 600, 10), [3.0] * 50 + [2.0] + [9.0] * 9) == 500
    assert step_of_turn(range(60), [3.0] * 60) == 49
    for bad in (math.nan, math.inf):
        assert step_of_turn(range(120), [3.0] * 50 + [2.0] * 9 + [bad] + [1.0] * 20 + [9.0] * 40) == 58
    assert step_of_turn(range(49), [3.0] * 49) == 48


def test_a_run_that_does_not_exist_has_no_header_whatever_was_kept_beside_it(tmp_path):
    (tmp_path / "arm.run.json").write_text('{"config": {}}')
    (tmp_path / "run.json").write_text('{"config": {}}')
    assert read_run(tmp_path / "arm") == {} and read_run(tmp_path / "arm.jsonl.xz") == {"config": {}}
