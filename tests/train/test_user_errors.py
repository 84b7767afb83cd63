"""What a user can get wrong: one clear sentence on standard error, exit code 2, and nothing written."""

import errno
import hashlib
import json
import os
import re
import shutil

import pytest
import torch
from tiny_runs import Runner, write_corpus

import plan
from attention import AttentionSpec
from replay.order import OrderFile
from replay.switches import Switch, companion, write_switches

REFUSED = {
    "unknown flag": (dict(learnin_rate=1), "learning"),
    "wrong type": (dict(n_layer="two"), "error: --n_layer: invalid literal for .* 'two'$"),
    "one of two types": (dict(smooth_k="yes"), "error: --smooth_k: no type .*FLOAT .*yes"),
    "wrong choice": (dict(attention="flash_bf15"), "choice 'flash_bf15' for .*--attention.*, 'flash_bf16', .*'\\)\\.$"),
    "impossible value": (dict(batch_size=0), "error: batch_size=0 must be positive$"),
    "width and heads": (dict(n_embd=33), "n_embd=33 is not divisible by n_head=2"),
    "no such switch": (dict(attention="standard", pv="fp32"), "pv='fp32' changes nothing"),
    "switch value": (dict(pv="fp16"), "pv='fp16' is not one of bf16, fp32"),
    "override": (dict(attention_override="5=standard"), "'5=standard' is not .* layer of 0..1"),
    "override backend": (dict(attention_override="1=flash"), "'flash' is no backend"),
    "head": (dict(output_heads="1:7"), "'1:7' is outside layers 0..1, heads 0..1"),
    "head syntax": (dict(output_heads="1"), "'1' is not LAYER:HEAD"),
    "float16": (dict(dtype="float16", attention="flash_bf16"), "float16 with attention=flash_bf16.*standard"),
    "vocabulary": (dict(vocab_size=255), "vocab_size=255 is below the 256"),
    "missing GPU": (dict(device="cuda"), "needs a CUDA GPU .* --device=cpu"),
    "unknown device": (dict(device="gpu"), "device=gpu is unknown; choose cpu"),
    "data": (dict(dataset="nowhere"), "nowhere does not exist; make it with"),
    "nowhere to write": (dict(out_dir=" "), "out_dir=' ' is empty; the working folder is ."),
    "nothing to begin with": (dict(init_from=""), "init_from='' is empty"),
    "no data": (dict(dataset=""), "the name of the data folder is empty"),
    "block": (dict(block_size=4000), "4000 tokens, but .* block_size=4000 reads 4001"),  # the validation split's
    "evaluation's size": (dict(eval_iters=10**12), "eval_iters=1000000000000, batch_size=2: the starts of an ev"),
    "step's size": (dict(gradient_accumulation_steps=10**12, eval_iters=1), "the starts of a step's .* this machine"),
    "batch's size": (dict(batch_size=10**6, block_size=10**9), "batch_size=1000000, block_size=1000000000: inputs and"),
    "layers": (dict(n_layer=10**12), "n_layer=1000000000000, n_embd=32, .* the weights alone take .* GiB, and this"),
    "vocabulary's size": (dict(vocab_size=10**15), "vocab_size=1000000000000000, .* the weights alone"),
    "order file": (dict(replay="nowhere.bin"), "nowhere.bin cannot be read: No such file"),
    "resume": (dict(init_from="resume"), "has no checkpoint .* out_dir of a run that has"),
    "checkpoint": (dict(init_from="nowhere.pt"), "nowhere.pt does not exist"),
    "weights": (dict(init_from="gpt3"), "init_from=gpt3 is neither scratch, resume, a checkpoint"),
    "options": (dict(qk_norm=True, qk_clip=1.0), "qk_clip=1.0 with qk_norm"),
    "kernel": (dict(kernel="triton"), "triton"),
    "monitor interval": (dict(monitor="warn", monitor_interval=0), "monitor_interval=0 must be positive"),
    "monitor threshold": (dict(monitor="warn", monitor_ties=1.0), "monitor_ties=1.0 is a share of rows"),
    "monitor of nothing": (dict(monitor="stop", monitor_ties=0, monitor_wq_ratio=0, monitor_row_max=0),
                           "monitor=stop has nothing to"),
    "remedy": (dict(monitor="switch", monitor_remedy="stabilised"), "monitor_remedy='stabilised': .* is no backend"),
    "remedy's switch": (dict(monitor="switch", monitor_remedy="output=fp64"), "output='fp64' is not one of bf16, fp32"),
    "no remedy": (dict(monitor="switch", delta="dp_p"), "monitor_remedy='delta=dp_p' changes nothing"),
    "nothing to remedy": (dict(monitor="switch", attention="standard"), "'delta=dp_p' changes nothing: .*standard"),
    "sdpa's remedy": (dict(monitor="switch", attention="sdpa"), "'delta=dp_p': layer 0: attention=sdpa has no switch "
                      "delta .*; every layer can take monitor_remedy=flash_fa2.delta=dp_p"),
    "one layer's remedy": (dict(monitor="switch", attention_override="1=sdpa"), "layer 1: attention=sdpa has no switch "
                           "delta .*; every layer can take monitor_remedy=flash_fa2.delta=dp_p"),
    "standard's remedy": (dict(monitor="switch", attention_override="1=standard", monitor_remedy="output=fp32"),
                          "layer 1: attention=standard has no switch output .* monitor_remedy=flash_fa2.output=fp32"),
    "float16's remedy": (dict(monitor="switch", attention="sdpa", dtype="float16"), "=flash_fp32.delta=dp_p"),
    "no remedy either": (dict(monitor="switch", monitor_remedy="beta=4"), "monitor_remedy='beta=4' changes nothing"),
    "remedy and float16": (dict(monitor="switch", attention="flash_fp32", dtype="float16", monitor_remedy="stabilized"),
                           "float16 .*stabilized"),
    "switches of nothing": (dict(replay_switches=True), "replay_switches=True without an order file"),
    "switches twice": (dict(monitor="switch", replay="x", replay_switches=True), "monitor=switch with replay_switches"),
}


