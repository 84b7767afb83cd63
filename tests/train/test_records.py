"""What a run leaves in its folder: every step that says something, one branch, one owner, rows before weights."""

import math
import os
import shutil
import signal
import time

import pytest
import torch

import checkpoint
import steplog
import train
from failure import failure_of
from metrics import Metrics, read_metrics
from replay.order import Recorder


def poison(monkeypatch, *steps):
    """Makes the gradients of these steps NaN; their losses stay finite."""
    original = train.Trainer.gradients

    def gradients(self):
        loss = original(self)
        if self.step in steps:
            next(self.raw.parameters()).grad[0] = math.nan
        return loss

    monkeypatch.setattr(train.Trainer, "gradients", gradients)


def test_a_non_finite_step_is_logged_whatever_the_interval_and_counts_as_failed(runner, monkeypatch):
    poison(monkeypatch, 5)
    run = runner("run", code=train.EXIT_NONFINITE, log_interval=4, eval_interval=50, max_iters=12)
    assert [r["step"] for r in run.records] == [0, 4, 5] and run.records[-1]["stopped"] is True
    assert math.isfinite(run.losses[-1]) and failure_of(run.records) == 5 and failure_of(run.records[:2]) is None
    skipped = runner("skipped", on_nonfinite="skip", log_interval=4, eval_interval=50, max_iters=12)
    assert [r["step"] for r in skipped.records if r.get("skipped")] == [5] and failure_of(skipped.records) is None


def test_a_signal_right_after_a_non_finite_step(runner, monkeypatch):
    """The signal is seen before the step's numbers are read: the step is what ends the run, in one sentence."""
    poison(monkeypatch, 3)
    gradients = train.Trainer.gradients

    def signalled(self):
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return gradients(self)

    monkeypatch.setattr(train.Trainer, "gradients", signalled)
    run = runner("run", code=train.EXIT_NONFINITE, eval_interval=50, checkpoint_interval=50)
    assert len(run.stderr.splitlines()) == 1 and "stopped: step 3: loss" in run.stderr
    assert run.info["sessions"][-1]["exit_code"] == 3 and run.records[-1]["stopped"] is True and run.steps == [0]


def test_every_probe_is_logged(runner):
    run = runner("run", probe_interval=1, log_interval=4, eval_interval=50)
    assert [r["step"] for r in run.records if "probe/ties/layer0" in r] == list(range(6))
    assert [r["step"] for r in run.records if {"probe/norm_W_Q/layer1", "probe/sign_diversity_MLP_up/layer0",
                                               "probe/qk_entropy_head/layer1"} <= r.keys()] == list(range(6))
    # Power iteration, but at step 0, which evaluates: close to the norms that the other probe has exactly.
    for i in range(2):
        for r in run.records[:6]:
            assert max(r[f"probe/wq_norm_head/layer{i}"]) == r[f"probe/wq_norm_head/layer{i}"][
                r[f"probe/wq_norm_head/layer{i}"].index(max(r[f"probe/wq_norm_head/layer{i}"]))]
    assert [r["step"] for r in run.records if {"probe/norm_W_Q/layer1", "probe/sign_diversity_MLP_up/layer0",
                                               "probe/qk_entropy_head/layer1"} <= r.keys()] == list(range(6))
    exact = runner("exact", probe_interval=1, eval_interval=4)
    for i in range(2):  # the weights of checkpoint 4 are those that step 4 probed
        w = checkpoint.load(run.out / "ckpt_00000004.pt")["model"][f"transformer.h.{i}.mlp.c_fc.weight"]
        norm = torch.linalg.matrix_norm(w.double(), 2).item()
        assert exact.records[4][f"probe/norm_MLP_up/layer{i}"] == pytest.approx(norm, rel=1e-6)
        assert norm * 0.98 < run.records[4][f"probe/norm_MLP_up/layer{i}"] <= norm * (1 + 1e-6)


