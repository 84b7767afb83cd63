"""A step on a GPU never waits for it, and a checkpoint costs a copy."""

import time

import pytest
import torch
from tiny_runs import Runner, write_corpus

import distributed
from checkpoint import Writer, load
from config import load as load_config
from determinism import set_determinism
from plan import prepare
from stop import StopSignal
from trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FEATURES = {"chunks": dict(loss_chunk=24), "muon, qk_clip": dict(optimizer="muon", qk_clip=1e-3),
            "stochastic": dict(output="stochastic", dropout=0.1)}


@pytest.mark.parametrize("flags", FEATURES.values(), ids=FEATURES)
def test_no_host_synchronisation(tmp_path, monkeypatch, flags):
    """torch raises at any call that would wait for the device."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # other tests may have started CUDA before
    corpus = write_corpus(tmp_path / "data")
    flags = dict(device="cuda", dtype="bfloat16", attention="flash_bf16", n_embd=64) | flags
    config = load_config(Runner(tmp_path, corpus).argv("run", **flags))
    plan = prepare(config)
    set_determinism(config.seed, config.deterministic)
    group = distributed.init(config.device)
    trainer = Trainer(config, plan, group, StopSignal())

    def step():
        trainer.optimizer.set_lr(trainer.step)
        return trainer.update(trainer.gradients())

    for _ in range(3):  # kernels are compiled, and pinned memory is allocated
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        readback = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loss, norm, bad, updated = readback.numbers()
    assert 0 < loss < 10 and norm > 0 and not bad and updated


@pytest.mark.parametrize("accumulation", [1, 4])
def test_cuda_graphs_change_no_bit(tmp_path, monkeypatch, accumulation):
    """compile_mode=reduce-overhead over 30 steps: the losses and weights of compile_mode=default."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    corpus, ends = write_corpus(tmp_path / "data"), []
    for mode in ("default", "reduce-overhead"):
        flags = dict(device="cuda", dtype="bfloat16", attention="flash_bf16", n_embd=64, dropout=0.1, loss_chunk=24,
                     compile=True, compile_mode=mode, gradient_accumulation_steps=accumulation, max_iters=30)
        run = Runner(tmp_path, corpus)(f"{mode}-{accumulation}", **flags)
        ends.append((run.losses, run.state["model"]))
        torch._dynamo.reset()
    assert len(ends[0][0]) == 30 and ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[1][1][name], w) for name, w in ends[0][1].items())


def test_a_checkpoint_costs_a_copy(tmp_path):
    """The size of GPT-2 small's: 1.5 GB. The second save reuses the pinned memory of the first."""
    state = {"model": {f"w{i}": torch.randn(12, 1024, 1024, device="cuda") for i in range(30)}}
    writer, seconds = Writer(), []
    for step in (1, 2):
        writer.settle()
        torch.cuda.synchronize()
        start = time.perf_counter()
        path = writer.save(tmp_path, step, state, keep=1)
        seconds.append(time.perf_counter() - start)
        for w in state["model"].values():
            w.add_(1)  # training goes on
    writer.settle()
    print(f"stalls of {seconds[0]:.2f} and {seconds[1]:.2f} s")
    assert seconds[1] < 0.5
    assert torch.equal(load(path)["model"]["w7"] + 1, state["model"]["w7"].cpu())