opened = os.open


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("flags, message", REFUSED.values(), ids=REFUSED)
def test_refused(runner, flags, message):
    assert_sentence(runner.refused("run", **flags), message)


def assert_sentence(stderr: str, *patterns: str):
    assert re.match("train.py: (error|stopped): ", stderr) and len(stderr.splitlines()) == 1 and len(stderr) < 600
    for pattern in patterns:
        assert re.search(pattern, " ".join(stderr.split())), stderr


def test_a_container_has_less_than_its_machine(runner, monkeypatch, tmp_path):
    """By the smaller limit of cgroups v1 and v2, where there is one."""
    none, v1, v2 = tmp_path / "none", tmp_path / "memory.limit_in_bytes", tmp_path / "memory.max"
    v1.write_text("9223372036854771712\n")
    v2.write_text("max\n")
    monkeypatch.setattr(plan, "CONTAINER_LIMITS", (none, v1, v2))
    machine = plan.host_memory()
    assert machine == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (v1, v2):
        limit.write_text(f"{2**16}\n")
        assert plan.host_memory() == 2**16
        assert_sentence(runner.refused("run"), "the weights alone take .* this machine, or its container, has 6.1e-05")
        for no_limit in (0, -1, 2**62):
            limit.write_text(f"{no_limit}\n")
            assert plan.host_memory() == machine


