"""Which rounding, which layer, which heads: the paper's isolation experiments (sections 3.2 and 3.3.2), over seeds.

    python scripts/isolate.py --dataset data/mini [--seeds 5] [--steps 10000] [--parallel 2] [--out runs/isolation]

For each seed flash_bf16 runs first. From its recorded norms this script proposes the layer and the heads that fail, and
then runs every arm on the same order, each until it counts as failed (failure.FailureRule) or reaches --steps. Run it
again to go on: arms that have their outcome are kept, interrupted ones resume. Further --key=value go to train.py.
Writes isolation.json into --out: rows by arm and seed, and by arm the rate of failure with its 95 % interval.
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from failure import failure_of
from scripts.arms import RESULTS, outcome, run_arms
from scripts.runs import Run, load_run

FAILS, STABLE = "fails", "stable"
# arm: (section, the paper's outcome on GPT-2 small, flags); {layer}, {heads} and {head} are what the norms propose
ARMS = {
    "flash_bf16": ("3.1", FAILS, []),
    "no_tiling": ("3.2", FAILS, ["--tile_k=full"]),
    "flash_in_that_layer_only": ("3.2", FAILS, ["--attention_override={layer}=flash_bf16,default=standard"]),
    "standard_in_that_layer": ("3.2", STABLE, ["--attention_override={layer}=standard"]),
    "delta_dp_p": ("3.2", STABLE, ["--delta=dp_p"]),
    "o_recomputed": ("3.2", STABLE, ["--delta=do_o_recomputed"]),
    "o_fp32": ("3.2", STABLE, ["--output=fp32", "--pv=fp32"]),
    "o_fp32_outlier_heads": ("3.2", STABLE, ["--output_heads={layer}:{heads}"]),
    "o_fp32_worst_head": ("-", "not tried", ["--output_heads={layer}:{head}"]),
    "pv_fp32": ("3.3.2", STABLE, ["--pv=fp32"]),
}


def propose(run: Run) -> dict:
    """The layer whose W_Q has the largest norm at the last probe, its worst head, and its heads above their mean,
    which in the paper's figure 3 are the six that it calls outliers. Errors: ValueError for a run without probes."""
    layers = run.layers("probe/wq_norm_head/layer")
    if not layers:
        raise ValueError(f"{run.name} has no probe/wq_norm_head values; run it with --probe_interval=100")
    last = {layer: values[-1] for layer, (_, values) in layers.items()}
    layer = max(last, key=lambda i: max(last[i]))
    norms = last[layer]
    mean = sum(norms) / len(norms)
    return {"layer": layer, "head": norms.index(max(norms)), "norms": norms,
            "heads": [h for h, norm in enumerate(norms) if norm > mean]}


def interval(failed: int, runs: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate of `failed` in `runs` (E. B. Wilson, 1927); (0, 1) of no runs."""
    if not runs:
        return 0.0, 1.0
    p, n = failed / runs, runs
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def row(arm: str, seed: int, folder: Path, proposal: dict | None) -> dict:
    """One line of isolation.json; `failed` is None for a run that is not finished."""
    status = outcome(folder)
    found = dict.fromkeys(("arm", "seed", "failed", "step_of_failure", "final_loss", "last_step"))
    found |= {"arm": arm, "seed": seed}
    if not (folder / "metrics.jsonl").exists():
        return found
    run = load_run(folder)
    found |= {"final_loss": run.series("loss")[1][-1], "last_step": run.steps - 1}
    if status in RESULTS:
        found |= {"failed": status != 0, "step_of_failure": failure_of(run.records)}
    if proposal:
        for name in ("ties", "wq_norm"):
            values = run.layers(f"probe/{name}/layer").get(proposal["layer"], ([], []))[1]
            found[name] = values[-1] if values else None
    return found


def summary(rows: list[dict]) -> list[dict]:
    """By arm: failures in finished runs, the interval of their rate, unfinished runs, and the paper's outcome."""
    found = []
    for arm, (section, paper, _) in ARMS.items():
        mine = [r for r in rows if r["arm"] == arm]
        done = [r for r in mine if r["failed"] is not None]
        failed = sum(r["failed"] for r in done)
        low, high = interval(failed, len(done))
        found.append({"arm": arm, "section": section, "paper": paper, "failed": failed, "finished": len(done),
                      "unfinished": len(mine) - len(done), "rate_low": low, "rate_high": high})
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/mini_flash_bf16.toml", help="the failing run")
    parser.add_argument("--dataset", default="mini", help="folder with train.bin and val.bin")
    parser.add_argument("--out", type=Path, default=Path("runs/isolation"))
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1 to N, of weights and order")
    parser.add_argument("--steps", type=int, default=10000, help="an arm that has not failed by then is stable")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS), metavar="ARM",
                        help=f"default: {' '.join(ARMS)}")
    parser.add_argument("--parallel", type=int, default=2, help="arms at a time")
    args, extra = parser.parse_known_args(argv)
    gpus, rows = torch.cuda.device_count(), []
    common = [args.config, f"--dataset={args.dataset}", f"--max_iters={args.steps}", "--stop_when_failed=True", *extra]
    for seed in range(1, args.seeds + 1):
        folder, flags = args.out / f"seed{seed}", [*common, f"--seed={seed}"]
        first = "flash_bf16"
        if run_arms({first: flags}, folder, 1, gpus)[first] not in RESULTS:
            print(f"isolate: {folder / first} has no outcome, see {folder / first}.log", file=sys.stderr)
            return 1
        proposal = propose(load_run(folder / first))
        print(f"seed {seed}: layer {proposal['layer']}, worst head {proposal['head']}, "
              f"outlier heads {proposal['heads']}; norms {[round(n, 1) for n in proposal['norms']]}")
        words = {"layer": proposal["layer"], "head": proposal["head"], "heads": ",".join(map(str, proposal["heads"]))}
        arms = {arm: [*flags, *(flag.format(**words) for flag in ARMS[arm][2])] for arm in args.arms if arm != first}
        run_arms(arms, folder, args.parallel, gpus)
        rows += [{**row(arm, seed, folder / arm, proposal), "layer": proposal["layer"]} for arm in [first, *arms]]
        table = summary(rows)
        (args.out / "isolation.json").write_text(json.dumps({"rows": rows, "summary": table}, indent=1) + "\n")
    print(f"{'arm':<26}{'paper':<11}failed  rate, 95 %")
    for line in table:
        print(f"{line['arm']:<26}{line['paper']:<11}{line['failed']} of {line['finished']}  "
              f"{line['rate_low']:.2f} to {line['rate_high']:.2f}"
              + (f"  ({line['unfinished']} unfinished)" if line["unfinished"] else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
