"""Flags are set, not trusted; dropout depends on the seed and the micro-batch's number alone."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import determinism
from determinism import seed_microbatch, set_determinism

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Each test leaves torch's flags and the environment as it found them."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    places = [(matmul, "allow_bf16_reduced_precision_reduction"), (matmul, "allow_fp16_reduced_precision_reduction"),
              (cudnn, "benchmark"), (cudnn, "deterministic"), (cudnn, "allow_tf32")]
    before = [getattr(owner, name) for owner, name in places]
    precision, strict = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")  # setenv first, so that the original comes back afterwards
    yield
    for (owner, name), value in zip(places, before, strict=True):
        setattr(owner, name, value)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(strict)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize("deterministic", [True, False])
def test_precision_flags_do_not_depend_on_determinism(deterministic):
    torch.set_float32_matmul_precision("high")
    set_determinism(1, deterministic)
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert torch.are_deterministic_algorithms_enabled() == torch.backends.cudnn.deterministic == deterministic
    assert not torch.backends.cudnn.benchmark and not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


def test_an_operation_without_a_deterministic_form_raises():
    set_determinism(1, True)
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    set_determinism(1, False)
    torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_every_generator_repeats():
    def draw():
        set_determinism(2**40 + 3, False)
        return random.random(), np.random.rand(), torch.rand(3).tolist()

    assert draw() == draw()


def test_cublas_settings_that_break_the_promise_are_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ValueError, match=r"CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8.*':0:0'"):
        set_determinism(1, True)
    set_determinism(1, False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_determinism(1, True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="after the first CUDA call"):
        set_determinism(1, True)


def test_importing_and_seeding_start_no_cuda_context():
    script = ("import determinism, torch; determinism.set_determinism(1, True); determinism.seed_microbatch(1, 2); "
              "print(torch.cuda.is_initialized())")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def mask(seed: int, index: int) -> list[bool]:
    seed_microbatch(seed, index)
    return (torch.nn.functional.dropout(torch.ones(256), 0.5) == 0).tolist()


def test_dropout_depends_on_seed_and_micro_batch_alone():
    expected = mask(7, 12)
    torch.rand(1000)  # an evaluation in between, another rank's share, a resume
    set_determinism(99, False)
    assert mask(7, 12) == expected
    others = [mask(7, 13), mask(8, 12), mask(8, 11), mask(12, 7), mask(7, 12 + 2**33), mask(7 + 2**33, 12)]
    assert all(other != expected for other in others)
    assert mask(7, 13) != mask(8, 12)


def test_seeds_are_spread_as_splitmix64_defines():
    # The first two outputs of the reference generator started at 0 (its state grows by the golden-ratio constant).
    assert determinism._mix(0) == 0xE220A8397B1DCDAF
    assert determinism._mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    seeds = set()
    for seed in range(20):
        for index in range(500):
            seed_microbatch(seed, index)
            seeds.add(torch.initial_seed())
    assert len(seeds) == 20 * 500


def test_seeding_micro_batches_queues_nothing():
    before = len(torch.cuda._queued_calls)
    for index in range(100):
        seed_microbatch(1, index)
    assert len(torch.cuda._queued_calls) == before
