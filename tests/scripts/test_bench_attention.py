"""What to time is read as written, and the file of results is what its table says; timing itself needs a GPU."""

import json
import math
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import runinfo
import scripts.bench_attention as bench
import scripts.bench_attention_check as check
from attention import AttentionSpec, flash
from attention.emulated import emulated
from scripts.bench_attention import ARMS, SHAPES, errors, main, rows_of, table
from scripts.bench_attention_check import CHECKED, SWITCHES
from scripts.bench_attention_common import parse_arm, parse_shapes, write
from scripts.bench_attention_tune import CANDIDATES, TUNED, jobs, tile_of
from scripts.bench_attention_workers import builds, spread

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ["B", "H", "T", "D", "backend", "forward_ms", "backward_ms", "ratio_to_sdpa", "max_error",
           "signed_mean_error"]


@pytest.mark.parametrize("text, backend, tile_k, stats, dtype", [
    ("sdpa", "sdpa", 0, None, torch.bfloat16), ("flash_fa2", "flash_fa2", 64, None, torch.bfloat16),
    ("flash_bf16@64", "flash_bf16", 64, None, torch.bfloat16),
    ("stabilized+stats", "stabilized", 128, -1, torch.bfloat16),
    ("stabilized+stats0", "stabilized", 128, 0, torch.bfloat16),
    ("flash_fp32@32+stats2/float32", "flash_fp32", 32, 2, torch.float32)])
def test_arm(text, backend, tile_k, stats, dtype):
    spec, found, kind = parse_arm(text)
    assert (spec.backend, spec.tile_k, found, kind) == (backend, tile_k, stats, dtype)


def test_arm_with_switches():
    spec, counted, dtype = parse_arm("flash_fa2@32+output=fp32+delta=dp_p+stats2/float32")
    assert (spec.backend, spec.tile_k, spec.output, spec.delta) == ("flash_fa2", 32, "fp32", "dp_p")
    assert (counted, dtype) == (2, torch.float32)
    args = SimpleNamespace(arms="flash_fa2@32+output=fp32+delta=dp_p+stats2/float32", shapes="1,2,1024,64")
    job = next(job for job in builds(bench.needed(args)) if job[4] is not None)
    assert AttentionSpec(**job[0]) == spec and job[4] is True


@pytest.mark.parametrize("text, words", [
    ("flash_fa2+output=fp33", "output='fp33'"), ("flash_fa2+speed=1", "speed"), ("sdpa+delta=dp_p", "no switch delta"),
    ("flash", "no backend"), ("flash_fa2@x", "TILE_K"), ("flash_fa2+speed", "TILE_K"), ("flash_fa2+2", "TILE_K"),
    ("flash_fa2+stats-1", "TILE_K"), ("sdpa/int8", "float32"),
    ("flash_fa2@48", "tile_k=48"), ("", "no backend"), ("flash_fa2@32+tile_k=64", "names a switch twice"),
    ("flash_fa2/float16", "takes no float16"), ("sdpa+stats", "without row statistics")])
def test_bad_arm(text, words):
    with pytest.raises(ValueError, match=words):
        parse_arm(text)


def test_shapes():
    assert parse_shapes("1,2,3,4;5,6,7,8") == [(1, 2, 3, 4), (5, 6, 7, 8)]
    for text in ("1,2,3", "1,2,3,4;", "1,2,3,x", "1,2,0,4"):
        with pytest.raises(ValueError, match="B,H,T,D"):
            parse_shapes(text)
    assert len(parse_shapes(SHAPES)) == 5 and parse_arm(ARMS.split(",")[0])[0].backend == "sdpa"
    assert all(parse_arm(name) for name in ARMS.split(","))


@pytest.mark.parametrize("argv, words", [(["--arms=nothing"], "no backend"), (["--shapes=1,2"], "B,H,T,D"),
                                         (["--tune", "--arms=sdpa"], "--arms=sdpa names others"),
                                         (["--tune", "--workers=0"], "--workers=0"), (["--rounds=0"], "--rounds=0"),
                                         (["--workers=-1"], "--workers=-1"), (["--seconds=nan"], "--seconds=nan")])
