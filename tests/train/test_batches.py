"""Every run of one seed reads the same batches, and every split of a step over micro-batches gives the same step."""

import numpy as np
import pytest
import torch

import checkpoint
import train
from attention import AttentionLayer
from data.loader import draw_offsets, open_tokens
from replay.order import OrderFile
from scripts.compare import compare, table
from scripts.runs import load_runs
from trainer import EVALUATION_DRAW


def digest(run, rows=None):
    return OrderFile(run.out / "order.bin").sha256(rows)


def test_recorded_replayed_and_plain_runs_are_one(runner, monkeypatch):
    """Not only the losses: the token ids that the model reads are the same, in the same order."""
    seen, original = [], train.Trainer.micro_batch

    def spy(self, step, micro):
        index, x, y = original(self, step, micro)
        assert torch.equal(x[:, 1:], y[:, :-1])
        seen.append((index, x.numpy().tobytes()))
        return index, x, y

    monkeypatch.setattr(train.Trainer, "micro_batch", spy)
    flags = dict(dropout=0.1, probe_interval=0)
    runs, batches = [], []
    for name, extra in (("recorded", {}), ("plain", dict(record=False)),
                        ("replayed", dict(replay=runner.root / "recorded" / "order.bin")),
                        ("replayed only", dict(replay=runner.root / "recorded" / "order.bin", record=False))):
        runs.append(runner(name, **flags, **extra))
        batches.append(list(seen))
        seen.clear()
    assert [index for index, _ in batches[0]] == list(range(12)) and len(set(batches[0])) == 12
    for run, batch in zip(runs[1:], batches[1:], strict=True):
        assert batch == batches[0]
        runner.same(run, runs[0])
    assert digest(runs[0]) == digest(runs[2]) == runs[0].info["order"]["sha256"]
    assert [run.info["order"]["mode"] for run in runs] == ["recorded", "drawn", "replayed", "replayed"]
    assert [(run.out / "order.bin").exists() for run in runs] == [True, False, True, False]

    rows, tokens = OrderFile(runs[0].out / "order.bin"), open_tokens(runner.corpus, "train")
    x, _ = tokens.batch(rows.row(2), 32)  # the file alone tells what step 2 read
    assert b"".join(data for index, data in batches[0] if index in (4, 5)) == x.numpy().tobytes()


def test_another_seed_is_another_order(runner):
    assert digest(runner("a", seed=1, max_iters=2)) != digest(runner("b", seed=2, max_iters=2))


def test_another_seed_on_a_recorded_order_is_said(runner):
    """The batches are the same and the weights are not, which the losses do not tell."""
    a = runner("a", seed=1, max_iters=2)
    same, other = (runner(name, seed=seed, max_iters=2, replay=a.out / "order.bin")
                   for name, seed in (("b", 1), ("c", 2)))
    told = ["drawn with seed 1, these weights are of seed 2" in run.stdout for run in (a, same, other)]
    assert told == [False, False, True]
    texts = [table(compare(load_runs([a.out, run.out]))) for run in (same, other)]
    assert ["began with other weights: a with those of seed 1, c with those of seed 2" in text for text in texts] == [
        False, True] and "other weights" not in texts[0]


def test_watching_changes_nothing(runner):
    """Evaluation, probes, logging and checkpoints at any interval: the same losses, gradient norms and weights."""
    flags = dict(dropout=0.2, attention="flash_bf16", output="stochastic")
    quiet = runner("quiet", eval_interval=100, checkpoint_interval=100, **flags)
    busy = runner("busy", eval_interval=1, eval_iters=5, probe_interval=1, checkpoint_interval=1, **flags)
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [r[name] for r in quiet.records[:6]] == [r[name] for r in busy.records[:6]]
    watched = busy.state
    assert set(watched.pop("spectra")) >= {"W_Q", "heads"}
    runner.same_state(quiet.state, watched)
    assert all("probe/ties/layer1" in r and "val_loss" in r for r in busy.records[:6])
    sparse = runner("sparse", log_interval=4, eval_interval=100, checkpoint_interval=100, **flags)
    assert [r["step"] for r in sparse.records] == [0, 4, 5, 6]
    assert sparse.records == [quiet.records[step] for step in (0, 4, 5, 6)]


