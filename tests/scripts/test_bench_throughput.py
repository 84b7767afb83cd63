"""The throughput benchmark on a CPU: its rows, its ratios, its kinds of kernels, one rank and two."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import write_corpus

import scripts.bench_throughput as bench
from config import ConfigError

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
    for _ in range(2):
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
    assert one[2]["profile"]["ms"]["attention"] > one[1]["profile"]["ms"]["attention"] > 0  # emulated
    assert "flash_bf16" in capsys.readouterr().out

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = os.environ | dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
    ranks = [subprocess.Popen([sys.executable, str(ROOT / "scripts" / "bench_throughput.py"), *argv, "--arms=sdpa"],
                              env=env | dict(RANK=str(r), LOCAL_RANK=str(r)), stdout=subprocess.PIPE, text=True)
             for r in (0, 1)]
    output = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0] and not output[1]
    rows = json.loads(out.read_text())["rows"]
    assert [(row["arm"], row["gpus"]) for row in rows[4:]] == [(bench.PLAIN, 2), ("sdpa", 2)] and rows[:4] == one
    assert f"{rows[5]['tokens_per_s'] / rows[1]['tokens_per_s']:.3f} x one GPU" in output[0]


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


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="without torchrun, on a GPU"):
        bench.main([*TINY, f"--dataset={write_corpus(tmp_path / 'data')}", "--fit=80"])
