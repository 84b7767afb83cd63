"""Checkpoints survive kills, full disks and flipped bits, and a resumed optimizer continues bit for bit."""

import errno
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from pathlib import Path

import pytest
import torch

import checkpoint
from checkpoint import CheckpointError, Writer, checkpoints, latest, load, load_latest, save, strip_prefixes

ROOT = Path(__file__).resolve().parents[1]


def state_of(step: int, size: int = 64) -> dict:
    generator = torch.Generator().manual_seed(step)
    return {"model": {"w": torch.randn(size, size, generator=generator)}, "value": step}


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def start(script: str, *args) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", script, *map(str, args)], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


# ---- round trip ----

def test_every_kind_of_value_comes_back(tmp_path):
    shared = torch.randn(3, 4)
    state = {"model": OrderedDict(wte=shared, head=shared, half=torch.randn(5).bfloat16(), count=torch.tensor(7)),
             "optimizer": {"state": {0: {"m": torch.zeros(0), "mask": torch.tensor([True, False])}},
                           "param_groups": [{"betas": (0.9, 0.95), "lr": 1e-3, "foreach": None, "params": [0, 1]}]},
             "rng": torch.get_rng_state(), "config": {"tags": ["a"], "bias": False}, "best": float("inf"),
             "raw": b"\x00\xff", "dtype": torch.bfloat16, "shape": torch.Size([2, 3])}
    path = save(tmp_path, 12, state, keep=1)
    assert path == tmp_path / "ckpt_00000012.pt"
    loaded = load(path)
    assert equal(loaded, {"step": 12, **state})
    assert loaded["model"]["wte"].data_ptr() == loaded["model"]["head"].data_ptr()  # tied stays tied


def test_live_tensors_are_read_before_save_returns(tmp_path):
    weights = torch.ones(1000)
    path = save(tmp_path, 1, {"w": weights}, keep=1)
    weights.zero_()
    assert torch.equal(load(path)["w"], torch.ones(1000))


def test_resumed_training_continues_bit_for_bit(tmp_path):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def advance(model, optimizer, first, last):
        losses = []
        for step in range(first, last):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = build()
    advance(model, optimizer, 0, 10)
    save(tmp_path, 10, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, keep=1)
    uninterrupted = advance(model, optimizer, 10, 20)

    resumed, its_optimizer = build()
    state = load_latest(tmp_path)
    resumed.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    assert advance(resumed, its_optimizer, state["step"], 20) == uninterrupted
    assert equal(dict(resumed.state_dict()), dict(model.state_dict()))


# ---- the ring ----

def test_ring_keeps_the_newest(tmp_path):
    for step in (0, 5, 999, 100_000_000):
        save(tmp_path, step, state_of(step), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["ckpt_00000999.pt", "ckpt_100000000.pt"]
    assert latest(tmp_path).name == "ckpt_100000000.pt"
    assert checkpoints(tmp_path / "absent") == [] and latest(tmp_path / "absent") is None
    with pytest.raises(ValueError, match="keep_checkpoints=0"):
        save(tmp_path, 1, state_of(1), keep=0)


def test_a_smaller_ring_loses_none_of_what_was_there_at_once(tmp_path):
    """A run resumed without the flag that kept many checkpoints: two go for each that comes, until `keep` are left."""
    for step in range(6):
        save(tmp_path, step, state_of(step), keep=9)
    for step, left in ((6, [2, 3, 4, 5, 6]), (7, [4, 5, 6, 7]), (8, [6, 7, 8]), (9, [8, 9]), (10, [9, 10])):
        save(tmp_path, step, state_of(step), keep=2)
        assert [load(path)["step"] for path in checkpoints(tmp_path)] == left


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 3, {"value": 1}, keep=2)
    save(tmp_path, 3, {"value": 2}, keep=2)
    assert len(checkpoints(tmp_path)) == 1 and load_latest(tmp_path)["value"] == 2


