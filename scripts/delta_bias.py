"""Is the error of delta biased, and does it push W_Q along? Every head of a layer, over many sequences of a run.

    python scripts/delta_bias.py RUN --steps 2000:4000 --layer 1 --sequences 256 [--heads 2 3] [--out delta_bias.json]

A checkpoint of step s reads the recorded rows of steps s, s + 1, ... until it has --sequences of them, or the last ones
where these end before. For every head, means over sequences with their standard errors: the sum of delta_lp - delta_hp
over a sequence (the paper's figure 5a), and its push, what that error does to the largest singular value of the head's
W_Q (`diagnostics.bias.pushes`), beside what the exact gradient does. t is mean over standard error; beyond 3 either way
is a bias. Losses are scaled as in training, so that a mean times the sequences of a step is what a step adds up.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import checkpoint
from config import ConfigError
from diagnostics.bias import pushes
from diagnostics.precision import head_spec
from diagnostics.scene import capture_heads
from metrics import MetricsError, to_json
from scripts.diagnose import chosen, models_of, open_run, row_of
from scripts.targets import check_targets


def measure(run: Path, steps: str, layer: int, heads: list[int] | None, sequences: int, device: str,
            dataset: str | None = None) -> list[dict]:
    """A line for each checkpoint and head. Errors as `diagnose.open_run`."""
    paths = chosen(run, steps)
    config, plan = open_run(run, dataset)
    if not 0 <= layer < config.n_layer:
        raise ConfigError(f"--layer={layer} is outside layers 0..{config.n_layer - 1}")
    heads = sorted(set(heads or range(config.n_head)))
    if not all(0 <= head < config.n_head for head in heads):
        raise ConfigError(f"--heads {' '.join(map(str, heads))}: the run has heads 0..{config.n_head - 1}")
    if config.qk_norm or plan.specs[layer].softcap:
        raise ConfigError("what is measured holds for scores q k / sqrt(D) with q = W_Q x, and the run has "
                          f"{'qk_norm' if config.qk_norm else 'softcap'} between them")
    rows = math.ceil(sequences / config.sequences_per_step)
    if plan.order and rows > plan.order.rows:
        raise ConfigError(f"--sequences={sequences} need the rows of {rows} steps, and {plan.order.rows} were recorded;"
                          " choose fewer")
    lines = []
    for step, model, layers, autocast in models_of(config, plan, paths, device):
        left, found = sequences, {head: [] for head in heads}
        first = min(step, plan.order.rows - rows) if plan.order else step
        for at in range(first, first + rows):
            offsets = row_of(config, plan, at)[:left]
            left -= len(offsets)
            for part in range(0, len(offsets), config.batch_size):
                x, y = (t.to(device) for t in plan.tokens["train"].batch(offsets[part:part + config.batch_size],
                                                                         config.block_size))
                frames = capture_heads(model, x, y, autocast, layer, heads, step, len(x) / config.sequences_per_step)
                layers[layer].rng[2].fill_(at * config.sequences_per_step + part)  # no draw twice, or t is too large
                for head, frame in zip(heads, frames, strict=True):
                    found[head].append(pushes(frame, head_spec(layers[layer].spec, head), layers[layer].rng))
        for (head, values), frame in zip(found.items(), frames, strict=True):
            line = {"step": step, "layer": layer, "head": head, "sequences": sequences,
                    "wq_norm": torch.linalg.matrix_norm(frame.wq.double(), 2).item()}
            for name in ("sum", "push", "gradient"):
                one = torch.cat([value[name] for value in values])
                mean, error = one.mean().item(), one.std().item() / math.sqrt(len(one))
                line |= {name: mean, f"{name}_se": error, f"{name}_t": mean / error if error else 0.0}
            size = torch.cat([value["size"] for value in values])
            line |= {"push_independent_se": size.square().mean().sqrt().item() / math.sqrt(len(size)),
                     "tied": torch.cat([value["tied"] for value in values]).mean().item()}
            lines.append(line)
    return lines


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 with one sentence for what a user can change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's out_dir with checkpoints")
    parser.add_argument("--steps", default=":", metavar="a:b", help="as diagnose.py's; default all")
    parser.add_argument("--layer", type=int, default=1, help="counted from 0; default 1, which fails in the paper")
    parser.add_argument("--heads", type=int, nargs="+", help="default: all of the layer")
    parser.add_argument("--sequences", type=int, default=256, help="for each checkpoint; default 256")
    parser.add_argument("--out", type=Path, help="default: RUN/delta_bias.json")
    parser.add_argument("--dataset", metavar="DIR", help="the run's corpus, where it has moved")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    args = parser.parse_args(argv)
    try:
        if args.sequences < 2:
            raise ConfigError(f"--sequences={args.sequences} must be at least 2, or there is no standard error")
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device=cuda, but torch sees no GPU; use --device=cpu")
        out = args.out or args.run / "delta_bias.json"
        check_targets(out)
        lines = measure(args.run, args.steps, args.layer, args.heads, args.sequences, args.device, args.dataset)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(to_json({"run": args.run.resolve().name, "rows": lines}, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError, checkpoint.CheckpointError, MetricsError) as error:
        print(f"delta_bias.py: error: {error}", file=sys.stderr)
        return 2
    print("  step head  |W_Q|  ties   sum of delta's error, t     push of |W_Q|, t    exact gradient's, t")
    for x in lines:
        print(f"{x['step']:6} {x['head']:4} {x['wq_norm']:6.1f} {x['tied']:5.2f}   {x['sum']:+.3e} {x['sum_t']:+6.1f}"
              f"      {x['push']:+.3e} {x['push_t']:+6.1f}   {x['gradient']:+.3e} {x['gradient_t']:+6.1f}")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
