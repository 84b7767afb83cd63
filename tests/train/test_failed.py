"""stop_when_failed: a run that explodes ends where it counts as failed, resumed or not."""

import pytest

import train
from failure import failure_of

FLAGS = dict(max_iters=120, eval_interval=200, checkpoint_interval=30, grad_clip=0)


@pytest.fixture
def exploding(monkeypatch):
    """From step 70 on every update is followed by one that breaks the weights a little more."""
    update = train.Trainer.update

    def broken(self, loss):
        readback = update(self, loss)
        if self.step > 70:
            for p in self.raw.parameters():
                p.data.mul_(1.06)
        return readback

    monkeypatch.setattr(train.Trainer, "update", broken)


def test_a_run_ends_where_it_counts_as_failed(runner, exploding, monkeypatch):
    whole = runner("whole", **FLAGS)
    step = failure_of(whole.records)
    assert 70 < step < 110, "or the test shows nothing"
    run = runner("run", code=train.EXIT_FAILED, stop_when_failed=True, **FLAGS)
    assert run.losses == whole.losses[: step + 1]
    assert f"failed at step {step}" in run.stdout and run.state["step"] == step + 1
    assert run.info["sessions"][-1]["exit_code"] == 4
    runner.interrupted("resumed", monkeypatch, 130, "micro_batch", stop_when_failed=True, **FLAGS)
    resumed = runner("resumed", code=train.EXIT_FAILED, init_from="resume", stop_when_failed=True, **FLAGS)
    runner.same(resumed, run)


def test_a_healthy_run_does_not(runner):
    assert runner("run", stop_when_failed=True, **FLAGS).state["step"] == 120