def test_rewound_run_does_not_lose_its_checkpoint_nor_the_other_branch(tmp_path, capsys):
    for step in (10, 20, 30):
        save(tmp_path, step, state_of(step), keep=3)
    save(tmp_path, 15, state_of(15), keep=2)  # resumed from step 10, by hand or because 20 and 30 were damaged
    assert [path.name for path in checkpoints(tmp_path)] == ["ckpt_00000010.pt", "ckpt_00000015.pt"]
    assert load_latest(tmp_path)["value"] == 15
    assert torch.equal(load(tmp_path / "ckpt_00000030.pt.stale")["model"]["w"], state_of(30)["model"]["w"])
    assert "ckpt_00000020.pt.stale" in capsys.readouterr().out


# ---- what is refused ----

@pytest.mark.parametrize("save", [save, Writer().save])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_never_rotate_healthy_ones_out(tmp_path, bad, save):
    healthy = checkpoint.save(tmp_path, 1, state_of(1), keep=1)
    broken = state_of(2)
    broken["model"]["w"][3, 5] = bad
    with pytest.raises(CheckpointError, match=r"1 of the 4096 values of model\.w .*" + re.escape(str(healthy))):
        save(tmp_path, 2, broken, keep=1)
    assert os.listdir(tmp_path) == [healthy.name]


@pytest.mark.parametrize("save", [save, Writer().save])
@pytest.mark.parametrize("value", [Path("x"), {1, 2}, defaultdict(int), lambda: 0])
def test_what_a_safe_load_would_refuse_is_not_saved(tmp_path, value, save):
    with pytest.raises(CheckpointError, match=rf"config\.odd is a {type(value).__name__}"):
        save(tmp_path, 1, {"config": {"odd": value}}, keep=1)
    assert os.listdir(tmp_path) == []


def test_loading_never_runs_code_from_the_file(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"model": Trap()}, tmp_path / "ckpt_00000001.pt")
    with pytest.raises(CheckpointError, match=r"ckpt_00000001\.pt cannot be loaded .*; there is no older good one"):
        load(tmp_path / "ckpt_00000001.pt")
    (tmp_path / "ckpt_00000002.pt").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        load(tmp_path / "ckpt_00000002.pt")
    assert not (tmp_path / "sprung").exists()


# ---- damage ----

def test_every_flipped_bit_is_detected_or_harmless(tmp_path):
    reference = {"step": 9, **state_of(9)}
    path = save(tmp_path, 9, state_of(9), keep=1)
    raw, rng, detected = path.read_bytes(), random.Random(0), 0
    for _ in range(1000):
        damaged = bytearray(raw)
        damaged[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert equal(load(path), reference)
        except CheckpointError:
            detected += 1
    assert detected > 900  # the rest hit padding and time stamps


def test_a_flipped_bit_in_the_weights_passes_torch_but_not_us(tmp_path):
    path = save(tmp_path, 1, {"w": torch.ones(4096)}, keep=1)
    raw = bytearray(path.read_bytes())
    raw[raw.index(torch.ones(4096).numpy().tobytes()) + 2] ^= 1
    path.write_bytes(raw)
    assert not torch.equal(torch.load(path, weights_only=True)["w"], torch.ones(4096))
    with pytest.raises(CheckpointError, match="checksum"):
        load(path)


def test_fallback_over_damaged_files_says_so(tmp_path, capsys):
    for step in (1, 2, 3):
        path = save(tmp_path, step, state_of(step), keep=3)
    path.write_bytes(path.read_bytes()[:-1000])  # step 3: torn
    second = tmp_path / "ckpt_00000002.pt"
    second.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"ckpt_00000003\.pt is damaged .*older good one is .*ckpt_00000001\.pt"):
        load(path)
    assert load_latest(tmp_path)["value"] == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and "ckpt_00000003.pt" in said[0] and "ckpt_00000002.pt" in said[1]
    (tmp_path / "ckpt_00000001.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
        load_latest(tmp_path)


def test_nothing_to_load(tmp_path):
    with pytest.raises(CheckpointError, match="init_from=scratch"):
        load_latest(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "ckpt_00000001.pt")


# ---- disks and kills ----

def test_full_disk_keeps_the_last_good_one(tmp_path):
    script = """
import resource, sys, torch, checkpoint
checkpoint.save(sys.argv[1], 1, {"w": torch.zeros(1000)}, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # a write past it fails as on a full disk
try:
    checkpoint.save(sys.argv[1], 2, {"w": torch.zeros(1_000_000)}, 2)
except checkpoint.CheckpointError as error:
    print(error)
"""
    child = start(script, tmp_path)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    good = tmp_path / "ckpt_00000001.pt"
    assert out.strip() == (f"{tmp_path}/ckpt_00000002.pt was not written ({os.strerror(errno.EFBIG)}); "
                           f"the last good checkpoint is {good}")
    assert os.listdir(tmp_path) == [good.name] and torch.equal(load(good)["w"], torch.zeros(1000))


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failure_of_each_call_leaves_the_folder_as_it_was(tmp_path, monkeypatch, call):
    good = save(tmp_path, 1, state_of(1), keep=1)

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.os, call, fail)
    with pytest.raises(CheckpointError, match=f"No space left on device.*{re.escape(str(good))}"):
        save(tmp_path, 2, state_of(2), keep=1)
    assert os.listdir(tmp_path) == [good.name]


