"""The small run, in minutes on one GPU: record flash_bf16, replay its batches under other arms, say what ran away.

    python scripts/reproduce_mini.py --dataset data/mini [--out runs/mini] [--steps 5000] [--seed 1]

flash_bf16 trains, at most until its loss fails, and records its order; the other arms replay it side by side. Writes
figure.png, layers.png and comparison.json into --out, and ends with two sentences. Interrupted or killed, the same
command goes on. An arm is NAME or NAME:SWITCH=VALUE[:SWITCH=VALUE], e.g. flash_bf16:delta=dp_p.

What to expect by step 5,000, as seen in results/mini: scores of layer 1 run away (above 1,000) under flash_bf16 in 10
of 10 seeds (in seed 2 it is layer 2), under stabilized in 3 of 3, under flash_fa2 in 2 of 5 (not in seed 1); with delta
= rowsum(dP P) in 0 of 10, under standard and flash_fp32 in 0 of 1 (seed 1). flash_fa2:smooth_k=-7, flash_fa2 of keys
whose mean is eight times as long, which exact arithmetic does not notice, runs away in 10 of 10 and its loss fails by
4,030 (in seed 1 at 3,310); with delta = rowsum(dP P) 0 of 4 do. Other arms to try: flash_bf16:smooth_k=1, keys less
their mean (0 of 4), and sdpa (3 of 5, not in seed 1). flash_bf16's loss fails later, or not: by step 10,000 in 1 of 3
seeds, in seed 1 at 8,590. The same command with --steps 10000 goes on and waits for it.

On one H200 the arms of Triton kernels take 8.4 minutes together; standard, which torch computes, comes last and takes
about 3 more (--arms leaves it out).
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from config import ConfigError, check_once, override
from metrics import MetricsError
from replay.order import OrderFile
from scripts import compare
from scripts.arms import FURTHER, RESULTS, check_arm, check_begun, check_extra, check_goes_on, run_arms
from scripts.monitor import LARGE_SCORE
from scripts.targets import check_targets, named
from stop import EXIT_SIGINT

RECORDED = "flash_bf16"
ARMS = ("flash_bf16:delta=dp_p", "flash_fa2:smooth_k=-7", "flash_fa2", "flash_fa2:smooth_k=-7:delta=dp_p", "stabilized",
        "flash_fp32", "standard")


def argv_of(arm: str, common: list[str]) -> tuple[str, list[str]]:
    """An arm's run name and flags: of flash_bf16:delta=dp_p they are flash_bf16_delta_dp_p and --delta=dp_p."""
    backend, *switches = arm.split(":")
    name = "_".join([backend, *(s.replace("=", "_") for s in switches)])
    return name, override(["configs/mini_flash_bf16.toml", *common], f"--attention={backend}",
                          *(f"--{s}" for s in switches))


def what_ran_away(rows: list[dict]) -> str:
    """comparison.json's runs in two sentences: under which arms scores ran away, where, and under which they did not;
    and the same of W_Q."""
    sentences = []
    for what, yes, event in ((f"Scores (above {LARGE_SCORE:g})", "scores_ran_away", "scores"),
                             ("W_Q", "ran_away", "runaway")):
        parts = {"ran away under": [f"{row['name']} (layer {row[f'layer_of_{event}']}, step {row[f'step_of_{event}']})"
                                    for row in rows if row[yes]] or ["none"],
                 "not under": [f"{row['name']} ({row['steps']} steps)" for row in rows if row[yes] is False],
                 "not probed under": [row["name"] for row in rows if row[yes] is None]}
        sentences.append(f"{what} " + "; ".join(f"{words} {', '.join(n)}" for words, n in parts.items() if n) + ".")
    return "\n".join(sentences)


