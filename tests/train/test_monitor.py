"""The monitor in training: a planted tie or norm warns with its layer and head, stops, or switches that layer; and what
was switched stays so over resumes, replays, ranks and compilation, bit by bit."""

import functools
import json
import re
import shutil

import pytest
import torch
from test_ranks import finish, start

import checkpoint
import train
from config import Config
from replay.switches import companion, read_switches

D, C = 16, 32  # of TINY
FLAGS = dict(max_iters=12, learning_rate=1e-4, attention="flash_bf16", bias=True, monitor_interval=1,
             monitor_wq_ratio=0, monitor_row_max=0, eval_interval=5)
WARNED, SWITCHED = 4, 6  # five records make a median, and what step 4 shows is known during step 5


@pytest.fixture(scope="module")
def planted(tmp_path_factory, corpus):
    """A checkpoint of step 0 in which all scores of layer 1, head 0 are equal, so that its rows tie, and the others
    are large, so that theirs rarely do."""
    from tiny_runs import Runner

    source = Runner(tmp_path_factory.mktemp("planted"), corpus)("source", max_iters=1, bias=True)
    file = source.out / "ckpt_00000000.pt"
    state = checkpoint.load(file)
    for layer in (0, 1):
        state["model"][f"transformer.h.{layer}.attn.c_attn.weight"][:2 * C] *= 12
    for rows in (slice(0, D), slice(C, C + D)):  # its queries and keys
        state["model"]["transformer.h.1.attn.c_attn.weight"][rows] = 0
        state["model"]["transformer.h.1.attn.c_attn.bias"][rows] = 1
    return checkpoint.save(source.out / "planted", 0, state, 1)


def test_warn(runner, planted):
    """Once, with layer, head, signal, value and threshold; and a run that is watched trains as one that is not."""
    run = runner("run", init_from=planted, monitor="warn", **FLAGS)
    plain = runner("plain", init_from=planted, **FLAGS)
    assert run.stdout.count("monitor: step") == 1
    assert "monitor: step 4, layer 1, head 0: ties 0.9" in run.stdout and "above monitor_ties=0.4" in run.stdout
    warnings = {r["step"]: r["warnings"] for r in run.records if "warnings" in r}
    assert warnings == {WARNED: [{"step": 4, "layer": 1, "head": 0, "signal": "ties", "threshold": 0.4,
                                  "value": pytest.approx(0.97, abs=0.03)}]}
    assert run.losses == plain.losses and not [key for r in plain.records for key in r if "probe" in key]
    assert not companion(run.out / "order.bin").exists() and "switches" not in run.info
    assert run.info["monitor"] == "warn on ties > 0.4, every 1 steps"
    assert f"monitor: {run.info['monitor']}" in run.stdout


def test_warned_by_the_norms(runner, planted):
    """monitor_wq_ratio compares with the median of all heads; a norm has no noise, so one record is enough."""
    flags = FLAGS | dict(monitor_ties=0, monitor_wq_ratio=1.3)
    run = runner("run", init_from=planted, monitor="warn", **flags)
    norms = [run.records[0][f"probe/wq_norm_head/layer{i}"] for i in (0, 1)]
    largest = max((value, layer, head) for layer, heads in enumerate(norms) for head, value in enumerate(heads))
    median = sorted(value for heads in norms for value in heads)
    ratio = largest[0] / ((median[1] + median[2]) / 2)
    flags["monitor_wq_ratio"] = round(ratio, 2) - 0.02
    run = runner("again", init_from=planted, monitor="warn", **flags)
    (first, *_), *_ = [r["warnings"] for r in run.records if "warnings" in r]
    assert (first["step"], first["layer"], first["head"], first["signal"]) == (0, *largest[1:], "wq_ratio")
    assert first["value"] == pytest.approx(ratio)


def test_stop(runner, planted):
    """It ends with a status of its own, saved; resumed it goes on, since this episode has been told."""
    run = runner("run", code=train.EXIT_WARNED, init_from=planted, monitor="stop", **FLAGS)
    assert train.EXIT_WARNED == 5 and run.info["sessions"][-1]["exit_code"] == 5
    assert "stopped by the monitor: step 4, layer 1, head 0: ties" in run.stdout and str(run.out) in run.stdout
    assert run.state["step"] == 5 and [r["step"] for r in run.records] == [0, 1, 2, 3, 4]
    shutil.copytree(run.out, runner.root / "moved")
    resumed = runner("run", init_from="resume", monitor="stop", **FLAGS)
    assert resumed.losses == runner("whole", init_from=planted, **FLAGS).losses
    moved = runner("moved", init_from="resume", monitor="switch", **FLAGS)  # what it was told of moves at once
    assert [(r["step"], r["switched"][0]["layer"]) for r in moved.records if "switched" in r] == [(5, 1)]
    assert moved.losses[:5] == resumed.losses[:5] and moved.losses[5:] != resumed.losses[5:]


def switches(run):
    return [(s.step, s.layer) for s in read_switches(companion(run.out / "order.bin"))]


