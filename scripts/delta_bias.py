"""Do rounding errors push W_Q, and how hard? Every head of a layer, over many sequences of a run.

    python scripts/delta_bias.py RUN --steps 2000:4000 --layer 1 --sequences 256 [--heads 2 3] [--out delta_bias.json]
                                 [--numerics flash_fa2 delta=dp_p ...]

A checkpoint of step s reads the recorded rows of steps s, s + 1, ... until it has --sequences of them, or the last ones
where these end before. For every head, means over sequences with their standard errors: the sum of delta_lp - delta_hp
over a sequence (the paper's figure 5a), and what the exact gradient, that error and everything that is rounded do to
the largest singular value of the head's W_Q (`diagnostics.pushes`). t is mean over standard error; beyond 3 either
way is a bias. Losses are scaled as in training, so that a mean times the sequences of a step is what a step adds up.

Step by step: error_share, the spectral norm of the error of dW_Q over that of the exact dW_Q; error_rank_one, the share
of the error's square that its first singular pair holds; error_cosine and error_cosine_size, the mean cosine of the
errors of two steps, and the mean of its size (gradient_cosine: of the exact gradients). A bias gives cosines near 1;
one direction whose sign changes from step to step gives a size near 1 and a mean near 0.

--numerics asks the same of other roundings on the same weights and the same dO: BACKEND[+SWITCH=VALUE...], or
SWITCH=VALUE[+...] on top of the run's own, which are "run". Writes a figure of error_share beside --out; with --draw it
makes that again from an --out, and nothing else.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import checkpoint
from attention.layers import changed
from attention.spec import NO_SWITCHES, AttentionSpec
from config import Config, ConfigError
from diagnostics.coherence import top_share
from diagnostics.lines import save, subplots
from diagnostics.precision import head_spec
from diagnostics.pushes import Pushes, pushes
from diagnostics.scene import capture_heads
from diagnostics.weights import spectral_norm
from files import write_text
from metrics import MetricsError, read_run, to_json
from plan import Plan
from runinfo import git_state
from scripts.diagnose import chosen, models_of, open_run, row_of, specs_at
from scripts.runs import nan_last
from scripts.targets import check_targets, named


def check(config: Config, plan: Plan, paths: list[Path], layer: int, heads: list[int], sequences: int, rows: int,
          numerics: Sequence[str]) -> None:
    """Errors: ConfigError for what cannot be measured of a run, before its checkpoints are read."""
    if not 0 <= layer < config.n_layer:
        raise ConfigError(f"--layer={layer} is outside layers 0..{config.n_layer - 1}")
    if not all(0 <= head < config.n_head for head in heads):
        raise ConfigError(f"--heads {' '.join(map(str, heads))}: the run has heads 0..{config.n_head - 1}")
    if wrong := [change for change in numerics if change.partition("+")[0] in NO_SWITCHES]:
        raise ConfigError(f"--numerics {' '.join(wrong)}: the roundings of that are torch's; name a flash backend")
    for spec in {specs_at(plan, checkpoint.step_of(path))[layer]: None for path in paths}:  # several after a switch
        for change in numerics:
            asked = _changed(spec, change)
            if config.qk_norm or asked.softcap:
                raise ConfigError("what is measured holds for scores q k / sqrt(D) with q = W_Q x, and "
                                  f"{'the run' if change == 'run' else '--numerics ' + change} has "
                                  f"{'qk_norm' if config.qk_norm else 'softcap'} between them")
            if spec.smooth_k == 1 != asked.smooth_k:
                raise ConfigError(f"--numerics {change}: the run's keys have lost their mean (smooth_k=1), and it "
                                  "cannot be given back; a backend begins without, so add +smooth_k=1")
    if plan.order and rows > plan.order.rows:
        raise ConfigError(f"--sequences={sequences} need the rows of {rows} steps, and {plan.order.rows} were recorded;"
                          " choose fewer")


def measure(run: Path, steps: str, layer: int, heads: list[int] | None, sequences: int, device: str,
            dataset: str | None = None, numerics: Sequence[str] = ("run",)) -> list[dict]:
    """A line for each checkpoint, head and numerics. Errors as `diagnose.open_run` and `check`."""
    paths = chosen(run, steps)
    config, plan = open_run(paths, dataset)
    heads = sorted(set(heads or range(config.n_head)))
    rows = math.ceil(sequences / config.sequences_per_step)
    check(config, plan, paths, layer, heads, sequences, rows, numerics)
    lines = []
    for step, model, layers, autocast in models_of(config, plan, paths, device):
        left, found = sequences, {(head, change): [] for head in heads for change in numerics}
        steps_of = {key: [] for key in found}  # the exact dW_Q and its error, of each step that is read
        first = min(step, plan.order.rows - rows) if plan.order else step
        for at in range(first, first + rows):
            offsets = row_of(config, plan, at)[:left]
            left -= len(offsets)
            sums = dict.fromkeys(found, 0.0)
            for part in range(0, len(offsets), config.batch_size):
                x, y = (t.to(device) for t in plan.tokens["train"].batch(offsets[part:part + config.batch_size],
                                                                         config.block_size))
                frames = capture_heads(model, x, y, autocast, layer, heads, step, len(x) / config.sequences_per_step)
                layers[layer].rng[2].fill_(at * config.sequences_per_step + part)  # no draw twice, or t is too large
                for head, frame in zip(heads, frames, strict=True):
                    for change in numerics:
                        spec = head_spec(_further(layers[layer].spec, _changed(layers[layer].spec, change)), head)
                        one, matrices = pushes(frame, spec, layers[layer].rng)
                        sums[head, change] += matrices
                        found[head, change].append(one)
            for key, both in sums.items():
                steps_of[key].append(both)
        norms = {head: torch.linalg.matrix_norm(frame.wq.double(), 2).item()
                 for head, frame in zip(heads, frames, strict=True)}
        for (head, change), values in found.items():
            lines.append({"step": step, "layer": layer, "head": head, "numerics": change, "sequences": sequences,
                          "wq_norm": norms[head]} | by_sequence(values) | by_step(steps_of[head, change]))
    return lines


def by_sequence(values: list[Pushes]) -> dict[str, float]:
    """The script's measures over sequences, of what `pushes` found of each batch of them."""
    found = {}
    for name in ("sum", "push", "row_sum", "error", "gradient"):
        one = torch.cat([getattr(value, name) for value in values])
        mean, error = one.mean().item(), one.std().item() / math.sqrt(len(one))
        found |= {name: mean, f"{name}_se": error, f"{name}_t": mean / error if error else 0.0}
    size = torch.cat([value.size for value in values])
    return found | {"push_independent_se": size.square().mean().sqrt().item() / math.sqrt(len(size)),
                    "tied": torch.cat([value.tied for value in values]).mean().item()}


