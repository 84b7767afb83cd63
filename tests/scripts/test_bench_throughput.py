"""The throughput benchmark on a CPU: its rows, its ratios, its kinds of kernels, one rank and two."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import write_corpus

import scripts.bench_throughput as bench
from config import ConfigError, override
from scripts import bench_train
from stop import EXIT_SIGTERM

ROOT = Path(__file__).parents[2]
TINY = ("--device=cpu --dtype=float32 --compile=False --n_layer=1 --n_head=2 --n_embd=32 --block_size=32 "
        "--batch_size=2 --gradient_accumulation_steps=4 --loss_chunk=40 --rounds=3 --steps=1").split()


@pytest.fixture(autouse=True)
def untouched():
    """Signals and flags are afterwards what they were."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.use_deterministic_algorithms(deterministic)


def test_rows_of_one_rank_and_of_two(tmp_path, capsys):
    """Two ranks add rows beside those of one, and are compared with them; a second measurement replaces its rows."""
    out, data = tmp_path / "folder" / "throughput.json", write_corpus(tmp_path / "data")
    argv = [*TINY, f"--dataset={data}", f"--out={out}"]
    bench.main(override(argv, "--arms=flash_bf16", "--rounds=1"))
    bench.main([*argv, "--arms=sdpa,flash_bf16,sdpa+loss_chunk=0", "--profile"])
    one = json.loads(out.read_text())["rows"]
    assert [row["arm"] for row in one] == [bench.PLAIN, "sdpa", "flash_bf16", "sdpa+loss_chunk=0"]
    assert [row["loss_chunk"] for row in one] == [0, 40, 40, 0]
    assert [row["deterministic"] for row in one] == [False, True, True, True]
    for row in one:
        assert row["tokens_per_s"] == pytest.approx(row["tokens_per_step"] / row["step_ms"] * 1e3)
        assert row["tokens_per_step"] == 256 and row["gpus"] == 1 and row["step_ms_min"] <= row["step_ms"]
        assert 0 < row["model_flops_utilisation"] < 1 and row["ratio_to_plain"] > 0 and len(row["commit"]) == 40
        assert row["profile"]["ms"].keys() >= {"attention", "matmul", "loss", "optimizer", "idle"}
        assert row["profile"]["ms"]["matmul"] > 0 < row["profile"]["ms"]["loss"]
    assert one[0]["ratio_to_plain"] == one[1]["ratio_to_sdpa"] == one[3]["ratio_to_sdpa"] == 1
    assert all(row["profile"]["ms"]["attention"] > 0 for row in one)
    assert any("lpattn::emulated" in name and kind == "attention" for name, kind, *_ in one[2]["profile"]["kernels"])
    assert "flash_bf16" in capsys.readouterr().out
    assert [row["rounds"] for row in one] == [6, 5, 4, 3]  # one more for each arm that joined later
    # torchrun finds the port, so that no other process can have taken it; a busy machine may take minutes.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               str(ROOT / "scripts" / "bench_throughput.py"), *argv, "--arms=sdpa"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr
    assert "is compiled" in done.stdout and done.stdout.count("round 3 of 3") == 1, "rank 0 alone prints"
    rows = json.loads(out.read_text())["rows"]
    assert [(row["arm"], row["gpus"]) for row in rows[4:]] == [(bench.PLAIN, 2), ("sdpa", 2)] and rows[:4] == one
    assert f"{rows[5]['tokens_per_s'] / rows[1]['tokens_per_s']:.3f} x one GPU" in done.stdout


@pytest.mark.parametrize("name, kind", [
    ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matmul"),
    ("forward_kernel", "attention"), ("dkdv_kernel", "attention"),
    ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
    ("softmax_gradient_kernel", "loss"), ("triton_red_fused__log_softmax_nll_loss_forward_12", "loss"),
    ("triton_per_fused__to_copy_add_lpattn_flash_backward_native_layer_norm_backward_3", "norms, elementwise"),
    ("triton_poi_fused_embedding_dense_backward_1", "embedding"),
    ("void at::native::indexing_backward_kernel<float, 4>", "embedding"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"), ("Memcpy HtoD (Pinned -> Device)", "copies"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "norms, elementwise"),
])
def test_kinds_of_kernels(name, kind):
    assert bench.kind_of(name) == kind


def test_the_largest_micro_batch(monkeypatch):
    """A card's memory as a formula: 3 GiB, and 0.5 more a sequence, of which 96 make a step."""
    tried = []

    class Card:
        def __init__(self, name, argv, group, stop):
            self.size = int(next(a for a in argv if a.startswith("--batch_size")).split("=")[1])
            self.peak = 3 + 0.5 * self.size
            tried.append((self.size, limit[0]))
            if self.peak > limit[0]:
                raise torch.OutOfMemoryError("full")

        def warm_up(self):
            return {"peak_memory_gib": self.peak, "static_memory_gib": 2.0}

    limit = [100.0]
    monkeypatch.setattr(bench, "Arm", Card)
    monkeypatch.setattr(bench, "row_of", lambda arm, rate: {"batch_size": arm.size})
    monkeypatch.setattr(bench, "load", lambda argv: type("C", (), {"sequences_per_step": 96}))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda f: limit.__setitem__(0, 100 * f))
    rows = bench.fit("sdpa", [], None, None, [24, 8])
    assert [(row["batch_size"], row["fits_gib"]) for row in rows] == [(32, 24), (8, 8)] and len(tried) <= 5
    with pytest.raises(ConfigError, match="sdpa: not even one sequence trains in 2 GiB"):
        bench.fit("sdpa", [], None, None, [2])


