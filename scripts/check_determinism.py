"""Does a run repeat bit for bit, and does its order replay on one rank?

    python scripts/check_determinism.py configs/gpt2_small_flash_bf16.toml --steps=300 --ranks=2 [--key=value ...]

Runs train.py twice on --ranks GPUs (processes, on a CPU), and compares every logged number of every step and all
weights and optimizer states at the end, bit for bit. With more than one rank it also replays the recorded order on one,
over --replay_steps steps: the offsets have to be the same, and the losses the same to --tolerance nats.
Further flags are train.py's; without --dataset the data are random tokens. Writes runs, logs and check.json into --out.
Exit status 1 where something differs.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import checkpoint
from config import check_once, load, override
from files import write_text
from metrics import MetricsError, read_metrics, read_run, to_json
from replay.order import OrderFile
from scripts.arms import FURTHER
from scripts.bench_throughput import random_corpus
from scripts.targets import check_targets, named

ROOT = Path(__file__).resolve().parents[1]
CLOCKS = ("time", "tokens_per_s")


def run(out: Path, ranks: int, argv: list[str]) -> None:
    """One run into `out`; what it prints goes to out.log. Errors: SystemExit where it fails."""
    launcher = ["scripts/ranks.py", str(ranks)] if ranks > 1 else ["train.py"]
    command = [sys.executable, *launcher, *override(argv, f"--out_dir={out}")]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": "0"} if ranks == 1 and torch.cuda.is_available() else {})
    print("$ " + " ".join(command), flush=True)
    with open(f"{out}.log", "w", encoding="utf-8") as log:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"check_determinism: the run ended with status {code}; its last lines, from {out}.log:\n"
                         + "\n".join(Path(f"{out}.log").read_text(encoding="utf-8").splitlines()[-5:]))


def differences(first: Path, second: Path) -> list[str]:
    """What two runs that should be one differ in, in words: the first step and number, and tensors at the end."""
    a, b = ([{k: v for k, v in record.items() if k not in CLOCKS} for record in read_metrics(one)]
            for one in (first, second))
    found = []
    if len(a) != len(b):
        found.append(f"one run logged {len(a)} steps, the other {len(b)}")
    elif to_json(a) != to_json(b):  # where NaN equals NaN
        step, name = next((x["step"], name) for x, y in zip(a, b, strict=True) for name in x | y
                          if to_json(x.get(name)) != to_json(y.get(name)))
        found.append(f"{name} first differs at step {step}")
    left, right = (dict(_tensors(checkpoint.load_latest(one))) for one in (first, second))
    changed = [name for name in left | right if name not in left or name not in right
               or not torch.equal(left[name], right[name])]
    if changed:
        found.append(f"{len(changed)} of {len(left)} tensors of the checkpoints differ, first {changed[0]}")
    return found


def _tensors(value, name: str = ""):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key))


def compare_replay(recorded: Path, replayed: Path, steps: int) -> tuple[bool, float]:
    """Whether the offsets of the first `steps` steps agree, and the largest difference of a loss, in nats."""
    orders = [OrderFile(one / "order.bin") for one in (recorded, replayed)]
    losses = [{r["step"]: r["loss"] for r in read_metrics(one) if "loss" in r} for one in (recorded, replayed)]
    return (orders[0].sha256(steps) == orders[1].sha256(steps),
            max(abs(losses[0][step] - losses[1][step]) for step in range(steps)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog=FURTHER,
                                     allow_abbrev=False)  # --replay is train.py's, not short for --replay_steps
    parser.add_argument("config", help="a config file of train.py")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps a run")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, or processes on a CPU")
    parser.add_argument("--replay_steps", type=int, default=100, help="steps that the replay on one rank makes")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="nats between a loss and its replay on one rank")
    parser.add_argument("--out", type=named, default=Path("runs/determinism"), help="a folder that does not exist yet")
    check_once(sys.argv[1:] if argv is None else argv)
    args, flags = parser.parse_known_args(argv)
    if args.out.exists():
        print(f"check_determinism: {args.out} exists; choose another --out or remove it", file=sys.stderr)
        return 2
    check_targets(folders=(args.out,))
    for name in ("steps", "ranks", "replay_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)} must be at least 1")
    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance={args.tolerance} must be zero or more")
    load([args.config, *flags])  # a flag that is wrong is told here, before anything is written
    args.out.mkdir(parents=True)
    common = override([args.config, *flags], "--log_interval=1", f"--checkpoint_interval={args.steps}",
                      f"--eval_interval={args.steps}", "--keep_checkpoints=1")
    if not any(flag.split("=")[0] == "--dataset" for flag in flags):
        common.append(f"--dataset={random_corpus(args.out / 'corpus')}")
    first, second, one = (args.out / name for name in ("first", "second", "one_rank"))
    for out in (first, second):
        run(out, args.ranks, override(common, f"--max_iters={args.steps}"))
    found = differences(first, second)
    info = read_run(first)
    result = {"config": args.config, "steps": args.steps, "ranks": args.ranks, "equal": not found,
              "differences": found, "hardware": info["device_name"], "commit": info["git_commit"],
              "versions": info["versions"], "flags": flags}
    said = [f"{args.steps} steps twice on {args.ranks} rank(s): " + ("; ".join(found) or "equal, bit for bit")]
    good = not found
    if args.ranks > 1:
        steps = min(args.steps, args.replay_steps)
        run(one, 1, override(common, f"--max_iters={steps}", f"--replay={first / 'order.bin'}"))
        same, largest = compare_replay(first, one, steps)
        result |= {"replay_steps": steps, "replay_offsets_equal": same, "replay_largest_loss_difference": largest}
        said.append(f"replayed on one rank over {steps} steps: offsets {'equal' if same else 'DIFFERENT'}, losses to "
                    f"{largest:.2e} nats (allowed: {args.tolerance:g})")
        good = good and same and largest <= args.tolerance
    write_text(args.out / "check.json", json.dumps(result, indent=1) + "\n")
    print("\n".join(said))
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError, MetricsError, checkpoint.CheckpointError) as error:
        print(f"check_determinism: {error}", file=sys.stderr)
        sys.exit(2)
