"""A run that was interrupted and resumed equals the run that never stopped, bit by bit; so does a replay."""

import os
import random
import shutil
import signal
import time

import pytest

import checkpoint
import train
from replay.order import OrderFile

FEATURES = {
    "plain": {},
    "dropout": dict(dropout=0.2),
    "muon": dict(optimizer="muon", muon_learning_rate=1e-2),
    "muon by head, qk_clip": dict(optimizer="muon", muon_qkv="head", qk_clip=1e-3),
    "stochastic": dict(attention="flash_bf16", output="stochastic"),
    "stabilized": dict(attention="stabilized", probe_interval=2),
    "not recorded": dict(record=False),
    "bfloat16": dict(dtype="bfloat16", attention="flash_fa2"),
    "no evaluation in between": dict(eval_interval=100),
    "loss in chunks": dict(loss_chunk=24, dtype="bfloat16", attention="standard"),
    "one micro-batch": dict(gradient_accumulation_steps=1, batch_size=4),
}




@pytest.mark.parametrize("flags", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("method, call", [("gradients", 3), ("micro_batch", 5), ("evaluate", 1)])
def test_resumed_equals_uninterrupted(runner, monkeypatch, flags, method, call):
    """SIGTERM before a step, inside an accumulation and inside an evaluation: the last finished step is saved."""
    if method == "evaluate" and flags.get("eval_interval"):
        call = 0  # the one evaluation before the last step
    whole = runner("whole", **flags)
    stopped = runner.interrupted("parts", monkeypatch, call, method, **flags)
    assert stopped.state["step"] == stopped.steps[-1] == len(stopped.losses) < 6
    assert f"stopped by a signal at step {len(stopped.losses)}" in stopped.stdout
    assert "--init_from=resume" in stopped.stdout and not stopped.stderr
    if flags.get("record", True):  # a row is on disk before the weights that it led to
        assert OrderFile(stopped.out / "order.bin").rows >= len(stopped.losses)
    runner.same(runner("parts", init_from="resume", **flags), whole)


def test_ctrl_c(runner, monkeypatch):
    """As SIGTERM, with the exit status of its own; a second one ends the run at once, and run.json says so."""
    stopped = runner.interrupted("run", monkeypatch, 3, "gradients", number=signal.SIGINT)
    assert stopped.code == 130 and stopped.info["sessions"][-1]["exit_code"] == 130 and stopped.steps[-1] == 3
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "update", lambda *_: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])
        runner("run", init_from="resume")
    run = runner.finished("run")
    assert [session["exit_code"] for session in run.info["sessions"]] == [130, 130]
    runner.same(runner("run", init_from="resume"), runner("whole"))


def test_stopped_in_the_last_evaluation(runner, monkeypatch):
    """All steps are done: the checkpoint is the last one, and resuming only evaluates."""
    whole = runner("whole")
    stopped = runner.interrupted("parts", monkeypatch, 2, "evaluate")
    assert stopped.steps[-1] == 6 and "val_loss" not in stopped.records[-1]
    runner.same(runner("parts", init_from="resume"), whole)
    assert runner("parts", init_from="resume").records == whole.records  # and a third time changes nothing


def test_slow_disk(runner, monkeypatch):
    """A checkpoint that is still on its way when the next one, a signal or the end comes is waited for."""
    whole, fsync = runner("whole"), os.fsync
    monkeypatch.setattr(checkpoint.os, "fsync", lambda fd: (time.sleep(0.1), fsync(fd)))
    stopped = runner.interrupted("parts", monkeypatch, 3, "gradients", checkpoint_interval=1, eval_interval=100)
    assert stopped.steps == [1, 2, 3] and stopped.state["step"] == 3
    runner.same_state(runner("parts", init_from="resume").state, whole.state)


def test_interrupted_replay(runner, monkeypatch):
    """A replay goes on with the row of its step, records what it reads, and needs the order file alone."""
    recorded = runner("recorded", seed=5, dropout=0.1)
    flags = dict(replay=recorded.out / "order.bin", seed=6, dropout=0.1)
    whole = runner("whole", **flags)
    stopped = runner.interrupted("parts", monkeypatch, 5, **flags)
    assert stopped.steps[-1] == 2
    resumed = runner("parts", init_from="resume", **flags)
    runner.same(resumed, whole)
    digests = {OrderFile(run.out / "order.bin").sha256() for run in (recorded, whole, resumed)}
    assert len(digests) == 1 and resumed.info["order"]["sha256"] in digests
    assert whole.losses != recorded.losses  # another seed: other weights


