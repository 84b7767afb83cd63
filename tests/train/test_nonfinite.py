"""on_nonfinite: what a step does whose loss or gradients are not finite, before they reach the weights."""

import math

import pytest
import torch

import checkpoint
import train

LETTER = dict(attention="flash_bf16", stabilizer="paper", shift_cap=math.inf, eval_interval=100, checkpoint_interval=2)


@pytest.fixture
def poisoned(runner):
    """A checkpoint at step 2 with huge scores in layer 1, head 0, where maxima tie: the paper's rule to the letter,
    m' = 2 rowmax, makes every P of such a row 0 there, and O = 0 / 0."""
    state = runner("source", max_iters=2, attention="flash_bf16", eval_interval=100).state
    weight = state["model"]["transformer.h.1.attn.c_attn.weight"]
    weight[:16] *= 3e4  # W_q of head 0
    weight[32:48] = weight[:16]  # W_k: keys equal queries, so row maxima are positive and large
    path = runner.root / "poisoned.pt"
    torch.save(state, path)
    return path


def test_stop(runner, poisoned):
    """The message names step, layer, head, backend and rule; weights and checkpoint are those before the step."""
    run = runner("run", code=train.EXIT_NONFINITE, init_from=poisoned, **LETTER)
    for words in ("step 2: loss nan, gradient norm nan", "layer 1, head 0, row ", "stabilizer=paper", "cap=inf",
                  "flash_bf16 turned finite inputs into a non-finite output", "Stopped before the update",
                  "last good checkpoint is " + str(run.out / "ckpt_00000002.pt"), "--on_nonfinite=skip",
                  "gradients that are not finite: transformer.wte.weight"):
        assert words in run.stderr
    assert len(run.stderr.splitlines()) == 1 and run.steps == [2]
    assert [r["step"] for r in run.records] == [2] and math.isnan(run.losses[0]) and run.records[0]["stopped"]
    runner.same_state(run.state, checkpoint.load(poisoned))
    healthy = runner("healthy", init_from=poisoned, **LETTER | dict(stabilizer="capped", shift_cap=12))
    assert len(healthy.losses) == 4 and all(map(math.isfinite, healthy.losses))


def test_skip(runner, poisoned):
    """Every step of it is skipped and says so: the weights never change, and the run ends as planned."""
    run = runner("run", init_from=poisoned, on_nonfinite="skip", qk_clip=0, **LETTER)
    assert [r["step"] for r in run.records if r.get("skipped")] == [2, 3, 4, 5]
    assert all(math.isnan(loss) for loss in run.losses) and run.state["step"] == 6
    runner.same_state(run.state | {"step": 2}, checkpoint.load(poisoned))


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_one_bad_step(runner, monkeypatch, policy, what):
    """A step of which one micro-batch goes wrong: training goes on after it as if the step had been left out."""
    original = train.Trainer.gradients

    def gradients(self):
        loss = original(self)
        if self.step == 3:
            next(self.raw.parameters()).grad[5, 5] = math.nan
            loss = loss * math.nan if what == "loss" else loss
        return loss

    monkeypatch.setattr(train.Trainer, "gradients", gradients)
    run = runner("run", code=0 if policy == "skip" else 3, on_nonfinite=policy, checkpoint_interval=1,
                 keep_checkpoints=9)
    if policy == "stop":
        assert "the forward pass is finite, the backward pass is not" in run.stderr and run.steps == [0, 1, 2, 3]
        return
    assert [r["step"] for r in run.records if "skipped" in r] == [3] and run.records[3]["skipped"] is True
    assert len(run.losses) == 6 and math.isfinite(run.losses[5])
    before, after = (checkpoint.load(run.out / f"ckpt_0000000{step}.pt") for step in (3, 4))
    runner.same_state(before, after | {"step": 3})


def test_ignore_never_saves_what_is_broken(runner, monkeypatch):
    """Asked to go on regardless, it does; the healthy checkpoints stay, and the message says that none was written."""
    original = train.Trainer.gradients

    def gradients(self):
        loss = original(self)
        if self.step == 3:
            next(self.raw.parameters()).grad.fill_(math.nan)
        return loss

    monkeypatch.setattr(train.Trainer, "gradients", gradients)
    run = runner("run", on_nonfinite="ignore", checkpoint_interval=1, keep_checkpoints=2)
    assert [math.isfinite(loss) for loss in run.losses] == [True] * 4 + [False] * 2
    assert run.steps == [2, 3] and run.stdout.count("was not written") == 3 and "NaN or infinite" in run.stdout
    assert math.isnan(run.records[-1]["val_loss"])
    monkeypatch.undo()
    runner.same(runner("run", init_from="resume"), runner("whole"))  # from step 3, as if nothing had been


FP16 = dict(dtype="float16", attention="standard", n_layer=1, eval_interval=100, log_interval=1)


@pytest.mark.parametrize("loss_chunk", [0, 24])
def test_float16_overflow_is_a_skipped_step(runner, monkeypatch, loss_chunk):
    """While gradients overflow under the loss scale, steps are skipped and the scale halves; the default policy is no
    obstacle. The scale is part of a checkpoint, so a resume in the middle of that equals the whole run."""
    flags = FP16 | dict(loss_chunk=loss_chunk)
    state = runner("source", max_iters=2, **flags).state
    state["scaler"]["scale"] = 2.0**27
    torch.save(state, runner.root / "scaled.pt")
    whole = runner("whole", init_from=runner.root / "scaled.pt", max_iters=14, **flags)
    skipped = [r["step"] for r in whole.records if "skipped" in r]
    assert skipped == list(range(2, 2 + len(skipped))) and 3 < len(skipped) < 12
    assert whole.state["scaler"]["scale"] == 2.0 ** (27 - len(skipped))
    assert all(math.isfinite(loss) for loss in whole.losses) and whole.losses[-1] < whole.losses[0]
    assert all(math.isfinite(r["grad_norm"]) != ("skipped" in r) for r in whole.records[:12])
    parts = runner.interrupted("parts", monkeypatch, 3, "gradients", init_from=runner.root / "scaled.pt", max_iters=14,
                               **flags)
    assert parts.steps[-1] == 5
    runner.same(runner("parts", init_from="resume", max_iters=14, **flags), whole)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_float16_loss_that_is_not_finite(runner, monkeypatch, policy):
    """No loss scale explains a NaN in the forward pass: the policy decides, and after a skip the scaler goes on."""
    original = train.Trainer.gradients

    def gradients(self):
        loss = original(self)
        if self.step == 2:
            for p in self.raw.parameters():
                p.grad.fill_(math.nan)
            loss = loss * math.nan
        return loss

    monkeypatch.setattr(train.Trainer, "gradients", gradients)
    run = runner("run", code=0 if policy == "skip" else 3, on_nonfinite=policy, **FP16)
    if policy == "skip":
        assert [r["step"] for r in run.records if "skipped" in r] == [2] and len(run.losses) == 6
        assert run.state["scaler"]["scale"] == 2.0**15  # 2^16 once halved
