"""What bench_attention.py leaves to processes of their own: builds of kernels, and launches that may never end.

A build takes seconds of one CPU core; Triton keeps it in its cache, where the process that measures finds it.
"""

import contextlib
import functools
import importlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

START_LIMIT = 90  # seconds in which a process must have imported what it needs
BUILD_LIMIT = 60


def spread(function: str, jobs: list[tuple], workers: int, limit: float, end: float) -> list:
    """What function(*job) returns for each job, in `workers` processes: None where that took longer than `limit`
    seconds, or past `end` (time.monotonic); {"error": ...} where it raised.

    function: "module:name". Jobs and answers are JSON. A process that is late is killed and another takes its place.
    """
    answers, waiting = [None] * len(jobs), queue.SimpleQueue()
    for i in range(len(jobs)):
        waiting.put(i)

    def serve():
        process = None
        with contextlib.suppress(queue.Empty):
            while time.monotonic() < end:
                i = waiting.get_nowait()
                if process is None:
                    process = subprocess.Popen([sys.executable, __file__, function], stdin=subprocess.PIPE,
                                               stdout=subprocess.PIPE, cwd=ROOT)
                    _line(process, min(START_LIMIT, end - time.monotonic()))
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(jobs[i]).encode() + b"\n")
                    process.stdin.flush()
                line = _line(process, min(limit, end - time.monotonic()))
                if line:
                    answers[i] = json.loads(line)
                else:
                    process = _end(process)
        _end(process)

    threads = [threading.Thread(target=serve) for _ in range(min(workers, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _line(process, seconds: float) -> bytes:
    """The next line that the process prints; empty where there is none in time, or none any more."""
    ready = select.select([process.stdout], [], [], max(0.0, seconds))[0]
    return process.stdout.readline() if ready else b""


def _end(process) -> None:
    """Kills it, and waits for a GPU to be rid of what it ran."""
    if process is not None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


def work(function: str) -> None:
    """A process of `spread`. Whatever jobs print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.empty(1, device="cuda")  # its start is not the first job's
    print(file=out, flush=True)
    for line in sys.stdin:
        try:
            answer = call(*json.loads(line))
        except Exception as e:  # a configuration that does not build or run is a result, too
            answer = {"error": f"{type(e).__name__} {str(e)[:200]}"}
        print(json.dumps(answer), file=out, flush=True)


class Built:
    """In place of a kernel: a launch builds it and runs nothing."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        return functools.partial(self.kernel.warmup, grid=grid)


@contextlib.contextmanager
def building(*modules):
    """While it lasts, the kernels of these modules are built where they would be launched."""
    before = [(module, name, x) for module in modules for name, x in vars(module).items() if name.endswith("_kernel")]
    for module, name, kernel in before:
        setattr(module, name, Built(kernel))
    try:
        yield
    finally:
        for module, name, kernel in before:
            setattr(module, name, kernel)


def build(choice: dict, dtype: str, T: int, D: int, stats: bool | None) -> bool:
    """Builds the forward kernel of AttentionSpec(**choice), or, where stats is None, its backward kernels."""
    import torch

    from attention import AttentionSpec, flash
    from attention.op import output_like, rest_like
    from scripts.bench_attention_common import RNG, tensors

    spec = AttentionSpec(**{name: tuple(x) if isinstance(x, list) else x for name, x in choice.items()})
    qkv, do = tensors((1, 2, T, D), getattr(torch, dtype))
    q, k, v = (x.detach() for x in qkv)
    with building(flash.kernels):
        if stats is None:
            o = output_like(q, spec.stores_fp32)
            rest = rest_like(o, spec) if spec.keeps_rest else None
            flash.backward(do.to(o.dtype), q, k, v, o, q.new_empty(1, 2, T, dtype=torch.float32), spec, rest)
        else:
            flash.forward(q, k, v, torch.tensor(RNG, device=q.device), spec, stats, 1)
    return True


def build_all(jobs, workers: int, end: float) -> None:
    """Builds in `workers` processes (none: every kernel when it is first launched), and says what was not built."""
    if not workers:
        return
    start = time.monotonic()
    answers = spread("scripts.bench_attention_workers:build", jobs, workers, BUILD_LIMIT, end)
    for job, answer in zip(jobs, answers, strict=True):
        if answer is not True:
            print("not built:", *job, "no answer" if answer is None else answer["error"])
    print(f"{answers.count(True)} of {len(jobs)} builds in {time.monotonic() - start:.0f} s", flush=True)


def builds(cases) -> list[tuple]:
    """Jobs of `build`, each once, slowest first. cases: (AttentionSpec fields, torch dtype, T, D, with statistics)."""
    from attention import AttentionSpec, flash

    jobs = {}
    for choice, dtype, T, D, stats in cases:
        spec, name = AttentionSpec(**choice), str(dtype).removeprefix("torch.")
        if spec.backend in ("sdpa", "standard"):
            continue
        T = T if T % 128 else 1024  # lengths that build the same kernels
        jobs[spec.key, name, T, D, stats] = (choice, name, T, D, stats)
        backward = (*flash._switches(spec, D).values(), spec.delta, spec.stores_fp32)
        jobs.setdefault((backward, name, T, D), (choice, name, T, D, None))
    return sorted(jobs.values(), key=lambda job: (AttentionSpec(**job[0]).operands != "fp32", job[4] is not None))


if __name__ == "__main__":
    work(sys.argv[1])