def test_out_dir_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/run/ckpt_00000001\.pt was not written .*no earlier one"):
        save(tmp_path / "file" / "run", 1, state_of(1), keep=1)


def test_killed_at_random_moments(tmp_path):
    """After each SIGKILL the newest checkpoint is whole, at least as new as the last save that had finished."""
    script = """
import sys, torch, checkpoint
step = checkpoint.load_latest(sys.argv[1])["step"] if checkpoint.latest(sys.argv[1]) else 0
writer, w = checkpoint.Writer(), torch.zeros(300_000)
while True:
    step += 1
    writer.save(sys.argv[1], step, {"w": w.fill_(step), "value": step}, 2)
    print(step - 1, flush=True)  # writer.save waited for that one
"""
    rng, newest = random.Random(0), 0
    for kill in range(5):
        child = start(script, tmp_path)
        first = int(child.stdout.readline())
        assert first >= newest and not list(tmp_path.glob("*.tmp"))[1:]  # the leftover is gone, one may be under way
        time.sleep(rng.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        out, _ = child.communicate(timeout=30)
        reported = int(([str(first), *out.split()])[-1])
        state = load(latest(tmp_path))
        assert state["step"] == state["value"] >= reported
        assert torch.equal(state["w"], torch.full((300_000,), float(state["step"])))
        assert len(checkpoints(tmp_path)) <= 3 + kill  # one may come between a save's rename and its removals
        newest = state["step"]
    (tmp_path / "ckpt_00000007.pt.tmp").write_bytes(b"torn")
    save(tmp_path, newest + 1, state_of(1), keep=2)
    assert not list(tmp_path.glob("*.tmp"))


# ---- in the background ----

@pytest.fixture
def slow_disk(monkeypatch):
    """An event that fsync waits for."""
    event, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(checkpoint.os, "fsync", lambda fd: (event.wait(30), fsync(fd)))
    yield event
    event.set()


def test_training_goes_on_while_the_thread_writes(tmp_path, slow_disk):
    """What is written is the state at the call, though the weights change meanwhile, and tied weights stay tied."""
    writer, weights = Writer(), torch.ones(1000)
    path = writer.save(tmp_path, 1, {"model": OrderedDict(wte=weights, head=weights), "value": [1, (2.0, "x")]}, 1)
    weights.zero_()
    writer.settle(block=False)
    assert path == tmp_path / "ckpt_00000001.pt" and not path.exists()  # fsync waits
    slow_disk.set()
    writer.settle()
    loaded = load(path)
    assert torch.equal(loaded["model"]["wte"], torch.ones(1000)) and loaded["value"] == [1, (2.0, "x")]
    assert loaded["model"]["wte"].data_ptr() == loaded["model"]["head"].data_ptr()


def test_one_save_at_a_time_into_the_same_memory(tmp_path, monkeypatch):
    """A save waits for the one before it, and for nothing of its own."""
    writer, gates, publish = Writer(), {step: threading.Event() for step in range(4)}, checkpoint._publish
    monkeypatch.setattr(checkpoint, "_publish", lambda path, step, *rest: (gates[step].wait(30),
                                                                           publish(path, step, *rest)))
    for step in (1, 2, 3):
        timer = threading.Timer(0.05, gates[step - 1].set)
        timer.start()
        writer.save(tmp_path, step, state_of(step), keep=9)
        assert [path.name for path in checkpoints(tmp_path)] == [f"ckpt_{i:08d}.pt" for i in range(1, step)]
        memory = {id(buffer) for buffer in writer._buffers.values()}
        timer.join()
    assert len(memory) == 1
    gates[3].set()
    writer.settle()
    for step in (1, 2, 3):
        assert equal(load(tmp_path / f"ckpt_{step:08d}.pt"), {"step": step, **state_of(step)})


@pytest.mark.parametrize("end", ["settle", "save", "not blocking"])
def test_a_disk_that_fails_in_the_thread_is_told_once(tmp_path, monkeypatch, end):
    good, writer = save(tmp_path, 1, state_of(1), keep=1), Writer()

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "write", fail)
        writer.save(tmp_path, 2, state_of(2), keep=1)
        writer.wait()
    with pytest.raises(CheckpointError, match=rf"00000002\.pt was not written \(No space .*{re.escape(str(good))}"):
        if end == "save":
            writer.save(tmp_path, 3, state_of(3), keep=1)
        else:
            writer.settle(block=end == "settle")
    assert os.listdir(tmp_path) == [good.name]
    writer.settle()
    writer.save(tmp_path, 3, state_of(3), keep=1)  # there is room again
    writer.settle()
    assert os.listdir(tmp_path) == ["ckpt_00000003.pt"]