def check(args: argparse.Namespace, extra: list[str], name: str, first: list[str], common: list[str]) -> None:
    """What would go wrong hours later, when an arm's turn comes. Errors: ConfigError, MetricsError, OSError."""
    check_targets(folders=(args.out,))
    own = {"max_iters": "give --steps", "out_dir": "give --out"} | dict.fromkeys(
        ("record", "replay"), f"{RECORDED} draws the order that the others replay")
    switches = {arm: [f"--{switch}" for switch in arm.split(":")[1:]] for arm in args.arms}
    check_extra(extra, own | {"attention": "name it in --arms"}, switches)
    check_extra([flag for flags in switches.values() for flag in flags],
                own | {"attention": "an arm begins with it", "dataset": "give --dataset"}, {})
    others = dict(argv_of(arm, common) for arm in args.arms)
    if name in others or len(others) < len(args.arms):
        raise ConfigError(f"--arms {' '.join(args.arms)}: an arm is named twice, or {RECORDED}, which is recorded")
    for arm, flags in {name: first, **others}.items():
        config = check_arm(arm, flags)
        if not config.probe_interval and config.monitor == "off":
            raise ConfigError(f"arm {arm}: whether W_Q runs away is seen in probes, and probe_interval=0; add "
                              "--probe_interval=100")
        check_begun(args.out / arm, flags)
        check_goes_on(args.out / arm)  # to how many steps is known only when the first one has ended
    if args.parallel < 1:
        raise ConfigError(f"--parallel={args.parallel} must be at least 1")


def replay(args: argparse.Namespace, common: list[str], order: Path) -> dict[str, int]:
    """Runs the other arms on the batches of a recorded order; exit statuses by name."""
    with OrderFile(order) as recorded:
        rows = recorded.rows  # fewer than --steps where the recorded run stopped early
    common = override(common, f"--max_iters={rows}", f"--replay={order.absolute()}")
    others = dict(argv_of(arm, common) for arm in args.arms)
    return run_arms(others, args.out, args.parallel, torch.cuda.device_count(), steps=rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog=FURTHER,
                                     allow_abbrev=False)  # --seed and the like may be meant for train.py
    parser.add_argument("--dataset", default="mini", help="folder with train.bin and val.bin")
    parser.add_argument("--out", type=named, default=Path("runs/mini"), help="folder of the runs, and of what is found")
    parser.add_argument("--steps", type=int, default=5000,
                        help="optimizer steps an arm: 5000 (the default) for W_Q, 10000 for the loss")
    parser.add_argument("--seed", type=int, default=1, help="of weights and order")
    parser.add_argument("--arms", nargs="*", default=ARMS, metavar="ARM", help=f"default: {' '.join(ARMS)}")
    parser.add_argument("--parallel", type=int, default=torch.cuda.device_count() or 1,
                        help="arms at a time (default: one a GPU, the next of which compiles during its last seconds)")
    args, extra = parser.parse_known_args(argv)
    common = [f"--dataset={args.dataset}", f"--max_iters={args.steps}", f"--seed={args.seed}", *extra]
    name, first = argv_of(RECORDED, override(common, "--stop_when_failed=True"))
    try:
        check_once(sys.argv[1:] if argv is None else argv)
        check(args, extra, name, first, common)
    except (ConfigError, MetricsError, OSError) as error:
        print(f"reproduce_mini: {error}", file=sys.stderr)
        return 2
    try:
        codes = run_arms({name: first}, args.out, 1, torch.cuda.device_count(), steps=args.steps)
        order = args.out / name / "order.bin"
        if codes[name] not in RESULTS or not order.exists():
            print((args.out / f"{name}.log").read_text(encoding="utf-8")[-2000:], file=sys.stderr)
            return codes[name] or 1
        codes |= replay(args, common, order)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return EXIT_SIGINT
    if failed := [arm for arm, code in codes.items() if code not in RESULTS]:
        print(f"reproduce_mini: {len(failed)} arm(s) ended without a result, see {args.out / failed[0]}.log; the same "
              "command goes on", file=sys.stderr)
        return 1
    names = [name, *(argv_of(arm, common)[0] for arm in args.arms)]
    runs = [str(args.out / arm) for arm in names if (args.out / arm / "metrics.jsonl").exists()]
    found = args.out / "comparison.json"
    code = compare.main([*runs, "-o", str(args.out / "figure.png"), "--layers", str(args.out / "layers.png"),
                         "--json", str(found)])
    if code == 0:
        print("\n" + what_ran_away(json.loads(found.read_text(encoding="utf-8"))["runs"]))
    return code


if __name__ == "__main__":
    sys.exit(main())