@pytest.mark.parametrize("attention", ["sdpa", "standard"])
def test_every_backend_is_watched(runner, planted, attention):
    """Ties of whole rows, and W_Q; watching changes nothing here either."""
    flags = dict(init_from=planted) | FLAGS | dict(attention=attention)
    run = runner("run", monitor="warn", **flags)
    (warned,) = [r["warnings"] for r in run.records if "warnings" in r]
    assert [(w["step"], w["layer"], w["head"], w["signal"]) for w in warned] == [(WARNED, 1, 0, "ties")]
    assert run.losses == runner("plain", **flags).losses
    norms = runner("norms", code=train.EXIT_WARNED, monitor="stop", **flags | dict(monitor_ties=0, monitor_wq_ratio=1))
    assert "stopped by the monitor: step 0, " in norms.stdout and ": wq_ratio " in norms.stdout


DEFAULT = Config().monitor_remedy


@pytest.mark.parametrize("attention, remedy, words", [
    ("flash_bf16", DEFAULT, "flash_bf16 .*delta=dp_p"), ("flash_fa2", DEFAULT, "flash_fa2 .*delta=dp_p"),
    ("stabilized", DEFAULT, "stabilized .*delta=dp_p stabilizer=capped"),
    ("sdpa", "flash_fa2+delta=dp_p", "flash_fa2 .*delta=dp_p"),
    ("flash_bf16", "stabilized", "stabilized operands=bf16"), ("flash_bf16", "output=fp32", "output=fp32"),
    ("flash_bf16", "output=stochastic", "output=stochastic"), ("flash_bf16", "standard", r"standard \(")])
def test_switch(runner, planted, attention, remedy, words):
    """The named layer alone moves, from the announced step on; log, header, checkpoint and companion say so."""
    flags = FLAGS | dict(checkpoint_interval=6, attention=attention)
    plain = runner("plain", init_from=planted, **flags)
    run = runner("run", init_from=planted, monitor="switch", monitor_remedy=remedy, **flags)
    assert f"monitor: layer 1 moves to {remedy} from step {SWITCHED} on" in run.stdout
    assert run.losses[:SWITCHED] == plain.losses[:SWITCHED] and run.losses != plain.losses
    told = {r["step"]: r["switched"] for r in run.records if "switched" in r}
    assert list(told) == [SWITCHED] and len(told[SWITCHED]) == 1 and told[SWITCHED][0]["layer"] == 1
    assert re.search(words, told[SWITCHED][0]["attention"])
    assert switches(run) == [(SWITCHED, 1)]
    assert run.state["switches"] == run.info["switches"]
    assert run.info["switches"] == json.loads(companion(run.out / "order.bin").read_text())["switches"]
    # From there on it is the run of that checkpoint in which the layer has the remedy by override.
    override = f"{attention}+{remedy}" if "=" in remedy.split("+")[0] else remedy
    other = runner("other", init_from=run.out / "ckpt_00000006.pt", replay=run.out / "order.bin",
                   attention_override=f"1={override}", **flags)
    assert other.losses == run.losses[SWITCHED:]


def test_standard_layers_stay(runner, planted):
    """delta is rowsum(dP P) there already: the remedy has nothing to move in the layer that is warned of."""
    flags = dict(init_from=planted, attention_override="1=standard") | FLAGS
    run = runner("run", monitor="switch", **flags)
    assert "monitor: step 4, layer 1, head 0: ties" in run.stdout and "moves to" not in run.stdout
    assert run.info["switches"] == switches(run) == [] and run.losses == runner("plain", **flags).losses


@pytest.mark.parametrize("method, call, remedy", [
    *(("gradients", call, remedy) for call in (4, 5, 6, 8) for remedy in (DEFAULT, "output=stochastic")),
    ("micro_batch", 11, "output=stochastic"), ("evaluate", 1, "output=stochastic")])
def test_resumed_equals_uninterrupted(runner, planted, monkeypatch, method, call, remedy):
    """Before the warning, between it and the switch, at the switch and after it; inside steps and evaluations."""
    flags = dict(monitor="switch", monitor_remedy=remedy, dropout=0.1) | FLAGS
    whole = runner("whole", init_from=planted, **flags)
    runner.interrupted("parts", monkeypatch, call, method, init_from=planted, **flags)
    resumed = runner("parts", init_from="resume", **flags)
    runner.same(resumed, whole)
    assert switches(resumed) == switches(whole) == [(SWITCHED, 1)]
    assert resumed.state["switches"] == whole.state["switches"]


def test_more_evaluations_change_nothing(runner, planted):
    """An evaluation or a checkpoint settles a step earlier; the switch waits for its step nevertheless."""
    flags = dict(init_from=planted, monitor="switch") | FLAGS
    few = runner("few", **flags | dict(eval_interval=100, checkpoint_interval=100))
    many = runner("many", **flags | dict(eval_interval=1, checkpoint_interval=1))
    assert few.losses == many.losses and switches(few) == switches(many) == [(SWITCHED, 1)]


