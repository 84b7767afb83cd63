"""Two ranks over gloo: the same steps as one rank, interruptions of one rank, and a rank that is lost."""

import json
import os
import re
import socket
import sys
import time

import pytest
import torch
from tiny_runs import ROOT, Run

from replay.order import OrderFile
from scripts import ranks

# What each rank executes: runs of train.py one after the other, each in a process group of its own; a run may send
# this process a signal when a rank begins a micro-batch. Without torchrun, whose own start takes seconds.
SCRIPT = """
import json, os, pathlib, signal, sys, time
import train
folder = pathlib.Path(sys.argv[2])
original, this, read = train.Trainer.micro_batch, {}, []
DDP = train.torch.nn.parallel.DistributedDataParallel
no_sync = DDP.no_sync
DDP.no_sync = lambda self: read.append("no_sync") or no_sync(self)
def micro_batch(self, step, micro):
    if [self.group.rank, step, micro] == this.get("at"):
        os.kill(os.getpid(), this["signal"])
    batch = original(self, step, micro)
    read.append(batch[0])
    return batch
train.Trainer.micro_batch = micro_batch
codes = []
for this in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = this["port"]
    codes.append(train.main(this["argv"][int(os.environ["RANK"])]))
    print("READ", *read, "EXIT", codes[-1], flush=True)
    read.clear()
    print("EXIT", codes[-1], file=sys.stderr, flush=True)
    (folder / f"{this['port']}-{os.environ['RANK']}").touch()  # rank 0 may still save what rank 1 would resume
    while codes[-1] != 1 and len(list(folder.glob(f"{this['port']}-*"))) < 2:
        time.sleep(0.005)
sys.exit(codes[-1])
"""
FLAGS = dict(gradient_accumulation_steps=4, batch_size=1, attention="flash_bf16", output="stochastic", dropout=0.2,
             loss_chunk=24)


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def start(runner, *runs: dict):
    """Both ranks' processes; a run is flags with `name`, and perhaps `signal`, `at` = rank, step, micro-batch, and
    `other`, flags of rank 1."""
    steps = []
    for run in runs:
        flags = {k: v for k, v in run.items() if k not in ("signal", "at", "other")}
        steps.append({"argv": [runner.argv(**flags), runner.argv(**flags | run.get("other", {}))],
                      "signal": run.get("signal"), "at": run.get("at"), "port": free_port()})
    command = [sys.executable, "-c", SCRIPT, json.dumps(steps), str(runner.root)]
    return [runner.start(command, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
            for rank in (0, 1)]


def finish(processes, runner, *names):
    """By run: what rank 0 left and printed; and what each rank read, by run and rank."""
    output = [process.communicate(timeout=60) for process in processes]
    parts = [[re.split(r"EXIT (\d+)\n", text) for text in one] for one in output]
    found, read = [], []
    for i, name in enumerate(names):
        (out, err), (out1, _) = parts
        codes = [int(one[2 * i + 1]) for one in (out, out1)]
        assert codes[0] == codes[1]
        found.append(Run(runner.root / name, codes[0], out[2 * i], err[2 * i]))
        assert out1[2 * i].startswith("READ"), out1[2 * i]  # rank 0 alone prints
        read.append([one[2 * i].split("READ")[1].split() for one in (out, out1)])
    return found, read


def test_two_ranks(runner):
    """One launch, because starting is what takes time.

    Two ranks equal one rank up to the order of the sums over micro-batches: float32, so a few 1e-7 relative in a first
    step and, amplified by Adam, below 1e-4 over six. Within one world size everything is bit-equal.
    """
    order = runner("one", **FLAGS).out / "order.bin"
    processes = start(runner, dict(name="whole", **FLAGS),
                      dict(name="parts", signal=15, at=[1, 3, 1], **FLAGS),
                      dict(name="parts", init_from="resume", **FLAGS),
                      dict(name="replayed", replay=order, **FLAGS),
                      dict(name="refused", gradient_accumulation_steps=3),
                      dict(name="apart", init_from=runner.root / "one" / "ckpt_00000004.pt",
                           other=dict(init_from=runner.root / "one" / "ckpt_00000000.pt"), **FLAGS))
    runs, read = finish(processes, runner, "whole", "parts", "parts", "replayed", "refused", "apart")
    whole, stopped, resumed, replayed, refused, apart = runs
    one = runner.finished("one")
    assert [run.code for run in runs] == [0, 143, 0, 0, 2, 2]

    # SIGTERM reached rank 1 alone, in the middle of step 3's accumulation; both stopped, and both went on.
    assert "stopped by a signal at step 3" in stopped.stdout
    runner.same(resumed, whole)
    assert replayed.records == whole.records

    # The same order, the same dropout masks and stochastic roundings, the same validation sequences (3 batches, so
    # one rank reads two of them), and the mean over all.
    assert len({OrderFile(run.out / "order.bin").sha256() for run in (one, whole, replayed)}) == 1
    for name, tolerance in (("loss", 1e-4), ("grad_norm", 1e-4), ("val_loss", 1e-4), ("tokens", 0)):
        ours, theirs = ([r[name] for r in run.records if name in r] for run in (whole, one))
        assert len(ours) > 2 and ours == pytest.approx(theirs, rel=tolerance)
    assert whole.records[0]["loss"] == pytest.approx(one.records[0]["loss"], rel=3e-7)
    assert whole.records[0]["grad_norm"] == pytest.approx(one.records[0]["grad_norm"], rel=1e-6)
    assert whole.records[0]["val_loss"] == pytest.approx(one.records[0]["val_loss"], rel=1e-7)
    ours, theirs = (torch.cat([w.flatten() for w in run.state["model"].values()]) for run in (whole, one))
    assert (ours - theirs).norm() < 5e-4 * theirs.norm()  # measured: 8e-5
    assert whole.info["world_size"] == 2 and one.info["tokens_per_step"] == whole.info["tokens_per_step"]

    # Micro-step, then rank, as the order file says; and of a rank's two micro-batches only the last one synchronises.
    for rank in (0, 1):
        assert [i for i in read[0][rank] if i != "no_sync"] == [str(i) for i in range(rank, 24, 2)]
        assert read[0][rank].count("no_sync") == 6

    assert "gradient_accumulation_steps=3 " in refused.stderr and " 2 ranks" in refused.stderr
    assert "the ranks disagree: they would start at steps 0 to 4, rank 0 at 4" in apart.stderr
    assert not refused.out.exists() and not apart.out.exists()


@pytest.mark.parametrize("name, number", [("killed", 9), ("frozen", 19)])
def test_lost_rank(runner, name, number):
    """A rank that is killed, or hangs: the other ends with a sentence within the time limit, and nothing is lost."""
    began = time.monotonic()
    processes = start(runner, dict(name="run", signal=number, at=[1, 4, 1], collective_timeout_s=3, **FLAGS))
    _, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 1 and time.monotonic() - began < 40
    assert "another rank ended or did not answer within 3 s, in step 4" in err and "--init_from=resume" in err
    assert "Traceback" not in err
    run = runner.finished("run")
    assert run.steps == [0, 4]
    assert runner("run", init_from="resume", **FLAGS).losses[:4] == [r["loss"] for r in run.records[:4]]


def test_torchrun(runner):
    """The command of the README, on a machine without a GPU; SIGTERM to torchrun stops both ranks and saves. With --,
    since Python 3.11's torchrun would read --monitor as an abbreviation of its own --monitor_interval."""
    argv = runner.argv("run", max_iters=100000, monitor="warn", **FLAGS)
    process = runner.start([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--",
                            os.path.join(ROOT, "train.py"), *argv])
    runner.wait_for_step(process, "run", 5)
    process.terminate()
    run = runner.wait(process, "run")
    assert run.code != 0
    assert run.stdout.count("over 2 rank(s)") == 1 and "monitor: warn on ties > 0.4" in run.stdout
    assert run.steps[-1] == run.records[-1]["step"] + 1 and f"stopped by a signal at step {run.steps[-1]}" in run.stdout


@pytest.fixture
def sbatch(runner, tmp_path):
    """scripts/slurm/train.sbatch on two nodes of one rank, which are this machine: srun's stand-in starts both tasks,
    and ends as it does with the highest of their statuses."""
    (tmp_path / "bin").mkdir()
    for name, text in (("scontrol", "echo 127.0.0.1"),
                       ("srun", 'shift 2; "$@" & "$@"; a=$?; wait $!; b=$?; exit $((a > b ? a : b))')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def submit(name, **flags):
        # Over loopback here; between machines gloo and NCCL find the interface by the host's name.
        job = runner.start(["bash", "scripts/slurm/train.sbatch", "configs/cpu_standard.toml",
                            *runner.argv(name, **flags)], PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
                           PYTHON=sys.executable, SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_ID="7", SLURM_NNODES="2",
                           SLURM_JOB_NODELIST="n[1-2]", SLURM_GPUS_ON_NODE="1", MASTER_PORT=free_port(),
                           GLOO_SOCKET_IFNAME="lo")
        return runner.wait(job, name, timeout=120)
    return submit


def test_two_nodes(runner, sbatch):
    """A run; and one whose gradient is not finite, which both nodes meet: torchrun would end with 1."""
    run = sbatch("run", max_iters=3, **FLAGS)
    assert run.code == 0, run
    assert run.info["world_size"] == 2 and run.stdout.count("over 2 rank(s)") == 1
    assert run.losses == pytest.approx(runner("one", max_iters=3, **FLAGS).losses, rel=1e-4)
    wild = sbatch("wild", learning_rate=1e15, warmup_iters=0, grad_clip=0, max_iters=9, **FLAGS)
    assert wild.code == 3 and "Traceback" not in wild.stderr, wild
    assert wild.stderr.count("train.py: stopped: ") == 1


@pytest.mark.parametrize("argv, words", [([], "nothing is no number of ranks"), (["x"], "x is no number of ranks"),
                                         (["2", "--nnodes=2"], "no CONFIG.toml"),
                                         (["2", "--nnodes=x", "configs/cpu_standard.toml"], "--nnodes=x is no number"),
                                         (["2", "--nnodes=2", "configs/cpu_standard.toml",
                                           "--gradient_accumulation_steps=6"], "not divisible by the 4 ranks")])
def test_what_ranks_refuses(argv, words, capfd, monkeypatch):
    """Before any rank is started, those of all nodes counted."""
    monkeypatch.setattr(ranks.run, "main", lambda command: pytest.fail(f"started {command}"))
    monkeypatch.setattr(ranks.logging, "disable", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "1")  # afterwards as before
    assert ranks.main(argv) == 2
    assert words in capfd.readouterr().err


def test_ranks_have_time_to_save(runner, monkeypatch):
    """After SIGTERM torchrun waits as long as Slurm does, not 30 seconds; a number that is given counts."""
    monkeypatch.setattr(ranks.logging, "disable", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "1")  # afterwards as before
    seen = []
    monkeypatch.setattr(ranks.run, "main", lambda command: seen.append(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))
    for given, wanted in ((None, "300"), ("40", "40")):
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", given or "")
        if given is None:
            monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        assert ranks.main(["1", "configs/cpu_standard.toml", *runner.argv("run")]) == 0
        assert seen.pop() == wanted