def by_step(matrices: list[Tensor]) -> dict[str, float | None]:
    """The script's measures step by step, of (exact dW_Q, its error) for each step; cosines are None where no two steps
    have one, and all is nan that an error which is not finite has a part in."""
    exact, errors = torch.stack(matrices).unbind(1)
    share = [spectral_norm(error) / (spectral_norm(one) or math.nan) for error, one in zip(errors, exact, strict=True)]
    found = {"error_share": sum(share) / len(share), "error_rank_one": sum(map(top_share, errors)) / len(errors)}
    for name, several in (("error", errors), ("gradient", exact)):
        flat = several.flatten(1)
        flat = torch.nn.functional.normalize(flat[(flat != 0).any(1)], dim=1)  # 0 has no direction
        cosine = (flat @ flat.mT)[tuple(torch.triu_indices(len(flat), len(flat), 1))]
        found |= {f"{name}_cosine": cosine.mean().item() if len(cosine) else None,
                  f"{name}_cosine_size": cosine.abs().mean().item() if len(cosine) else None}
    return found


def draw(lines: list[dict], path: Path) -> None:
    """A panel a head: error_share by step, a line for each numerics, in the order of their last values; one that is
    not finite may be a string, as JSON has it, and is not drawn."""
    heads = sorted({line["head"] for line in lines})
    last = {line["numerics"]: nan_last(float(line["error_share"])) for line in lines if line["head"] == heads[0]}
    names = sorted(last, key=last.get, reverse=True)
    figure, axes = subplots(1, len(heads), figsize=(3.4 * len(heads) + 3, 4.2), sharey=True, squeeze=False)
    for axis, head in zip(axes[0], heads, strict=True):
        for i, name in enumerate(names):
            points = [(line["step"], float(line["error_share"])) for line in lines
                      if (line["head"], line["numerics"]) == (head, name)]
            axis.plot(*zip(*points, strict=True), marker="ov^sD"[i % 5], markersize=4, color=f"C{i % 10}",
                      linestyle="--" if i >= 10 else "-", label=name)
        axis.axhline(1, color="black", linewidth=0.6)
        axis.set_title(f"layer {lines[0]['layer']}, head {head}", fontsize=9)
        axis.set(yscale="log", xlabel="step")
        axis.set_xticks(sorted({line["step"] for line in lines}))
    axes[0][0].set_ylabel("error of a step's dW_Q over the exact dW_Q,\nspectral norms")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    save(figure, path, dpi=150)


