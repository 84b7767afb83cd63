"""What is kept of a run says what the run's own files say; the full-scale script, on two ranks of a CPU."""

import lzma
import os
import subprocess
import sys

from metrics import read_metrics, read_run
from replay.order import OrderFile
from scripts import collect
from tests.train.tiny_runs import ROOT


def test_what_is_kept_reads_as_the_run(runner, tmp_path, capsys):
    run = runner("whole")
    with (run.out / "metrics.jsonl").open("a") as log:
        log.write('{"step": 99, "loss"')  # a live run writes its next line
    assert collect.main([str(run.out), "--out", str(tmp_path), "--order"]) == 0
    kept = tmp_path / "whole.jsonl.xz"
    assert read_metrics(kept) == read_metrics(run.out) and read_run(kept) == read_run(run.out)
    subprocess.run(["xz", "-d", str(tmp_path / "whole.order.bin.xz")], check=True)
    with OrderFile(tmp_path / "whole.order.bin") as order, OrderFile(run.out / "order.bin") as own:
        assert order.sha256() == own.sha256()
    assert collect.main([str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    (run.out / "order.bin").unlink()
    assert collect.main([str(run.out), "--out", str(tmp_path / "new"), "--order"]) == 2
    assert not (tmp_path / "new").exists() and "leave out --order" in capsys.readouterr().err


def test_full_scale_runs_ends_in_time_and_goes_on(runner, corpus):
    """Stopped by its clock, with its log kept; called again it resumes."""
    out, results = runner.root / "full", runner.root / "results"
    environment = os.environ | {"GPUS": "2", "PYTHON": sys.executable, "CONFIG": "configs/cpu_flash_bf16.toml",
                                "DATASET": str(corpus), "OUT": str(out), "RESULTS": str(results),
                                "OMP_NUM_THREADS": "1"}
    flags = [a for a in runner.argv("unused") if not a.startswith(("--out_dir", "--dataset", "--max_iters",
                                                                  "--checkpoint_interval"))]

    def call(minutes, steps):
        return subprocess.run(["bash", "scripts/full_scale.sh", *flags, f"--max_iters={steps}"], cwd=ROOT, text=True,
                              env=environment | {"MINUTES": minutes}, capture_output=True, timeout=180)

    first = call("0.4", 1_000_000)
    assert "ended with status 124" in first.stdout, first.stderr
    assert read_metrics(results / "full.jsonl.xz") == read_metrics(out) != []  # to the step at which it stopped
    assert lzma.decompress((results / "full.order.bin.xz").read_bytes()) == (out / "order.bin").read_bytes()
    done = len(read_metrics(out))
    second = call("10", done + 20)
    assert "ended with status 0" in second.stdout, second.stderr
    assert max(r["step"] for r in read_metrics(results / "full.jsonl.xz")) == done + 20