def test_seconds(tmp_path, capsys):
    """Without time for a second arm, the first one has its row, of one round; with time for all, all have all."""
    out, argv = tmp_path / "rows.json", [*TINY, f"--dataset={write_corpus(tmp_path / 'data')}", "--arms=sdpa,standard"]
    for seconds, rounds in ((1e-3, [1]), (1e3, [5, 4, 3])):
        assert bench.main([*argv, f"--out={out}", f"--seconds={seconds}"]) == 0
        assert [row["rounds"] for row in json.loads(out.read_text())["rows"]] == rounds
        said, short = capsys.readouterr().out, seconds < 1
        assert ("no time for sdpa, standard" in said) == ("no time for more rounds than 1 of 3" in said) == short
        assert f"{bench.PLAIN} is compiled" in said and ("round 3 of 3" in said) != short


def test_what_is_known_is_kept(tmp_path, capsys, monkeypatch):
    """SIGTERM while the second arm is compiled: the first one's row is in the file, and one sentence tells so."""
    out, data = tmp_path / "rows.json", write_corpus(tmp_path / "data")
    warm_up = bench.Arm.warm_up

    def signalled(arm):
        if arm.name == "standard":
            assert [row["arm"] for row in json.loads(out.read_text())["rows"]] == [bench.PLAIN]  # kill -9 leaves it too
            os.kill(os.getpid(), signal.SIGTERM)
        return warm_up(arm)

    monkeypatch.setattr(bench.Arm, "warm_up", signalled)
    assert bench.main([*TINY, f"--dataset={data}", "--arms=standard,sdpa", f"--out={out}"]) == EXIT_SIGTERM
    assert [row["arm"] for row in json.loads(out.read_text())["rows"]] == [bench.PLAIN]
    said = capsys.readouterr()
    assert f"with 1 rows measured, in {out}" in said.err and "tokens/s" in said.out and len(said.err.splitlines()) == 1


def test_a_signal_ends_bench_train(tmp_path, capsys, monkeypatch):
    micro_batch = bench_train.Trainer.micro_batch

    def signalled(trainer, step, micro):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return micro_batch(trainer, step, micro)

    monkeypatch.setattr(bench_train.Trainer, "micro_batch", signalled)
    flags = [flag for flag in TINY if not flag.startswith("--rounds")]
    argv = [*flags, f"--dataset={write_corpus(tmp_path / 'data')}", f"--json={tmp_path / 'result.json'}"]
    assert bench_train.main(argv) == EXIT_SIGTERM
    said = capsys.readouterr().err
    assert said == "bench_train.py: stopped by a signal before all was measured; nothing is written\n"
    assert not (tmp_path / "result.json").exists()


def test_what_is_refused(tmp_path, capsys):
    data = write_corpus(tmp_path / "other")
    with pytest.raises(ConfigError, match="at least one round"):
        bench.main(override(TINY, "--rounds=0"))
    for text in ("{}", "[1]", "no JSON"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ConfigError, match=r"other\.json is no --out of this script"):
            bench.main([*TINY, f"--out={tmp_path / 'other.json'}"])
        assert (tmp_path / "other.json").read_text() == text
    with pytest.raises(ConfigError, match="flash_nonsense"):  # before the first arm is compiled
        bench.main([*TINY, f"--dataset={data}", "--arms=sdpa,flash_nonsense"])
    assert "compiled" not in capsys.readouterr().out
    for text in ("nan", "80,0", "inf", "80,x"):
        with pytest.raises(SystemExit):
            bench.main([*TINY, f"--fit={text}"])
        assert f"argument --fit: invalid gibibytes value: '{text}'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="without torchrun, on a GPU"):
        bench.main([*TINY, f"--dataset={write_corpus(tmp_path / 'data')}", "--fit=80"])