def draw_again(out: Path) -> None:
    """The figure of an --out. Errors: ConfigError where it is none, or is from before there was an error_share."""
    try:
        lines = json.loads(out.read_text(encoding="utf-8"))["rows"]
        if all("error_share" in line for line in lines):
            return draw(lines, figure_of(out))
        steps, heads = (sorted({line[name] for line in lines}) for name in ("step", "head"))
        again = (f"--steps {','.join(map(str, steps))} --layer {lines[0]['layer']} --heads {' '.join(map(str, heads))} "
                 f"--sequences {lines[0]['sequences']} --out {out}")
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{out} is no --out of this script ({error!r}); give one") from None
    raise ConfigError(f"{out} is from before this script measured error_share, so there is nothing to draw; measure "
                      f"the run again: scripts/delta_bias.py RUN {again}")


def _further(read: AttentionSpec, spec: AttentionSpec) -> AttentionSpec:
    """spec with the share of the mean that it takes out of keys which `read` has read, of which the mean is 1 -
    read.smooth_k of what it was."""
    left = 1 - read.smooth_k
    return dataclasses.replace(spec, smooth_k=(spec.smooth_k - read.smooth_k) / left if left else 0.0)


def _changed(spec: AttentionSpec, change: str) -> AttentionSpec:
    """Errors: ConfigError, which names the flag."""
    try:
        return spec if change == "run" else changed(spec, change)
    except ValueError as error:
        raise ConfigError(f"--numerics {change}, in a layer of {spec.backend}: {error}") from None


def figure_of(out: Path) -> Path:
    """Errors: ConfigError for an --out that the figure would replace."""
    if out.suffix == ".png":
        raise ConfigError(f"{out} would be both the numbers and their figure; give a name that ends in .json")
    return out.with_suffix(".png")


def report(lines: list[dict]) -> None:
    """Prints a line each."""
    width = max(len(x["numerics"]) for x in lines)
    print(f"  step head  |W_Q|  ties  {'numerics':<{width}}  push of |W_Q| by delta's error, t   by all errors, t   "
          "by the exact gradient, t  error share  cosine  size")
    for x in lines:
        push, error, gradient = (f"{x[name]:+.3e} {x[f'{name}_t']:+6.1f}" for name in ("push", "error", "gradient"))
        cosine, size = ("-" if x[name] is None else format(x[name], form)
                        for name, form in (("error_cosine", "+.2f"), ("error_cosine_size", ".2f")))
        print(f"{x['step']:6} {x['head']:4} {x['wq_norm']:6.1f} {x['tied']:5.2f}  {x['numerics']:<{width}}  {push:>33}"
              f"   {error:>16}   {gradient:>24}  {x['error_share']:11.3f}  {cosine:>6}  {size:>4}")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 with one sentence for what a user can change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=named, metavar="RUN",
                        help="a run's out_dir with checkpoints; with --draw, an --out")
    parser.add_argument("--steps", default=":", metavar="a:b", help="as diagnose.py's; default all")
    parser.add_argument("--layer", type=int, default=1, help="counted from 0; default 1, which fails in the paper")
    parser.add_argument("--heads", type=int, nargs="+", help="default: all of the layer")
    parser.add_argument("--numerics", nargs="+", default=["run"], metavar="ROUNDINGS", help="default: the run's own")
    parser.add_argument("--sequences", type=int, default=256, help="for each checkpoint; default 256")
    parser.add_argument("--out", type=named, help="default: RUN/delta_bias.json")
    parser.add_argument("--dataset", metavar="DIR", help="the run's corpus, where it has moved")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--draw", action="store_true", help="the figure of RUN, an --out of this script")
    args = parser.parse_args(argv)
    try:
        if args.draw:
            for name in ("steps", "layer", "heads", "numerics", "sequences", "out", "dataset"):
                if (given := getattr(args, name)) != parser.get_default(name):
                    raise ConfigError(f"--{name}={given} changes nothing of a figure, which --draw makes beside "
                                      f"{args.run} of all that is there; leave it out")
            check_targets(figure_of(args.run))
            draw_again(args.run)
            return 0
        if args.sequences < 2:
            raise ConfigError(f"--sequences={args.sequences} must be at least 2, or there is no standard error")
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device=cuda, but torch sees no GPU; use --device=cpu")
        out = args.out or args.run / "delta_bias.json"
        check_targets(out)  # first, so that its own fault is the one that is told
        check_targets(figure_of(out))
        lines = measure(args.run, args.steps, args.layer, args.heads, args.sequences, args.device, args.dataset,
                        list(dict.fromkeys(args.numerics)))
        run = read_run(args.run)
        write_text(out, to_json({
            "run": args.run.resolve().name, "seed": run.get("config", {}).get("seed"), **git_state(),
            "device_name": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
            "data": run.get("data", {}).get("sha256"), "rows": lines}, indent=1) + "\n")
        draw(lines, figure_of(out))
    except (ValueError, OSError, checkpoint.CheckpointError, MetricsError) as error:
        print(f"delta_bias.py: error: {error}", file=sys.stderr)
        return 2
    report(lines)
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
