"""The sbatch script with stand-ins for Slurm's commands: what it would start."""

import os
import subprocess
import sys
from pathlib import Path

from config import as_dict, load
from metrics import to_json

ROOT = Path(__file__).parents[2]


def submit(tmp_path, *args, **variables):
    for name, text in (("srun", 'echo "$@"'), ("scontrol", "printf 'first\\nsecond\\n'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHON=sys.executable, SLURM_JOB_ID="7",
                            SLURM_JOB_NODELIST="n[1-2]", SLURM_GPUS_ON_NODE="4") | variables
    return subprocess.run(["bash", "scripts/slurm/train.sbatch", *args], cwd=ROOT, env=env, capture_output=True,
                          text=True, timeout=60)


def test_two_nodes_and_a_job_that_was_stopped(tmp_path):
    """The agents meet at the first node, and a second submission resumes where there is a checkpoint."""
    args = ("configs/cpu_standard.toml", f"--out_dir={tmp_path / 'run'}")
    slurm = dict(SLURM_SUBMIT_DIR=str(ROOT), SLURM_NNODES="2")
    first = submit(tmp_path, *args, **slurm)
    assert first.returncode == 0, first.stderr
    assert "scripts/ranks.py 4 --nnodes=2 " in first.stdout
    assert first.stdout.rstrip().endswith(f"--rdzv_endpoint=first:29500 {' '.join(args)}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt_00000005.pt").touch()
    again = submit(tmp_path, *args, **slurm)
    assert again.stdout.rstrip().endswith(f" {' '.join(args)} --init_from=resume")
    (tmp_path / "run" / "run.json").write_text(to_json({"config": as_dict(load([args[0]]))}))
    other = submit(tmp_path, *args, "--seed=7", **slurm)
    assert other.returncode == 2 and not other.stdout
    assert other.stderr == (f"resume.py: {tmp_path / 'run'} was begun with seed=1337, and this command says 7; give "
                            "the same, or another --out_dir\n")


def test_refused(tmp_path):
    """Outside sbatch, and a config that does not exist: said before anything is started."""
    assert "start with sbatch" in submit(tmp_path, "x.toml").stderr
    wrong = submit(tmp_path, "configs/none.toml", SLURM_SUBMIT_DIR=str(ROOT), SLURM_NNODES="1")
    assert wrong.returncode != 0 and not wrong.stdout
    assert "cannot read the config file configs/none.toml" in wrong.stderr