def test_every_split_of_a_step_is_the_same_step(runner):
    """8 sequences as 8 x 1, 4 x 2, 2 x 4 and 1 x 8, against a gradient computed here on all 8 at once.

    float32: a split changes the order of sums only, so gradients and losses agree to a few rounding errors of theirs.
    """
    flags = dict(max_iters=3, attention="flash_fp32", grad_clip=0, optimizer="adamw", eval_interval=100)
    runs = [runner(f"{n}", gradient_accumulation_steps=n, batch_size=8 // n, **flags) for n in (1, 2, 4, 8)]
    for run in runs[1:]:
        assert digest(run) == digest(runs[0])
        for name in ("loss", "grad_norm"):
            theirs, ours = ([r[name] for r in one.records[:3]] for one in (run, runs[0]))
            assert theirs == pytest.approx(ours, rel=1e-5)  # Adam's first steps amplify what rounding changed
        assert run.records[0]["loss"] == pytest.approx(runs[0].records[0]["loss"], rel=3e-7)
        assert run.records[0]["grad_norm"] == pytest.approx(runs[0].records[0]["grad_norm"], rel=3e-6)

    model = build(runner, gradient_accumulation_steps=8, batch_size=1, **flags)
    model.load_state_dict(checkpoint.load(runs[0].out / "ckpt_00000000.pt")["model"])
    x, y = open_tokens(runner.corpus, "train").batch(OrderFile(runs[0].out / "order.bin").row(0), 32)
    loss = model(x, y)[1]
    loss.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert runs[3].records[0]["loss"] == pytest.approx(loss.item(), rel=3e-7)
    assert runs[3].records[0]["grad_norm"] == pytest.approx(norm.item(), rel=3e-6)


def build(runner, **flags):
    """The model that train.py would train with these flags."""
    from config import load
    from model import GPT
    from plan import prepare

    plan = prepare(load(runner.argv("never made", **flags)))
    return GPT(plan.model_args, [AttentionLayer(spec, i, 0) for i, spec in enumerate(plan.specs)])


def test_clipping_and_schedule_reach_the_optimizer(runner):
    """With an eps of 1, Adam's first steps are close to lr * gradient, so their length shows the clipped norm."""
    flags = dict(eps=1.0, max_iters=2, weight_decay=0)
    free, tight = runner("free", grad_clip=0, **flags), runner("tight", grad_clip=1e-3, **flags)
    start = checkpoint.load(free.out / "ckpt_00000000.pt")["model"]
    moved = [sum((run.state["model"][k] - start[k]).norm().item() ** 2 for k in start if k != "lm_head.weight") ** 0.5
             for run in (free, tight)]
    assert free.records[0]["grad_norm"] == tight.records[0]["grad_norm"] > 0.1  # logged before clipping
    assert [r["lr"] for r in free.records[:2]] == pytest.approx([1e-2 / 3, 2e-2 / 3])
    assert 0.8e-5 < moved[1] <= 1.01e-5 < 1e-3 < moved[0]  # together at most 1e-2 * 1e-3, if they point one way


def test_every_batch_is_rounded_at_random_by_a_draw_of_its_own(runner, monkeypatch):
    """By its number in the whole run, so that no resume repeats one; those of an evaluation are always the same."""
    seen, forward = [], AttentionLayer.forward

    def spy(layer, *args, **options):
        seed, number, draw = layer.rng.tolist()
        seen.append((seed, number, layer.training, draw))
        return forward(layer, *args, **options)

    monkeypatch.setattr(AttentionLayer, "forward", spy)
    runner("run", max_iters=2, eval_iters=2, output="stochastic")
    evaluation = [(False, EVALUATION_DRAW), (False, EVALUATION_DRAW + 1)]
    assert seen == [(1337, layer, *one) for one in (*evaluation, *((True, n) for n in range(4)), *evaluation)
                    for layer in (0, 1)]


def test_tokens_and_validation_loss(runner):
    """tokens counts what training read; val_loss is the mean over eval_iters batches of the validation split."""
    run = runner("run", max_iters=2, eval_iters=3, attention="flash_fp32")
    assert [r.get("tokens") for r in run.records] == [128, 256, None]
    model = build(runner, attention="flash_fp32")
    model.load_state_dict(run.state["model"])
    tokens = open_tokens(runner.corpus, "val")
    offsets = draw_offsets(tokens.n_tokens, 32, 6, 1337, "val", 0)
    with torch.no_grad():
        loss = np.mean([model(*tokens.batch(offsets[i:i + 2], 32))[1].item() for i in (0, 2, 4)])
    assert run.records[-1]["val_loss"] == pytest.approx(loss, rel=1e-6)
