"""A disk that fills up: one sentence, a non-zero exit, and what was saved before stays and can be resumed."""

import contextlib
import errno
import os
import re
import resource

import pytest

import checkpoint
import train
from replay.order import OrderFile


@contextlib.contextmanager
def file_size_limit():
    """Yields a function that lets no file of this process grow past so many bytes, as a quota would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_into_limit(runner, monkeypatch, name, size, step=3, **flags):
    """A run during which, from `step` on, files may have `size(out)` bytes."""
    original = train.Trainer.row

    def row(self, at):
        if at == step and self.step == step:  # not when it is read ahead
            limit(size(runner.root / name))
        return original(self, at)

    with file_size_limit() as limit, monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "row", row)
        return runner(name, code=2, **flags)


def check(run, whole, runner, message):
    assert message in run.stderr and len(run.stderr.splitlines()) == 1
    for file in checkpoint.checkpoints(run.out):
        checkpoint.load(file)
    assert not list(run.out.glob("ckpt*.tmp"))
    runner.same(runner("run", init_from="resume"), whole)


def test_order(runner, monkeypatch):
    """The row of the step comes first: it is refused whole, and the step is not done."""
    run = run_into_limit(runner, monkeypatch, "run", lambda out: (out / "order.bin").stat().st_size + 5)
    assert OrderFile(run.out / "order.bin").rows == 3 and len(run.losses) == 3
    check(run, runner("whole"), runner, "row 3 of ")


def test_checkpoint(runner, monkeypatch):
    """The checkpoint of step 4 does not fit, which the thread that writes it finds while training goes on; nor does one
    of that step. The one of step 0 stays and resumes to the same end."""
    run = run_into_limit(runner, monkeypatch, "run", lambda out: 200_000)
    assert run.steps == [0] and 4 <= len(run.losses) <= 6
    said = re.search(r"ckpt_00000004.pt was not written .* trying once more, at step (\d)", run.stdout)
    assert f"the last good checkpoint is {run.out / 'ckpt_00000000.pt'}" in run.stderr
    check(run, runner("whole"), runner, f"ckpt_0000000{said[1]}.pt was not written (File too large)")


@pytest.mark.parametrize("failing", [2, 3], ids=["on the way", "the last one"])
def test_a_checkpoint_that_fails_once(runner, monkeypatch, failing):
    """It is tried once more, and the run goes on."""
    writes, write = [], checkpoint._write
    settle = checkpoint.Writer.settle

    def full(state, path):
        writes.append(path.name)
        if len(writes) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write", full)
        patch.setattr(checkpoint.Writer, "settle", lambda self, block=True: settle(self))  # this step finds it
        run = runner("run", eval_interval=100)
    assert run.steps == [0, 4, 6] and run.stdout.count("trying once more") == 1, run.stdout
    runner.same(run, runner("whole", eval_interval=100))


def test_checkpoint_on_sigterm(runner, monkeypatch):
    """Even the save after a signal may fail; the exit status then says so."""
    original = train.Trainer.evaluate

    def evaluate(self):
        self.stop.requested = self.step == 3
        limit(200_000 if self.step == 3 else -1)
        return original(self)

    with file_size_limit() as limit, monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "evaluate", evaluate)
        run = runner("run", code=2)
    assert "stopped by a signal" not in run.stdout
    check(run, runner("whole"), runner, "ckpt_00000003.pt was not written")


def test_metrics(runner):
    """The log is the truth, so a run that cannot write it stops at the first record."""
    first = runner("run", max_iters=3, checkpoint_interval=100)
    log = first.out / "metrics.jsonl"
    kept = log.read_bytes()
    log.unlink()
    log.symlink_to("/dev/full")
    run = runner("run", code=2, init_from="resume")
    assert "No space left on device" in run.stderr and "go on with init_from=resume" in run.stderr
    assert run.steps == [0, 3]
    log.unlink()
    log.write_bytes(kept)
    check(run, runner("whole"), runner, "step 3 could not be logged")
