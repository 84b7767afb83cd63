"""A tiny corpus, and runs of train.py on it: in this process where possible, in one of their own where a signal, a
limit or a second rank is needed."""

import contextlib
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import checkpoint
import train
from metrics import read_metrics

ROOT = Path(__file__).parents[2]
TINY = dict(device="cpu", dtype="float32", compile=False, n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=2,
            gradient_accumulation_steps=2, max_iters=6, warmup_iters=2, lr_decay_iters=12, learning_rate=1e-2,
            eval_interval=3, eval_iters=3, checkpoint_interval=4, weight_decay=0.1)
TIMES = ("time", "tokens_per_s")  # what two equal runs may differ in


def write_corpus(folder: Path, train_tokens=20_000, val_tokens=4_000) -> Path:
    """Text of a few random words, as bytes: learnable, and gone through in no order that helps."""
    draw, splits = random.Random(7), {}
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 8))) for _ in range(50)]
    folder.mkdir(parents=True)
    for split, tokens in (("train", train_tokens), ("val", val_tokens)):
        text = " ".join(draw.choices(words, k=tokens))[:tokens]
        raw = np.frombuffer(text.encode(), dtype=np.uint8).astype("<u2").tobytes()
        (folder / f"{split}.bin").write_bytes(raw)
        splits[split] = {"tokens": tokens, "sha256": hashlib.sha256(raw).hexdigest()}
    (folder / "meta.json").write_text(json.dumps({"tokenizer": "bytes", "vocab_size": 256, "dtype": "uint16",
                                                  "splits": splits}))
    return folder


@dataclass
class Run:
    """A finished run: exit status, what it printed, and what it left in its folder."""

    out: Path
    code: int
    stdout: str
    stderr: str

    @property
    def records(self) -> list[dict]:
        """metrics.jsonl without clocks; of a step logged twice the later record."""
        return [{k: v for k, v in r.items() if k not in TIMES} for r in read_metrics(self.out)]

    @property
    def losses(self) -> list[float]:
        return [r["loss"] for r in self.records if "loss" in r]

    @property
    def state(self) -> dict:
        """The newest checkpoint."""
        return checkpoint.load_latest(self.out)

    @property
    def steps(self) -> list[int]:
        """Steps that have a checkpoint."""
        return [int(p.stem.split("_")[1]) for p in checkpoint.checkpoints(self.out)]

    @property
    def info(self) -> dict:
        return json.loads((self.out / "run.json").read_text())


def _tensors(value, name=""):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")


def _sessions(header: Path) -> list[dict]:
    return json.loads(header.read_text())["sessions"] if header.is_file() else []


@dataclass
class Runner:
    """Starts tiny runs; `flags` replace the defaults of TINY."""

    root: Path
    corpus: Path
    processes: list = field(default_factory=list)

    def argv(self, name: str, **flags) -> list[str]:
        flags = TINY | dict(out_dir=self.root / name, dataset=self.corpus) | flags
        return [f"--{key}={value}" for key, value in flags.items()]

    def __call__(self, name: str, code: int = 0, **flags) -> Run:
        """A run in this process, which must end with `code`."""
        out, err = io.StringIO(), io.StringIO()
        header = Path(flags.get("out_dir", self.root / name)) / "run.json"
        sessions = _sessions(header)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                got = train.main(self.argv(name, **flags))
            except SystemExit as stop:  # a flag that does not exist
                got = stop.code
        run = Run(Path(flags.get("out_dir", self.root / name)), got, out.getvalue(), err.getvalue())
        assert got == code, f"exit status {got} instead of {code}\n{run.stdout}\n{run.stderr}"
        for session in _sessions(header)[len(sessions):]:
            assert session.get("exit_code", got) == got, "run.json, by which scripts resume, has another exit status"
        return run

    def same(self, a: Run, b: Run):
        """Two runs that must not differ in a bit: every logged value, weights, optimizer state."""
        assert a.records == b.records
        assert len(a.losses) > 2
        self.same_state(a.state, b.state)

    def same_state(self, a: dict, b: dict):
        """Weights and optimizer state bit by bit (NaN would compare unequal)."""
        assert a["step"] == b["step"]
        a, b = dict(_tensors(a)), dict(_tensors(b))
        assert a.keys() == b.keys() and len(a) > 25
        assert not [name for name in a if not torch.equal(a[name], b[name])]

    def refused(self, name: str, **flags) -> str:
        """The message of a run that must be refused before it starts or writes anything."""
        run = self(name, code=2, **flags)
        assert not run.out.exists(), f"left {list(run.out.iterdir())}"
        assert "Traceback" not in run.stderr
        return run.stderr

    def interrupted(self, name: str, monkeypatch, call: int, method: str = "micro_batch", number=signal.SIGTERM,
                    **flags) -> Run:
        """A run that gets a signal when `Trainer.method` is called for the call-th time (from 0)."""
        original, calls = getattr(train.Trainer, method), []

        def wrapper(*args, **kwargs):
            if len(calls) == call:
                os.kill(os.getpid(), number)
            calls.append(1)
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(train.Trainer, method, wrapper)
            return self(name, code=128 + number, **flags)

    def spawn(self, name: str, **flags) -> subprocess.Popen:
        """A run in a process of its own."""
        return self.start([sys.executable, "train.py", *self.argv(name, **flags)])

    def start(self, command: list[str], **environment) -> subprocess.Popen:
        """A process at the repository's root, without a GPU, with one thread, and ended with the test at the latest."""
        fixed = dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | fixed | environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def wait(self, process: subprocess.Popen, name: str, timeout: float = 60) -> Run:
        out, err = process.communicate(timeout=timeout)
        return Run(self.root / name, process.returncode, out, err)

    def finished(self, name: str) -> Run:
        """What is left of a run, whoever ran it."""
        return Run(self.root / name, 0, "", "")

    def wait_for_step(self, process: subprocess.Popen, name: str, step: int, timeout: float = 60):
        """Returns once the run in `name` has logged `step`."""
        log, deadline = self.root / name / "metrics.jsonl", time.monotonic() + timeout
        while not (log.exists() and f'"step": {step},' in log.read_text()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, f"no step {step} within {timeout} s"
            time.sleep(0.01)
