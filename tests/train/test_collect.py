"""What is kept of a run says what the run's own files say; the full-scale script, on two ranks of a CPU."""

import gzip
import lzma
import os
import re
import subprocess
import sys

import pytest

from config import override
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


def test_what_is_kept_is_called_as_the_run(runner, tmp_path, capsys):
    """However it was given: folder, log, what was kept of it; two of one name are refused, or one would be lost."""
    run = runner("whole", max_iters=1).out
    gz = tmp_path / "old" / "whole.jsonl.gz"
    gz.parent.mkdir()
    gz.write_bytes(gzip.compress((run / "metrics.jsonl").read_bytes()))
    (tmp_path / "old" / "whole.run.json").write_bytes((run / "run.json").read_bytes())
    for i, path in enumerate((run, run / "metrics.jsonl", gz, tmp_path / "0" / "whole.jsonl.xz")):
        assert collect.main([str(path), "--out", str(tmp_path / str(i))]) == 0
        assert sorted(p.name for p in (tmp_path / str(i)).iterdir()) == ["whole.jsonl.xz", "whole.run.json"]
        capsys.readouterr()
        assert collect.main([str(path), str(run), "--out", str(tmp_path / "both")]) == 2
        assert "two runs share a name, among whole, whole" in capsys.readouterr().err


@pytest.fixture
def full_scale(runner, corpus):
    """Calls the script on the tiny run: function of its variables and further flags -> its process, ended."""
    own = ("--out_dir", "--dataset", "--max_iters", "--checkpoint_interval")
    flags = [a for a in runner.argv("unused") if not a.startswith(own)]
    fixed = {"PYTHON": sys.executable, "CONFIG": "configs/cpu_flash_bf16.toml", "DATASET": str(corpus), "GPUS": "2",
             "OUT": str(runner.root / "full"), "RESULTS": str(runner.root / "results"), "OMP_NUM_THREADS": "1",
             "CUDA_VISIBLE_DEVICES": ""}

    def call(*more, **variables):
        return subprocess.run(["bash", "scripts/full_scale.sh", *override(flags, *more)], cwd=ROOT, text=True,
                              timeout=180, env=os.environ | fixed | variables, capture_output=True)

    return call


def test_full_scale_runs_ends_in_time_and_goes_on(runner, full_scale):
    """Stopped by its clock, with its log kept, which is what it was to do; called again, on one rank, it resumes. What
    cannot go on changes nothing."""
    out, results = runner.root / "full", runner.root / "results"
    first = full_scale("--max_iters=1000000", MINUTES="0.4")
    assert first.returncode == 0 and "ended with status 0" in first.stdout and first.stderr == "", first
    assert read_run(out)["sessions"][-1]["exit_code"] == 143
    assert read_metrics(results / "full.jsonl.xz") == read_metrics(out) != []  # to the step at which it stopped
    assert lzma.decompress((results / "full.order.bin.xz").read_bytes()) == (out / "order.bin").read_bytes()
    done = len(read_metrics(out))
    second = full_scale(f"--max_iters={done + 20}", GPUS="")
    assert second.returncode == 0 and "ended with status 0" in second.stdout, second
    assert max(r["step"] for r in read_metrics(results / "full.jsonl.xz")) == done + 20
    kept = {path: path.read_bytes() for path in results.iterdir()}
    for flag, said in (("--max_iters=1", f"is at step {done + 20}, past --max_iters=1; give at least that, or another"),
                       ("--delta=dp_p", "was begun with delta=None, and this command says 'dp_p'; give the same, or "
                                        "another")):
        third = full_scale(*override([f"--max_iters={done + 25}"], flag))
        assert third.returncode == 2 and third.stderr == f"resume.py: {out} {said} --out_dir\n"
    assert {path: path.read_bytes() for path in results.iterdir()} == kept and len(read_run(out)["sessions"]) == 2
    fourth = full_scale(f"--max_iters={done + 25}", "--init_from=begun_with.pt", GPUS="")
    assert fourth.returncode == 0 and len(read_run(out)["sessions"]) == 3, fourth


@pytest.mark.parametrize("flags, variables, message", [
    ([], {"DATASET": "nowhere"}, "train.py: error: .*data folder .*nowhere does not exist"),
    ([], {"GPUS": "3"}, "train.py: error: .*is not divisible by the 3 ranks"),
    ([], {"MINUTES": "0"}, "full_scale.sh: MINUTES=0 is no number of minutes above 0"),  # timeout: no limit
    ([], {"RESULTS": "README.md/x"}, "full_scale.sh: RESULTS=README.md/x cannot be written"),
    (["--attention", "flash_fa2"], {}, "full_scale.sh: write --attention=NAME, by which OUT is called"),
    (["--out_dir=elsewhere"], {}, "full_scale.sh: --out_dir=elsewhere: the run is looked for in OUT=")])  # not kept
def test_full_scale_of_what_cannot_run_leaves_nothing(runner, full_scale, flags, variables, message):
    said = full_scale(*flags, **variables)
    assert said.returncode == 2 and not list(runner.root.iterdir()) and said.stdout == ""
    assert re.fullmatch(f"{message}.*", said.stderr.splitlines()[-1]), said.stderr


def test_full_scale_ends_with_the_status_of_the_run(runner, full_scale):
    """Both ranks meet a gradient that is not finite; torchrun itself would end with 1, behind a traceback."""
    said = full_scale("--learning_rate=1e15", "--warmup_iters=0", "--grad_clip=0", "--max_iters=9")
    assert said.returncode == 3 and "ended with status 3" in said.stdout, said
    assert said.stderr.splitlines()[-1].startswith("train.py: stopped: "), said.stderr
    assert read_metrics(runner.root / "results/full.jsonl.xz")
