"""What a run says about itself: printed as its header and written to run.json, so that a report needs no memory."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from attention import kernel_for
from attention.spec import from_key
from config import as_dict
from replay.switches import companion, read_switches
from settings import unread


def describe_run(config, plan, group, trainer) -> dict:
    """The run header as plain values (JSON); `plan` and `trainer` as train.py makes them."""
    tokens = plan.tokens["train"]
    kernels = {kernel_for(spec, group.device) for spec in plan.specs}
    triton = [spec for spec in plan.all_specs if kernel_for(spec, group.device) == "triton"]  # or an error, now
    info = {
        "name": config.wandb_run_name or Path(config.out_dir).name,
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "config": as_dict(config),
        "attention": [spec.describe() for spec in plan.specs],
        "kernels": sorted(kernels),
        "tokens_per_step": config.tokens_per_step,
        "n_params": trainer.raw.num_params(),
        "optimizer": trainer.optimizer.describe(),
        "data": {"path": str(tokens.path), "tokens": tokens.n_tokens, "sha256": tokens.sha256},
        "order": _describe_order(config, plan),
        **({"monitor": _describe_monitor(config)} if config.monitor != "off" else {}),
        "start_step": plan.start,
        "world_size": group.world_size,
        "device": group.device.type,
        "device_name": torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else processor(),
        **git_state(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
        | {name: _version(name) for name in ("triton", "numpy")},
    }
    if triton:
        from attention.flash import describe_launch

        head = config.n_embd // config.n_head
        info["launch"] = sorted({describe_launch(spec, head, group.device, config.block_size,
                                                 getattr(torch, config.dtype)) for spec in triton})
    return info


def print_header(info: dict, group) -> None:
    """The header a person reads; the full config is in run.json."""
    order, chunk, seed = info["order"], info["config"]["loss_chunk"], info["config"]["seed"]
    drawn = order.get("seed", seed)
    mixed = drawn not in (None, seed) and info["config"]["init_from"] == "scratch"
    lines = {
        "run": f"{info['name']}  ({info['config']['out_dir']})",
        "model": f"{info['n_params']:,} parameters without positions, {info['config']['n_layer']} layers",
        "step": f"{info['tokens_per_step']:,} tokens: {info['config']['gradient_accumulation_steps']} micro-batches x "
                f"{info['config']['batch_size']} sequences x {info['config']['block_size']} tokens over "
                f"{info['world_size']} rank(s)" + (f", loss {chunk} tokens at a time" if chunk else ""),
        "data": f"{info['data']['path']}, {info['data']['tokens']:,} tokens, sha256 {info['data']['sha256'][:12]}",
        "order": f"{order['mode']} {order['path']}" + (f", first {order['rows']} rows, sha256 {order['sha256'][:12]}"
                                                       if order["sha256"] else "")
                 + (f"; drawn with seed {drawn}, these weights are of seed {seed}" if mixed else ""),
        "device": f"{info['device_name']}, attention by {' and '.join(info['kernels'])}, "
                  f"autocast {info['config']['dtype']}, "
                  + (f"compiled ({info['config']['compile_mode']})" if info["config"]["compile"] else "not compiled"),
        "code": f"commit {info['git_commit'][:12]}{' (changed)' if info['git_dirty'] else ''}, "
                + ", ".join(f"{k} {v}" for k, v in info["versions"].items() if v),
    }
    if idle := unread(info["config"]):
        lines["unread"] = ", ".join(idle)
    if "monitor" in info:
        lines["monitor"] = info["monitor"]
    for name, text in lines.items():
        group.print(f"{name:>7}: {text}")
    for first, last, text in _runs(info["attention"]):
        group.print(f"{'layer ' if first == last else 'layers '}{first}{'' if first == last else f'-{last}'}: {text}")
    for text in info.get("launch", []):
        group.print(f" launch: {text}")
    group.print(info["optimizer"])


def print_switches(config, plan, group) -> None:
    """The layers that change their attention on the way, and known switches that this run does not make."""
    for switch in plan.switches:
        group.print(f" switch: layer {switch.layer} from step {switch.step} on: {from_key(switch.spec).describe()}")
    if config.replay and not config.replay_switches and companion(config.replay).exists():
        count = len(read_switches(companion(config.replay)))
        group.print(f" switch: {count} of {companion(config.replay)} not replayed; --replay_switches=True does it")
    if config.init_from != "resume" and (count := len((plan.state or {}).get("switches", ()))):
        group.print(f" switch: {count} of {config.init_from} not taken over, only --init_from=resume does that")


def _describe_order(config, plan) -> dict:
    if plan.order:
        return {"mode": "replayed", "path": str(config.replay), "rows": config.max_iters,
                "sha256": plan.order.sha256(config.max_iters), "seed": plan.order.header.seed}
    path = str(Path(config.out_dir) / "order.bin") if config.record else ""
    return {"mode": "recorded" if config.record else "drawn", "path": path, "rows": None, "sha256": None}


def _describe_monitor(config) -> str:
    watched = ", ".join(f"{name} > {value:g}" for name, value in config.monitor_thresholds.items())
    remedy = f" to {config.monitor_remedy}" if config.monitor == "switch" else ""
    return f"{config.monitor}{remedy} on {watched}, every {config.monitor_interval} steps"


def _runs(lines: list[str]):
    """Consecutive equal lines as (first, last, line)."""
    start = 0
    for i in range(1, len(lines) + 1):
        if i == len(lines) or lines[i] != lines[start]:
            yield start, i - 1, lines[start]
            start = i


def git_state() -> dict:
    """The commit that runs, and whether tracked files differ from it; outside a git checkout (a container, say) what
    the environment's GIT_COMMIT says, or "unknown"."""
    def ask(*args):
        return subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10,
                              check=True).stdout.strip()

    try:
        return {"git_commit": ask("rev-parse", "HEAD"), "git_dirty": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {"git_commit": os.environ.get("GIT_COMMIT", "unknown"), "git_dirty": False}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Its name, of this machine."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
