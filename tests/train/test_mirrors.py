"""wandb beside a run, torch.compile under it, and the run's own account of itself."""

import json
import os
import sys
import types

import pytest
import torch

import train
from config import as_dict, from_file, load
from metrics import to_json
from settings import unread
from tests.train.tiny_runs import ROOT


def fake_wandb(failing: bool):
    """Enough of wandb for mirror.py, noting what it is given; `failing` raises wherever a real one could."""
    notes = types.SimpleNamespace(inits=[], records=[], exits=[])

    class FakeRun:
        def define_metric(self, *args, **kwargs):
            pass

        def log(self, record):
            if failing:
                raise ConnectionError("the service is gone")
            notes.records.append(record)

        def finish(self, exit_code):
            notes.exits.append(exit_code)

    def init(**options):
        notes.inits.append(options)
        return FakeRun()

    module = types.ModuleType("wandb")
    module.init, module.Settings, module.login = init, lambda **options: options, lambda **options: True
    return module, notes


def test_a_resumed_run_continues_its_curve(runner, monkeypatch):
    module, notes = fake_wandb(failing=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    flags = dict(wandb_mode="offline", wandb_group="arms", wandb_run_name="curve")
    runner.interrupted("run", monkeypatch, 3, "gradients", **flags)
    resumed = runner("run", init_from="resume", **flags)
    first, second = notes.inits
    assert first["id"] == second["id"] == resumed.info["run_id"] and second["resume"] == "allow"
    assert first["mode"] == "offline" and first["group"] == "arms" and first["name"] == "curve"
    assert first["config"]["config"]["n_layer"] == 2
    assert json.loads(json.dumps(first["config"], allow_nan=False)) == first["config"]  # plain: no tuple, no infinity
    assert [r["step"] for r in notes.records] == [0, 1, 2, 3, 4, 5, 6] and notes.exits == [143, 0]
    assert [session["exit_code"] for session in resumed.info["sessions"]] == [143, 0]
    runner.same(resumed, runner("whole"))


@pytest.mark.parametrize("how", ["absent", "failing"])
def test_wandb_never_stops_a_run(runner, monkeypatch, how):
    monkeypatch.setitem(sys.modules, "wandb", None if how == "absent" else fake_wandb(failing=True)[0])
    run = runner("run", wandb_mode="offline")
    assert run.stdout.count("wandb failed") == 1 and "training goes on" in run.stdout
    runner.same(run, runner("whole"))


def test_compiled_equals_eager(runner, monkeypatch, tmp_path):
    """The same batches, roundings and probes; attention is opaque to the compiler, the rest is fused in float32.

    Tolerance: fusing reorders sums, 1e-6 relative in the first loss; BF16 attention amplifies it over the steps.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    flags = dict(attention="stabilized", n_layer=1, max_iters=4, eval_interval=2, eval_iters=1, probe_interval=2)
    eager, compiled = runner("eager", **flags), runner("compiled", compile=True, **flags)
    assert (tmp_path / "inductor").is_dir()  # it was compiled
    for name, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3), ("val_loss", 1e-4), ("probe/ties/layer0", 0.02)):
        ours, theirs = ([r[name] for r in run.records if name in r] for run in (compiled, eager))
        assert len(ours) > 1 and ours == pytest.approx(theirs, rel=tolerance)
    assert compiled.records[0]["loss"] == pytest.approx(eager.records[0]["loss"], rel=1e-6)
    assert compiled.state["model"].keys() == eager.state["model"].keys()  # no _orig_mod.
    resumed = runner("more", init_from=compiled.out / "ckpt_00000004.pt", max_iters=6, **{
        key: value for key, value in flags.items() if key != "max_iters"})  # eager goes on from compiled
    assert len(resumed.losses) == 2
    torch._dynamo.reset()


def test_gradients_outlive_a_cuda_graph(runner, monkeypatch):
    """compile_mode reaches the compiler, and a model that puts its gradients in one place at every call, as a CUDA
    graph does, trains as the eager one: over micro-batches they are added up elsewhere."""
    whole, modes, places = runner("whole"), [], {}

    def compile_like_graphs(model, mode):
        modes.append(mode)

        def reuse(grad, name):
            place = places.setdefault((id(model), name), torch.empty_like(grad))
            return place.copy_(grad).detach()

        for name, p in model.named_parameters():
            p.register_hook(lambda grad, name=name: reuse(grad, name))
        return model

    monkeypatch.setattr(torch, "compile", compile_like_graphs)
    runner.same(runner("graphs", compile=True, compile_mode="reduce-overhead"), whole)
    assert modes == ["reduce-overhead"] and places
    assert runner("default", compile=True).losses != whole.losses, "or the stand-in shows nothing"


def test_cuda_graphs_are_for_one_rank(runner, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "compile_mode=reduce-overhead with 2 ranks" in runner.refused("run", compile=True,
                                                                         compile_mode="reduce-overhead")


def test_what_is_set_and_read_by_nothing_is_told(runner):
    """A config file's compile_mode goes with compile=False, for a machine without a compiler; but it is said."""
    said = runner("run", max_iters=1, compile_mode="reduce-overhead", muon_momentum=0.5, monitor_ties=0.3,
                  monitor="warn", monitor_remedy="standard").stdout
    assert (" unread: muon_momentum=0.5 (read with optimizer=muon), compile_mode=reduce-overhead (read with "
            "compile=True), monitor_remedy=standard (read with monitor=switch)\n") in said
    assert "unread" not in runner("whole", max_iters=1).stdout


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/*.toml")), ids=lambda path: path.stem)
def test_no_config_sets_what_it_does_not_read(path):
    assert not unread(as_dict(from_file(path)))


def test_header(runner):
    """What a report needs is printed and in run.json: nothing in it depends on memory."""
    flags = dict(max_iters=2, attention="stabilized", attention_override="1=standard", beta=4, probe_interval=1,
                 loss_chunk=24)
    run = runner("run", **flags)
    info = run.info
    read = as_dict(load(runner.argv("run", **flags)))
    assert info["config"] == json.loads(to_json(read))  # every field, as it was read
    assert info["attention"][0].startswith("stabilized operands=bf16") and "beta=4" in info["attention"][0]
    assert info["attention"][1].startswith("standard") and set(info["kernels"]) == {"emulated", "torch"}
    assert info["tokens_per_step"] == 128 and info["n_params"] > 30_000 and info["world_size"] == 1
    assert len(info["git_commit"]) == 40 and info["versions"]["torch"] == torch.__version__
    assert info["data"]["tokens"] == 20_000 and info["order"]["rows"] == 2 and info["config"]["beta"] == 4
    for words in ("128 tokens", "20,000 tokens", info["data"]["sha256"][:12], info["git_commit"][:12], "emulated",
                  "loss 24 tokens at a time", "not compiled", "layer 0: stabilized",
                  "layer 1: standard", "recorded ", "adamw, decayed", torch.__version__):
        assert words in run.stdout
    record = run.records[1]
    assert {"step", "loss", "lr", "grad_norm", "tokens", "probe/ties/layer0", "probe/wq_norm/layer1"} <= record.keys()
    assert len(record["probe/ties_head/layer0"]) == len(record["probe/wq_norm_head/layer1"]) == 2


def test_determinism_is_set_before_the_device_is_touched(runner, monkeypatch):
    """cuBLAS reads its variable at the first CUDA call, and choosing the device is one."""
    init, seen = train.distributed.init, []
    torch.use_deterministic_algorithms(False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def spy(*args):
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return init(*args)

    monkeypatch.setattr(train.distributed, "init", spy)
    runner("run", max_iters=1)
    assert seen == [(True, ":4096:8")]