def test_indivisible_accumulation(runner, monkeypatch):
    """Both numbers, and before the process group: no other rank has to be there."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = runner.refused("run", gradient_accumulation_steps=5)
    assert_sentence(message, "gradient_accumulation_steps=5 .* 2 ranks; use a multiple of 2")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, corpus):
    """A run of six steps, its order file and its checkpoints."""
    return Runner(tmp_path_factory.mktemp("recorded"), corpus)("run")


def test_replay_that_does_not_fit(runner, recorded):
    order = recorded.out / "order.bin"
    for flags, message in ((dict(block_size=16), "block_size=32 .* block_size=16"),
                           (dict(batch_size=3), "sequences_per_step=4 .* sequences_per_step=6"),
                           (dict(max_iters=7), "holds 6 steps, but max_iters=7 .* --max_iters=6")):
        assert_sentence(runner.refused("run", replay=order, **flags), message, str(order))
    message = runner.refused("run", replay=order, replay_switches=True)
    assert_sentence(message, "order.switches.json, which cannot be read .*never switched a layer has none")
    damaged = runner.root / "damaged.bin"
    raw = bytearray(order.read_bytes())
    raw[40] ^= 1
    damaged.write_bytes(raw)
    assert_sentence(runner.refused("run", replay=damaged), "header of .*damaged.bin is damaged")


def test_replay_on_other_data(runner, recorded, corpus):
    """One token changed, whether meta.json knows of it or not."""
    other = runner.root / "data" / "tiny"
    shutil.copytree(corpus, other)
    raw = bytearray((other / "train.bin").read_bytes())
    raw[1000] ^= 1
    (other / "train.bin").write_bytes(raw)
    message = runner.refused("run", replay=recorded.out / "order.bin", dataset=other)
    assert_sentence(message, "train.bin has SHA-256 [0-9a-f]{64}, but meta.json .* [0-9a-f]{64}")
    meta = json.loads((other / "meta.json").read_text())
    meta["splits"]["train"]["sha256"] = hashlib.sha256(raw).hexdigest()
    (other / "meta.json").write_text(json.dumps(meta))
    message = runner.refused("run", replay=recorded.out / "order.bin", dataset=other)
    recorded_sha = OrderFile(recorded.out / "order.bin").header.sha256
    assert_sentence(message, f"sha256={recorded_sha}", meta["splits"]["train"]["sha256"])


def test_data_of_one_block(runner):
    """block_size + 1 tokens have one start, 0; one token fewer is an error."""
    dataset = write_corpus(runner.root / "short", train_tokens=33, val_tokens=33)
    run = runner("run", dataset=dataset)
    assert not OrderFile(run.out / "order.bin").row(5).any()
    dataset = write_corpus(runner.root / "shorter", train_tokens=32)
    assert_sentence(runner.refused("refused", dataset=dataset), "32 tokens, but .* block_size=32 reads 33")


def test_folder_in_use(runner):
    first = runner("run", max_iters=2)
    before = {path: path.read_bytes() for path in first.out.iterdir()}
    again = runner("run", code=2)
    assert_sentence(again.stderr, f"out_dir={first.out} already holds a run; .* --init_from=resume or choose another")
    assert {path: path.read_bytes() for path in first.out.iterdir()} == before
    for path in first.out.glob("*.pt"):
        path.unlink()
    again = runner("run", code=2)
    assert_sentence(again.stderr, "already holds the log of a run, and no checkpoint to go on from; move it away or")


def test_a_folder_with_a_file_that_is_no_log(runner):
    (runner.root / "run").mkdir()
    (runner.root / "run" / "metrics.jsonl").write_text("[]")
    assert_sentence(runner("run", code=2).stderr, "metrics.jsonl: line 1 is no record with a step")


def test_an_order_file_that_cannot_be_made(runner, monkeypatch):
    def full(path, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context() as patch:
        patch.setattr("replay.order.os.open", lambda path, *args: (full if str(path).endswith("order.bin") else opened)(
            path, *args))
        assert_sentence(runner("run", code=2).stderr, "order.bin cannot be recorded to .No space left on device")
    runner("run")


@pytest.mark.parametrize("size", [0, 7, 100])
def test_a_run_that_was_killed_while_it_made_its_order_file_starts_over(runner, recorded, size):
    whole = (recorded.out / "order.bin").read_bytes()
    (runner.root / "run").mkdir()
    (runner.root / "run" / "order.bin").write_bytes(whole[:size])
    run = runner("run")
    runner.same(run, recorded)
    assert (run.out / "order.bin").read_bytes() == whole


def test_flags_that_differ_from_the_checkpoint(runner, recorded):
    """Nothing is written, neither into the folder that is resumed nor into a new one."""
    before = {path: path.read_bytes() for path in recorded.out.iterdir()}
    for flags, message in ((dict(n_layer=3), "n_layer=3, but the checkpoint has n_layer=2"),
                           (dict(n_embd=64), "n_embd=64, but the checkpoint has n_embd=32"),
                           (dict(block_size=16), "block_size=16, but the checkpoint has block_size=32"),
                           (dict(qk_norm=True), "qk_norm=True, but the checkpoint has qk_norm=False"),
                           (dict(optimizer="muon"), "adamw, this run's optimizer is adamw \\+ muon; keep `optimizer`"),
                           (dict(max_iters=5), "checkpoint is at step 6, past max_iters=5; raise --max_iters")):
        again = runner("run", code=2, out_dir=recorded.out, init_from="resume", **flags)
        assert_sentence(again.stderr, message)
        message_new = runner.refused("new", init_from=recorded.out / "ckpt_00000006.pt", **flags)
        assert_sentence(message_new, message)
    assert {path: path.read_bytes() for path in recorded.out.iterdir()} == before


def test_resume_with_another_order(runner):
    """Batch size, seed and data of a recorded run are part of it: a resume that would read others is refused."""
    run = runner("run", max_iters=3)
    for flags, message in ((dict(batch_size=4), "sequences_per_step 8 against 4|sequences_per_step 4 against 8"),
                           (dict(seed=7), "seed 1337 against 7|seed 7 against 1337")):
        again = runner("run", code=2, init_from="resume", **flags)
        assert_sentence(again.stderr, "order of another run", message)
    before = run.losses
    assert runner("run", init_from="resume").losses == [*before, *runner("whole").losses[3:]]  # its own values fit


@pytest.mark.parametrize("content", [{"model": {}}, {}, torch.zeros(1)], ids=("model", "nothing", "tensor"))
def test_a_file_that_is_no_checkpoint_of_ours(runner, content):
    torch.save(content, runner.root / "odd.pt")
    assert_sentence(runner.refused("run", init_from=runner.root / "odd.pt"), "odd.pt .*step")


def test_folder_that_cannot_be_written(runner):
    (runner.root / "file").write_text("")
    run = runner("run", code=2, out_dir=runner.root / "file" / "run")
    assert_sentence(run.stderr, "the log of this run cannot be kept in .*file/run: Not a directory")


@pytest.mark.parametrize("error", [
    MemoryError(), MemoryError("Unable to allocate 9 GiB"), torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory\nframe 0")], ids=repr)
def test_memory_that_does_not_suffice(runner, monkeypatch, error):
    """For the model: nothing is left behind. For a step: what any run leaves that ends."""
    def fails(*_):
        raise error

    said = str(error).partition("\n")[0]
    message = f"out of memory with batch_size=2, block_size=32, .*{said}.*; lower batch_size and"
    with monkeypatch.context() as patch:
        patch.setattr("trainer.GPT", fails)
        assert_sentence(runner.refused("refused"), f"error: {message}")
    monkeypatch.setattr("trainer.Trainer.gradients", fails)
    run = runner("run", code=1)
    assert_sentence(run.stderr, f"train.py: stopped: in step 0: {message}")
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize("ranks", ["0", "abc", "-1"])
def test_a_number_of_ranks_that_is_none(runner, monkeypatch, ranks):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert_sentence(runner.refused("run"), f"WORLD_SIZE='{ranks}' in the environment is no number of ranks")


def test_an_order_file_that_is_a_folder(runner, tmp_path):
    assert_sentence(runner.refused("run", replay=tmp_path), "order file .* cannot be read: Is a directory")


@pytest.mark.parametrize("flags, message", [(dict(seed=1 << 63), "must be below 2\\^63"),
                                            (dict(learning_rate="inf"), "learning_rate=inf cannot be computed with")])
def test_numbers_that_cannot_be_used(runner, flags, message):
    assert_sentence(runner.refused("run", **flags), message)


@pytest.mark.parametrize("spec, layer, message", [
    (AttentionSpec("stabilized").key, 2, "the switch of layer 2 at step 3 cannot be replayed with n_layer=2"),
    (AttentionSpec(output_heads=(5,)).key, 1, "names output_heads=.5,., but n_head=2"),
    ('{"backend": "flash_bf17", "output_heads": []}', 1, "cannot compute .*flash_bf17"),
    ('{"unknown": 1, "output_heads": []}', 1, "cannot compute .*unknown")])
def test_switches_that_do_not_fit(runner, recorded, spec, layer, message):
    order = runner.root / "order.bin"
    shutil.copy(recorded.out / "order.bin", order)
    write_switches(companion(order), [Switch(3, layer, spec)])
    assert_sentence(runner.refused("run", replay=order, replay_switches=True), message)
