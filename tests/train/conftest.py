"""Fixtures: a tiny corpus, and runs of train.py on it (tiny_runs.py)."""

import signal
from pathlib import Path

import pytest
import torch
from tiny_runs import Runner, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture
def runner(tmp_path, corpus, monkeypatch):
    """A Runner; afterwards signals, seeds and determinism flags are what they were, and no process is left."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)  # the tensors are tiny, and a run in a subprocess has one thread too
    one = Runner(tmp_path, corpus)
    yield one
    for process in one.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
