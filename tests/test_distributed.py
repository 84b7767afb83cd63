"""One process needs no group; two ranks agree; no rank hangs for a dead one; the CPU path never touches CUDA."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distributed

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def under_torchrun(monkeypatch, rank=0, world_size=2, local_size=None):
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": 1, "LOCAL_WORLD_SIZE": local_size or world_size}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def environment(**values) -> dict:
    clean = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | {k: str(v) for k, v in values.items()}


def ranks(script: Path, *args) -> list[subprocess.Popen]:
    """Two ranks without torchrun's agent, which would end the survivor itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [subprocess.Popen([sys.executable, script, *args], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env=environment(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2,
                                             MASTER_ADDR="127.0.0.1", MASTER_PORT=port)) for rank in (0, 1)]


# ---- one process ----

def test_one_process_needs_no_group(capsys):
    group = distributed.init("cpu", 10)
    assert (group.rank, group.local_rank, group.world_size, group.is_main) == (0, 0, 1, True)
    value = torch.tensor([1.5, -2.0])
    for reduce in (group.sum, group.mean, group.max):
        assert torch.equal(reduce(value), value) and reduce(value) is not value
    assert group.any(True) is True and group.any(False) is False
    group.barrier()
    group.print("hello", 1)
    assert capsys.readouterr().out == "hello 1\n" and not dist.is_initialized()
    group.close()
    group.close(failed=True)


def test_cpu_touches_no_cuda_call(monkeypatch):
    def touched(*args, **kwargs):
        raise AssertionError("a CUDA function was called")

    for name in ("is_available", "device_count", "init", "set_device", "current_device", "_lazy_init", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, touched)
    group = distributed.init("cpu", 10)
    group.mean(torch.ones(2))
    group.close()


def test_auto_takes_what_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distributed.init("auto", 10).device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert distributed.init("auto", 10).device == torch.device("cuda", 0)
    assert distributed.init("cuda:1", 10).device == torch.device("cuda", 1) == chosen[-1]


# ---- errors, all before a process group is made ----

@pytest.mark.parametrize("device, gpus, local_size, message", [
    ("cuda", 0, 1, "device=cuda needs a CUDA GPU .* use --device=cpu"),
    ("cuda", 4, 8, "8 ranks on this machine share 4 GPUs; .*--nproc_per_node=4"),
    ("auto", 1, 2, "2 ranks on this machine share 1 GPUs"),
    ("cuda:3", 2, 1, "device=cuda:3 does not exist: PyTorch sees 2 GPUs"),
    ("cuda:0", 2, 2, "device=cuda:0 with 2 ranks"),
    ("cuda:x", 2, 1, "device=cuda:x is unknown"),
    ("gpu", 2, 1, "device=gpu is unknown; choose cpu, cuda"),
])
@pytest.mark.parametrize("rank", [0, 1])
def test_devices_that_do_not_exist(monkeypatch, device, gpus, local_size, message, rank):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if local_size > 1:
        under_torchrun(monkeypatch, rank, local_size)
    with pytest.raises(ValueError, match=message):
        distributed.init(device, 10)
    assert not dist.is_initialized()


def test_half_an_environment_and_a_useless_limit(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="has WORLD_SIZE but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        distributed.init("cpu", 10)
    with pytest.raises(ValueError, match="time limit of collectives is 0 s"):
        distributed.init("cpu", 0)


# ---- two ranks ----

def test_two_ranks_agree_under_torchrun(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("""
import sys, torch, distributed
def touched(*args, **kwargs): raise AssertionError("a CUDA function was called")
for name in ("is_available", "device_count", "init", "set_device", "_lazy_init"): setattr(torch.cuda, name, touched)
group = distributed.init("cpu", 60)
mine = torch.tensor([1.0, 5.0]) if group.rank == 0 else torch.tensor([2.0, -5.0])
kept = mine.clone()
result = [group.sum(mine).tolist(), group.mean(mine).tolist(), group.max(mine).tolist(),
          group.any(group.rank == 1), group.any(False), torch.equal(mine, kept), group.is_main, group.world_size]
group.barrier()
open(f"{sys.argv[1]}/{group.rank}", "w").write(repr(result))
group.print("once")
group.close()
group.close()
""")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script,
                           tmp_path], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("once") == 1 and "destroy_process_group" not in done.stderr
    for rank in (0, 1):
        expected = [[3.0, 0.0], [1.5, 0.0], [2.0, 5.0], True, False, True, rank == 0, 2]
        assert (tmp_path / str(rank)).read_text() == repr(expected)


@pytest.mark.parametrize("how, call", [("dies", "any"), ("dies", "barrier"), ("stops", "any"), ("stops", "mean")])
def test_the_other_rank_ends_with_an_error(tmp_path, how, call):
    """A rank that was killed closes its connections; one that is stuck does not, so the time limit has to act."""
    script = tmp_path / "worker.py"
    script.write_text("""
import sys, torch, distributed
group = distributed.init("cpu", 4)
group.barrier()
print("ready", flush=True)
if group.rank == 1:
    sys.stdin.read() or __import__("time").sleep(100)
failed = True
try:
    {"any": lambda: group.any(False), "barrier": group.barrier,
     "mean": lambda: group.mean(torch.ones(3))}[sys.argv[1]]()
    failed = False
finally:
    group.close(failed)
    print("closed", flush=True)
""")
    survivor, victim = ranks(script, call)
    try:
        assert victim.stdout.readline() == "ready\n"
        victim.send_signal(signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        began = time.monotonic()
        out, err = survivor.communicate(timeout=30)
        assert time.monotonic() - began < 15
        assert survivor.returncode == 1 and "RuntimeError" in err and out.endswith("closed\n")
    finally:
        for process in (survivor, victim):
            process.kill()
            process.communicate()