def test_rewound(runner, planted):
    """A run that was killed after a switch and goes on from before it decides again, and keeps no switch twice."""
    flags = dict(monitor="switch", checkpoint_interval=3, keep_checkpoints=9) | FLAGS
    whole = runner("whole", init_from=planted, **flags)
    shutil.copytree(whole.out, runner.root / "parts")
    for file in (runner.root / "parts").glob("ckpt_*.pt"):
        if int(file.stem.split("_")[1]) > 3:
            file.unlink()
    resumed = runner("parts", init_from="resume", **flags)
    runner.same(resumed, whole)
    assert switches(resumed) == [(SWITCHED, 1)]


@pytest.mark.parametrize("remedy, words", [(DEFAULT, "flash_bf16 .*delta=dp_p"),
                                           ("stabilized+shift_cap=3", "stabilized .*cap=3")])
def test_replayed(runner, planted, remedy, words):
    """The order and its companion give the same losses without a monitor, or without its measurements."""
    recorded = runner("recorded", init_from=planted, monitor="switch", monitor_remedy=remedy, **FLAGS)
    order = recorded.out / "order.bin"
    replayed = runner("replayed", init_from=planted, replay=order, replay_switches=True, **FLAGS)
    assert replayed.losses == recorded.losses
    runner.same_state(replayed.state, recorded.state)
    assert [r["step"] for r in replayed.records if "switched" in r] == [SWITCHED]
    assert re.search(f"switch: layer 1 from step {SWITCHED} on: {words}", replayed.stdout)
    again = runner("again", init_from=planted, replay=replayed.out / "order.bin", replay_switches=True, **FLAGS)
    assert again.records == replayed.records and switches(again) == switches(recorded)  # a replay has a companion too
    without = runner("without", init_from=planted, replay=order, **FLAGS)
    assert without.losses[:SWITCHED] == recorded.losses[:SWITCHED] and without.losses != recorded.losses
    assert f"switch: 1 of {companion(order)} not replayed; --replay_switches=True does it" in without.stdout
    branch = runner("branch", init_from=recorded.out / "ckpt_00000008.pt", replay=order, replay_switches=True, **FLAGS)
    assert branch.losses == recorded.losses[8:]
    assert "ckpt_00000008.pt not taken over" in branch.stdout


def test_interrupted_replay(runner, planted, monkeypatch):
    recorded = runner("recorded", init_from=planted, monitor="switch", **FLAGS)
    flags = dict(replay=recorded.out / "order.bin", replay_switches=True) | FLAGS
    whole = runner("whole", init_from=planted, **flags)
    for call in (3, 6, 9):
        runner.interrupted(f"parts{call}", monkeypatch, call, "gradients", init_from=planted, **flags)
        resumed = runner(f"parts{call}", init_from="resume", **flags)
        runner.same(resumed, whole)
        assert switches(resumed) == [(SWITCHED, 1)]


def test_compiled(runner, planted, monkeypatch):
    """A compiled model takes the new attention at its step. (Inductor, which takes a minute, sees no attention.)"""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    flags = dict(init_from=planted, monitor="switch", monitor_remedy="output=fp32") | FLAGS | dict(max_iters=8)
    compiled = runner("compiled", compile=True, **flags)
    eager = runner("eager", **flags)
    assert switches(compiled) == switches(eager) == [(SWITCHED, 1)]
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    plain = runner("plain", **flags | dict(monitor="off"), compile=True)
    assert plain.losses[:SWITCHED] == compiled.losses[:SWITCHED] and plain.losses != compiled.losses
    replayed = runner("replayed", replay=compiled.out / "order.bin", replay_switches=True, compile=True,
                      **flags | dict(monitor="off"))
    assert replayed.losses == compiled.losses
    torch.compiler.reset()


def test_two_ranks(runner, planted):
    """Both measure their own sequences, and come to one decision; replayed and resumed bit by bit."""
    flags = FLAGS | dict(gradient_accumulation_steps=4, batch_size=1, init_from=planted, probe_sequences=1)
    flags |= dict(monitor="switch", monitor_remedy="output=stochastic")
    order = runner.root / "whole" / "order.bin"
    replay = flags | dict(monitor="off", replay=order, replay_switches=True)
    processes = start(runner, dict(name="whole", **flags), dict(name="parts", signal=15, at=[1, 5, 1], **flags),
                      dict(name="parts", **flags | dict(init_from="resume")), dict(name="replayed", **replay),
                      dict(name="stopped", **flags | dict(monitor="stop")))
    (whole, _, resumed, replayed, stopped), _ = finish(processes, runner, "whole", "parts", "parts", "replayed",
                                                       "stopped")
    assert [run.code for run in (whole, resumed, replayed, stopped)] == [0, 0, 0, 5]
    assert switches(whole) == [(SWITCHED, 1)] and stopped.state["step"] == 5
    runner.same(resumed, whole)
    assert replayed.losses == whole.losses
    one = runner("one", **flags | dict(gradient_accumulation_steps=2, batch_size=2, probe_sequences=2))
    assert switches(one) == switches(whole)
    probed = [key for key in one.records[0] if key.startswith("probe/")]  # one rank reads both ranks' sequences here
    assert len(probed) == 14
    for key in probed:
        assert whole.records[0][key] == pytest.approx(one.records[0][key], rel=1e-6)