def test_a_rewound_run_shows_one_branch(runner):
    """Ten steps, then from step 4 on another backend, to step 6: nothing of the first branch is left beyond."""
    first = runner("run", max_iters=10, checkpoint_interval=4, eval_interval=50)
    (first.out / "ckpt_00000008.pt").unlink()
    (first.out / "ckpt_00000010.pt").unlink()
    again = runner("run", init_from="resume", attention="standard", max_iters=6, checkpoint_interval=4,
                   eval_interval=50)
    assert [r["step"] for r in again.records] == [0, 1, 2, 3, 4, 5, 6]
    assert len((again.out / "metrics.jsonl").read_text().splitlines()) == 11 + 1 + 3, "nothing is deleted"


def test_one_process_a_folder(runner, tmp_path):
    """A second process is refused before it touches anything, and the first goes on."""
    metrics = Metrics(tmp_path / "run", {}, {})
    metrics.log({"step": 0, "loss": 1.0})
    before = (tmp_path / "run/run.json").read_bytes()
    run = runner("run", code=2, out_dir=tmp_path / "run", init_from="scratch")
    assert "already holds the log of a run" in run.stderr
    (tmp_path / "run/metrics.jsonl").write_bytes(b"")
    run = runner("run", code=2, out_dir=tmp_path / "run", init_from="scratch")
    assert "another process is running in" in run.stderr and (tmp_path / "run/run.json").read_bytes() == before
    metrics.log({"step": 1, "loss": 1.0})
    metrics.close()
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [1]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over(runner, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_publish", lambda *args: time.sleep(0.1) or (_ for _ in ()).throw(
            checkpoint.CheckpointError("disk full")))  # training waits for the first one: nothing may be logged before
        assert "disk full" in runner("run", code=2).stderr
    runner.same(runner("run"), runner("whole"))


def test_rows_are_on_disk_before_the_weights_that_they_led_to(runner, monkeypatch):
    events, sync, publish = [], Recorder.sync, checkpoint._publish
    monkeypatch.setattr(Recorder, "sync", lambda self: events.append(("rows", self.rows)) or sync(self))
    monkeypatch.setattr(checkpoint, "_publish", lambda path, step, *rest: events.append(("weights", step))
                        or publish(path, step, *rest))
    runner("run")
    assert events == [("rows", 0), ("weights", 0), ("rows", 4), ("weights", 4), ("rows", 6), ("weights", 6)]


def test_tokens_per_s_counts_training_alone(runner, monkeypatch):
    """Every step and every pause take a known time; the rate of each record is that of the steps."""
    clock = [0.0]
    monkeypatch.setattr(steplog.time, "perf_counter", lambda: clock[0])

    def takes(name, seconds):
        original = getattr(train.Trainer, name)

        def wrapper(self, *args):
            clock[0] += seconds
            return original(self, *args)

        monkeypatch.setattr(train.Trainer, name, wrapper)

    takes("gradients", 2.0)
    takes("evaluate", 1000.0)
    takes("state", 500.0)
    run = runner("run", checkpoint_interval=2)
    assert [r["tokens_per_s"] for r in read_metrics(run.out) if "loss" in r] == [64.0] * 6


@pytest.fixture
def edited(runner, corpus, tmp_path):
    """A corpus of which one token was changed after meta.json was written."""
    folder = tmp_path / "edited"
    shutil.copytree(corpus, folder)
    raw = bytearray((folder / "train.bin").read_bytes())
    raw[1000] ^= 1
    (folder / "train.bin").write_bytes(raw)
    return folder


def test_a_recorded_order_is_of_the_data_that_its_header_names(runner, edited):
    assert "the tokens changed after they were prepared" in runner.refused("run", dataset=edited)


def test_resume_cannot_leave_the_recorded_order(runner):
    runner("run", max_iters=3)
    run = runner("run", code=2, init_from="resume", record=False)
    assert "holds the order that this run recorded so far" in run.stderr


def test_a_checkpoint_goes_on_in_float16(runner):
    """A remedy that users report: the same weights, another format; the loss scale starts anew."""
    first = runner("first", attention="standard", max_iters=3)
    run = runner("half", init_from=first.out / "ckpt_00000003.pt", attention="standard", dtype="float16")
    assert [r["step"] for r in run.records if "loss" in r] == [3, 4, 5]
