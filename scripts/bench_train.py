"""Tokens a second, peak memory, and what a step spends outside the model.

    python scripts/bench_train.py configs/gpt2_small_flash_bf16.toml --dataset=data/mini --steps=30

Takes a config and flags as train.py does, and those below besides. Parts outside the model (reading
batches, recording and replaying the order, logging, probes, checkpoints) are timed alone, one after the other, so their
share is an upper bound: in training, reading overlaps the device's work. Writes to a temporary folder.
probe_ms is one of --probe_interval, by default every 100 steps, exact_probe_ms one at an evaluation, monitor_ms one of
the monitor alone.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import distributed
from config import ConfigError, as_dict, check_once, load, override
from determinism import set_determinism
from files import write_text
from metrics import Metrics
from plan import prepare
from replay.order import OrderFile, Recorder
from runinfo import describe_run, print_header
from scripts.arms import FURTHER
from scripts.targets import check_targets, named
from stop import StopRequested, StopSignal
from trainer import Trainer


def seconds(work, device, repeats: int) -> float:
    """Median wall-clock seconds of work(i) over `repeats` calls, the device's queue empty before and after."""
    times = []
    for i in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work(i)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(argv: list[str], steps: int) -> dict:
    """Runs a few warm-up and `steps` timed steps of the config that argv names; returns what main prints."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config = load(override(argv, f"--out_dir={folder}/run", "--init_from=scratch"))
        config = dataclasses.replace(config, probe_interval=config.probe_interval or 100)
        plan = prepare(config)
        set_determinism(config.seed, config.deterministic)
        group = distributed.init(config.device, config.collective_timeout_s)
        stack.callback(group.close)
        trainer = Trainer(config, plan, group, StopSignal())
        device, info = trainer.device, describe_run(config, plan, group, trainer)
        print_header(info, group)
        metrics = stack.enter_context(contextlib.closing(Metrics(config.out_dir, as_dict(config), info, group.is_main)))
        recorder = stack.enter_context(contextlib.closing(Recorder(Path(folder) / "order.bin", plan.header)))

        def step(_):
            trainer.optimizer.set_lr(trainer.step)
            trainer.update(trainer.gradients())

        seconds(step, device, 5)  # compilation and the allocator's first requests
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        whole = seconds(step, device, steps)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None

        batches = seconds(lambda i: [trainer.micro_batch(i, m) for m in range(trainer.micro_batches)], device, 20)
        record = {"step": 0, "loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": 1, "time": time.time()}
        log = seconds(lambda i: metrics.log(record | {"step": i}), device, 50) / config.log_interval
        append = seconds(lambda i: recorder.append(i, trainer.row(i)), device, 50)
        recorder.sync()
        order = OrderFile(Path(folder) / "order.bin")
        replay = seconds(lambda i: order.row(i), device, 50)
        probe, exact, monitor = (seconds(lambda i, kind=kind: trainer.probe(*kind).record(), device, 20)
                                 for kind in ((True, False), (True, True), (False, False)))
        stalls, writes = [], []
        for i in range(4):  # training waits for the copy alone; a thread writes
            stalls.append(seconds(lambda _, i=i: trainer.writer.save(folder, i, trainer.state(), 1), device, 1))
            writes.append(seconds(lambda _: trainer.writer.settle(), device, 1))
        save = statistics.median(stalls[1:])  # the first one allocates its host memory
        outside = batches + log + append + save / config.checkpoint_interval
        return {"config": argv[0] if argv else "", "attention": config.attention, "gpus": group.world_size,
                "device": info["device_name"], "commit": info["git_commit"], "versions": info["versions"],
                "tokens_per_step": config.tokens_per_step, "step_ms": 1e3 * whole,
                "tokens_per_s": config.tokens_per_step / whole, "peak_memory_gib": peak,
                "batches_ms": 1e3 * batches, "loader_tokens_per_s": config.tokens_per_step / group.world_size / batches,
                "log_ms": 1e3 * log, "record_ms": 1e3 * append, "replay_ms": 1e3 * replay, "checkpoint_ms": 1e3 * save,
                "checkpoint_first_ms": 1e3 * stalls[0], "checkpoint_thread_ms": 1e3 * statistics.median(writes),
                "probe_ms": 1e3 * probe, "exact_probe_ms": 1e3 * exact, "monitor_ms": 1e3 * monitor,
                "probe_share": probe / config.probe_interval / whole,
                "monitor_share": monitor / config.monitor_interval / whole,
                "outside_share": outside / whole, "record_share": append / whole, "replay_share": replay / whole}


def main(argv: list[str]) -> int:
    """Exit status: 0, or 128 + the signal that ended it. Errors: ValueError, OSError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s [CONFIG.toml] [--key=value ...]", epilog=FURTHER,
                                     allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=30, help="timed steps; default 30")
    parser.add_argument("--json", type=named, metavar="FILE", help="write what is printed")
    check_once(argv)
    options, rest = parser.parse_known_args(argv)
    if options.steps < 1:
        raise ConfigError(f"--steps={options.steps} must be at least 1")
    check_targets(options.json)
    try:
        result = measure(rest, options.steps)
    except StopRequested as stop:
        if os.environ.get("RANK", "0") == "0":
            print("bench_train.py: stopped by a signal before all was measured; nothing is written", file=sys.stderr)
        return stop.status
    if options.json:
        write_text(options.json, json.dumps(result, indent=1) + "\n")
    for name, value in result.items():
        print(f"{name:>20}: {value:.4g}" if isinstance(value, float) else f"{name:>20}: {value}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"bench_train.py: {error}")