def test_resume_can_change_the_chunk_of_the_loss(runner):
    """It is no property of the weights; the losses are those of the whole run up to rounding."""
    runner("run", max_iters=3)
    resumed = runner("run", init_from="resume", loss_chunk=40)
    assert resumed.info["sessions"][1]["changed"]["config"] == {"init_from": "resume", "loss_chunk": 40, "max_iters": 6}
    assert resumed.losses == pytest.approx(runner("whole").losses, rel=1e-5)


def test_resume_can_change_the_backend_and_says_so(runner):
    """One healthy checkpoint, another backend from there on; run.json keeps what changed and when."""
    runner("run", max_iters=3)
    resumed = runner("run", init_from="resume", attention="standard")
    assert resumed.info["config"]["attention"] == "flash_bf16"
    (line,) = [x for x in resumed.stdout.splitlines() if "resumed with other settings than the run began with" in x]
    assert "attention 'flash_bf16' -> 'standard'" in line and "max_iters 3 -> 6" in line and "init_from" not in line
    changed = resumed.info["sessions"][1]["changed"]
    assert changed["config"]["attention"] == "standard" and changed["attention"][0].startswith("standard")
    assert resumed.records[:3] == runner("same", max_iters=3).records[:3]
    assert resumed.losses[3:] != runner("whole").losses[3:]


def test_checkpoint_of_another_run_on_its_order(runner):
    """init_from=FILE.pt with --replay and another --attention: the experiment that this project is for."""
    source = runner("source", checkpoint_interval=2, keep_checkpoints=9)
    file, order = source.out / "ckpt_00000002.pt", source.out / "order.bin"
    same = runner("same", init_from=file, replay=order)
    assert same.records == source.records[2:]
    runner.same_state(same.state, source.state)
    other = runner("other", init_from=file, replay=order, attention="standard")
    assert [r["step"] for r in other.records] == [2, 3, 4, 5, 6]
    assert other.losses[0] == pytest.approx(source.losses[2], rel=0.01) and other.losses != source.losses[2:]
    assert OrderFile(other.out / "order.bin").sha256() == OrderFile(order).sha256()
    assert other.info["start_step"] == 2 and other.info["order"]["mode"] == "replayed"
    assert source.steps == [0, 2, 4, 6] and other.steps == [4, 6]


def test_signals_at_random_moments(runner):
    """SIGTERM and SIGKILL, again and again, until the run is done: it equals the run that nobody touched.

    Whatever the moment, the log and the order hold whole lines, and each name of a checkpoint a whole file.
    """
    flags = dict(max_iters=60, lr_decay_iters=60, checkpoint_interval=7, eval_interval=5, dropout=0.1, n_layer=1)
    whole = runner("whole", **flags)
    draw, codes, init = random.Random(1), [], "scratch"
    for kill in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        process = runner.spawn("parts", init_from=init, **flags)
        done = len(codes) * 10 + draw.randrange(2, 9)
        runner.wait_for_step(process, "parts", done)
        time.sleep(draw.random() * 0.02)
        process.send_signal(kill)
        run = runner.wait(process, "parts")
        codes.append(run.code)
        assert run.code == (143 if kill == signal.SIGTERM else -9), run.stderr
        for file in checkpoint.checkpoints(run.out):
            checkpoint.load(file)
        assert [r["step"] for r in run.records] == list(range(len(run.records)))
        assert OrderFile(run.out / "order.bin").rows >= len(run.losses) - 1
        if kill == signal.SIGTERM:
            assert run.steps[-1] == run.records[-1]["step"] + 1 and "stopped by a signal" in run.stdout
        init = "resume"
    runner.same(runner("parts", init_from="resume", **flags), whole)
    assert OrderFile(whole.out / "order.bin").sha256() == OrderFile(runner.root / "parts" / "order.bin").sha256()
    assert not list((runner.root / "parts").glob("*.tmp"))


def test_corrupt_checkpoints(runner):
    """A damaged newest checkpoint is passed over with a message; with none intact the run is refused."""
    whole = runner("whole", checkpoint_interval=2)
    shutil.copytree(whole.out, runner.root / "parts")
    newest, *older = reversed(checkpoint.checkpoints(runner.root / "parts"))
    raw = bytearray(newest.read_bytes())
    raw[len(raw) // 2] ^= 1
    newest.write_bytes(raw)
    resumed = runner("parts", init_from="resume", checkpoint_interval=2)
    assert f"passed over a damaged checkpoint: {newest}" in resumed.stdout
    assert resumed.info["sessions"][-1]["changed"]["start_step"] == 4
    runner.same(resumed, whole)
    for file in (newest, *older):
        file.write_bytes(file.read_bytes()[:1000])
    refused = runner("parts", code=2, init_from="resume", checkpoint_interval=2)
    assert "no readable checkpoint" in refused.stderr and str(refused.out) in refused.stderr
    refused = runner("new", code=2, init_from=newest)
    assert str(newest) in refused.stderr and not refused.out.exists()