def test_bad_flags_are_said_before_a_gpu_is_asked_for(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("argv", [[], ["--tune"], ["--check"], ["--bias"], ["--memory"], ["--build"]])
def test_no_gpu(argv, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        main(argv)


def test_rows_and_table():
    rows = rows_of((2, 3, 1024, 64), ["sdpa", "flash_fa2"], [(1e-2, 1e-7), (2e-2, -3e-7)], [(1.0, 3.0), (2.0, 4.0)])
    assert [list(row) for row in rows] == [COLUMNS] * 2
    assert [row["ratio_to_sdpa"] for row in rows] == [1.0, 1.5]
    assert list(rows[1].values()) == [2, 3, 1024, 64, "flash_fa2", 2.0, 4.0, 1.5, 2e-2, -3e-7]
    head, _, line = table(rows).splitlines()
    assert head.split()[:3] == ["B,H,T,D", "backend", "fwd"]
    work = 4 * 2 * 3 * 1024**2 * 64 / 2  # FLOP of the causal half
    assert line.split() == ["2,3,1024,64", "flash_fa2", "2.000", "4.000", "1.500", f"{work / 2e9:.0f}",
                            f"{2.5 * work / 4e9:.0f}", "2.00e-02", "-3.00e-07"]


def test_errors_are_those_against_float64():
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 40, 16, generator=g, dtype=torch.float64)
    spec = AttentionSpec("flash_fp32", tile_k=16)
    o = emulated(q, k, v, torch.zeros(3, dtype=torch.int64), spec.key, False)[0]
    assert errors(o, (q, k, v))[0] < 1e-13
    o[1, 3, 7, 2] -= 0.5
    o[0, 4] += 9  # a head that is not looked at
    largest, mean = errors(o, (q, k, v))
    assert largest == pytest.approx(0.5) and mean == pytest.approx(-0.5 / (2 * 4 * 40 * 16))


def test_file(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write(tmp_path / "cpu.json")
    assert json.loads((tmp_path / "cpu.json").read_text())["hardware"] == runinfo.processor() != ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    write(tmp_path / "new" / "a.json", rows=[1])
    found = json.loads((tmp_path / "new" / "a.json").read_text())
    assert list(found) == ["hardware", "commit", "versions", "rows"] and found["rows"] == [1]
    assert found["hardware"] == "a GPU" and found["versions"]["torch"] == torch.__version__

    def no_commits(command, **_):  # git's answer in a repository without any
        raise subprocess.CalledProcessError(128, command, "HEAD\n")

    monkeypatch.setattr(runinfo.subprocess, "run", no_commits)
    monkeypatch.setenv("GIT_COMMIT", "1234abc")
    write(tmp_path / "b.json", rows=[])
    assert json.loads((tmp_path / "b.json").read_text())["commit"] == "1234abc"


def on_cpu(monkeypatch, module):
    """The module's inputs on the CPU; what it asks of CUDA besides has an answer."""
    def tensors(shape, dtype, std=1.0):
        B, H, T, D = shape
        g = torch.Generator().manual_seed(0)
        qkv = [torch.randn(B, H, T, D, generator=g).mul(std).to(dtype).requires_grad_() for _ in range(3)]
        return qkv, torch.randn(B, H, T, D, generator=g).to(dtype)

    monkeypatch.setattr(module, "tensors", tensors)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_bench_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    class Clock:
        def medians(self, calls, rounds):
            for call in calls:
                call()
            return [float(i + 1) * rounds for i in range(len(calls))]

    on_cpu(monkeypatch, bench)
    monkeypatch.setattr(bench, "Clock", Clock)
    main(["--shapes=1,2,40,16;2,1,20,16", "--arms=sdpa,flash_bf16@16+stats", "--rounds=2", "--workers=0",
          f"--out={tmp_path / 'a'}"])
    rows = json.loads((tmp_path / "a").read_text())["rows"]
    assert [(row["T"], row["backend"], row["forward_ms"], row["backward_ms"]) for row in rows] == [
        (T, *row) for T in (40, 20) for row in (("sdpa", 2.0, 4.0), ("flash_bf16@16+stats", 6.0, 8.0))]
    assert rows[1]["ratio_to_sdpa"] == pytest.approx(14 / 6) and 1e-4 < rows[1]["max_error"] < 5e-2
    assert table(rows[:2]) in capsys.readouterr().out


def test_check_counts_entries_that_differ(tmp_path, monkeypatch):
    def flash_with_one_wrong_entry(q, k, v, rng, key, stats):
        o, *rest = emulated(q, k, v, rng, key, stats)
        o = o.clone()
        o[0, 0, 3, 1] += 1
        return o, *rest

    on_cpu(monkeypatch, check)
    monkeypatch.setattr(check, "CHECKED", (((1, 2, 128, 64), 1.0),))
    monkeypatch.setattr(check, "SWITCHES", [dict(backend="flash_fa2"), dict(stabilizer="paper", tile_k=32)])
    monkeypatch.setattr(check.flash, "flash", flash_with_one_wrong_entry)
    main(["--check", "--workers=0", f"--out={tmp_path / 'a'}"])
    for row in json.loads((tmp_path / "a").read_text())["check"]:
        assert row["o"]["differ"] == 1 / (2 * 128 * 64) and row["o"]["mean"] > 0 and row["o"]["finite"]
        assert all(row[name]["differ"] == row[name]["mean"] == 0 for name in ("dq", "dk", "dv", "lse", "ties"))


def test_bias_is_that_of_the_rounding(tmp_path, monkeypatch):
    """On tied rows flash_bf16 has the signed error of the paper's section 3, flash_fa2 and the cure a smaller one."""
    on_cpu(monkeypatch, check)
    monkeypatch.setattr(check, "BIASED", ((3.0, -0.5),))
    monkeypatch.setattr(check, "BIASED_SHAPE", (2, 2, 256, 64))
    monkeypatch.setattr(check, "BACKENDS", ("flash_fa2", "flash_bf16"))
    monkeypatch.setattr(check.flash, "flash", emulated)
    main(["--bias", "--workers=0", f"--out={tmp_path / 'a'}"])
    fa2, bf16 = json.loads((tmp_path / "a").read_text())["bias"]
    assert list(bf16) == ["q_scale", "v_mean", "backend", "kernel", "emulated", "tied"] and 0.5 < bf16["tied"] < 1
    assert all(row["kernel"] == row["emulated"] for row in (fa2, bf16))
    assert bf16["kernel"]["o"] > 10 * abs(fa2["kernel"]["o"]) and bf16["kernel"]["delta"] < 0


def test_jobs_that_raise_or_hang_cost_no_other_job_its_answer():
    jobs = [("1 + 1",), ("1 / 0",), ("__import__('time').sleep(60)",), ("2 + 2",), ("print('a line of its own') or 5",)]
    found = spread("builtins:eval", jobs, 2, 1.5, time.monotonic() + 60)
    assert found == [2, {"error": "ZeroDivisionError division by zero"}, None, 4, 5]
    assert spread("builtins:eval", jobs[:1], 1, 10, time.monotonic() - 1) == [None]


def test_builds_are_made_once():
    """Statistics and the forward kernel's own switches leave the backward kernels as they are."""
    cases = [(dict(backend=name), torch.bfloat16, T, 64, stats) for name in ("sdpa", "flash_bf16", "stabilized")
             for T in (1024, 4096, 1000) for stats in (False, True)]
    found = builds(cases)
    assert len(found) == len({json.dumps(job) for job in found}) == 2 * 2 * 2 + 2
    assert sorted(job[2] for job in found if job[4] is None) == [1000, 1024]


def test_committed_results():
    found = json.loads((ROOT / "results/bench_attention.json").read_text())
    assert set(found) == {"hardware", "versions", "commit", "rows"} and len(found["commit"]) == 40
    bases = {}
    for row in found["rows"]:
        own = {"commit"} & row.keys()  # of a row that was measured again later
        assert list(row) == [*COLUMNS, *own] and all(len(row[name]) == 40 for name in own)
        assert all(math.isfinite(row[n]) for n in COLUMNS[5:])
        total = row["forward_ms"] + row["backward_ms"]
        base = bases.setdefault(tuple(row[n] for n in "BHTD"), total)
        assert row["ratio_to_sdpa"] == pytest.approx(total / base) and parse_arm(row["backend"])
        assert 0 < row["forward_ms"] < row["backward_ms"] and abs(row["signed_mean_error"]) <= row["max_error"]
    assert found["rows"][0]["backend"] == "sdpa" and len(found["rows"]) == len(bases) * len(ARMS.split(","))


def test_committed_numerics_and_memory():
    """Every switch on every input is there, ties are equal everywhere, and not a byte is asked for that need not be."""
    found = json.loads((ROOT / "results/attention/numerics.json").read_text())
    assert [(tuple(row[n] for n in "BHTD"), row["std"], row["switch"]) for row in found["check"]] == [
        (shape, std, json.loads(json.dumps(choice))) for shape, std, choice in check.cases()]
    assert all(row["ties"]["differ"] == 0 and row["o"]["differ"] < 1 for row in found["check"])
    assert [(row["q_scale"], row["v_mean"], row["backend"]) for row in found["bias"]] == [
        (*inputs, name) for inputs in check.BIASED for name in check.BACKENDS]
    memory = json.loads((ROOT / "results/attention/memory.json").read_text())
    assert memory["commit"] == json.loads((ROOT / "results/bench_attention.json").read_text())["commit"]
    assert memory["memory"] and all(row["extra"] == row["needed"] for row in memory["memory"])


def test_candidates_and_switches():
    """A tile that appears twice costs GPU time, and a switch that is no spec costs the rest of the check."""
    for tiles in CANDIDATES.values():
        for which, candidates in tiles.items():
            assert which in flash.Launch._fields and len(set(candidates)) == len(candidates)
            assert all(rows & (rows - 1) == keys & (keys - 1) == 0 for rows, keys, *_ in candidates)
            assert len({str(tile_of(tile)) for tile in candidates}) == len(candidates)
    assert {job[0] for job in jobs(TUNED, [(1, 1, 128, 64)])} == set(TUNED)
    assert len({AttentionSpec(**choice).key for choice in SWITCHES}) == len(SWITCHES)
    assert {choice.get("backend") for choice in SWITCHES[:4]} == set(TUNED)
    assert all(len(shape) == 4 and std > 0 for shape, std in CHECKED)