@pytest.mark.parametrize("last", ["", "raise SystemExit(3)", "1 / 0"])
def test_a_process_that_ends_waits_for_the_thread(tmp_path, last):
    script = f"""
import os, sys, time, torch, checkpoint
write = os.write
os.write = lambda fd, data: (time.sleep(0.01), write(fd, data))[1]
checkpoint.Writer().save(sys.argv[1], 1, {{"w": torch.ones(1_000_000)}}, 1)
assert checkpoint.latest(sys.argv[1]) is None
{last}
"""
    child = start(script, tmp_path)
    child.communicate(timeout=60)
    assert child.returncode == {"": 0, "1 / 0": 1}.get(last, 3)
    assert torch.equal(load_latest(tmp_path)["w"], torch.ones(1_000_000))


# ---- names ----

def test_strip_prefixes_of_compiled_and_ddp_models():
    model = torch.nn.ModuleDict({"block": torch.nn.Linear(2, 2)})
    plain = set(model.state_dict())
    assert set(strip_prefixes(torch.compile(model).state_dict())) == plain
    wrapped = torch.nn.ModuleDict({"module": torch.compile(model)})  # as DDP names it
    assert set(strip_prefixes(wrapped.state_dict())) == plain
    inner = torch.nn.ModuleDict({"block": torch.compile(model["block"])})
    assert set(strip_prefixes(inner.state_dict())) == plain
    assert set(strip_prefixes(model.state_dict())) == plain
    assert list(strip_prefixes({"a.module.w": 1})) == ["a.module.w"]  # only DDP's leading one
    with pytest.raises(ValueError, match=r"two entries .* called a once"):
        strip_prefixes({"module.a": 1, "_orig_mod.a": 2})


def test_a_system_that_writes_in_parts(tmp_path, monkeypatch):
    """One call to the system writes 2 GiB at most, and may write less: the rest follows, or the file would be cut."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, memoryview(data)[:1000]))
    path = save(tmp_path, 1, {"w": torch.arange(5000.0)}, 1)
    monkeypatch.undo()
    assert path.stat().st_size > 20_000 and torch.equal(load(path)["w"], torch.arange(5000.0))
