"""The paper's chain in a run of yours: python scripts/diagnose.py RUN [--steps a:b] [--layer L --head H] [--out DIR]

Takes a run's checkpoints and the order of its batches, finds the worst head by itself (the largest spectral norm of
W_Q; among nearly equal ones, the most ties), runs a few of the recorded sequences through each checkpoint, and writes
figures 3, 4, 5, 6, 11, 12 and 13 of arXiv 2510.04212 as PNG, their numbers as diagnosis.json, what they say in
diagnosis.md, and the tensors behind them as scene.npz. --scene FILE does the same from such a file, without the run.

A small scene to keep (two sequences at two steps: 2.3 MB with 512 tokens, 64 features a head and 384 in all):

    python scripts/diagnose.py RUN --steps 5200,5600 --sequences 2 --save-scene scene.npz
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from anywhere

import torch

import checkpoint
from attention import AttentionLayer, AttentionSpec
from attention.spec import from_key
from config import Config, ConfigError, from_dict
from data.loader import draw_offsets
from determinism import set_determinism
from diagnostics.diagnosis import diagnose
from diagnostics.figures import draw
from diagnostics.precision import head_spec
from diagnostics.scene import Scene, capture, load, save, survey, worst_head
from diagnostics.weights import KINDS
from diagnostics.words import words
from files import write_text
from metrics import MetricsError, read_metrics, to_json
from model import GPT
from plan import Plan, prepare
from replay.order import OrderError, OrderFile
from scripts.runs import Run
from scripts.targets import check_targets, named


def open_run(paths: list[Path], dataset: str | None = None) -> tuple:
    """(config, plan) of the run that these checkpoints are of, finished or running, its data and order checked against
    each other. The config is the one that they were saved with, not that of a session which went on with others.
    Errors: ValueError, CheckpointError."""
    run = paths[0].parent
    own = run / "order.bin"
    config, *older = map(_saved_with, reversed(paths))
    for path, other in zip(paths[-2::-1], older, strict=True):
        now, then = (_read_with(one, own.is_file()) for one in (config, other))
        if changed := [name for name in now | then if now.get(name) != then.get(name)]:
            before, after = (", ".join(f"{name}={one.get(name)!r}" for name in changed) for one in (then, now))
            raise ConfigError(f"{run} was resumed with other settings: {path.name} was saved with {before}, "
                              f"{paths[-1].name} with {after}, which cannot be mixed; choose one side with --steps")
    order = own if own.is_file() else config.replay
    config = dataclasses.replace(config, out_dir=str(run), init_from="resume", dataset=dataset or config.dataset,
                                 replay=str(order or ""), replay_switches=False, record=own.is_file())
    rows, last = config.max_iters, checkpoint.step_of(checkpoint.latest(run))
    if order:
        with OrderFile(order) as file:
            rows = file.rows
        if not max(rows, last):
            raise OrderError(f"{run} stopped before its first step, so there is nothing to diagnose; train it further")
        if rows < last:
            raise OrderError(f"{order} holds {rows} steps, fewer than the {last} of {checkpoint.latest(run)}; take a "
                             "whole copy of it")
    config = dataclasses.replace(config, max_iters=max(1, rows, last))
    plan = prepare(config)
    plan.state = None  # each checkpoint is loaded in its turn
    return config, plan


def _saved_with(path: Path) -> Config:
    state = checkpoint.load(path)
    if "config" not in state:
        raise ConfigError(f"{path} has no entry 'config'; it is not a checkpoint of train.py")
    return from_dict(state["config"], str(path))


def _read_with(config: Config, recorded: bool) -> dict:
    """The settings that decide what is read of a checkpoint; of a run that recorded its order, that has the rows."""
    names = ["attention", "attention_override", "output_heads", "dtype"]
    names += [] if recorded else ["replay", "seed", "batch_size", "gradient_accumulation_steps"]
    return {name: getattr(config, name) for name in names} | config.switches


def chosen(run: Path, steps: str) -> list[Path]:
    """Checkpoints with a step of a:b, both ends included and optional, or with exactly the steps of a list a,b; oldest
    first. Errors: ConfigError."""
    if not (form := re.fullmatch(r"(\d*):(\d*)|\d+(?:,\d+)*", steps, re.ASCII)):
        raise ConfigError(f"--steps={steps} is neither a:b, two step numbers of which either may be left out, nor "
                          "a list a,b")
    at = {checkpoint.step_of(path): path for path in checkpoint.checkpoints(run)}
    if not at:
        raise ConfigError(f"{run} has no checkpoint (ckpt_*.pt)")
    known = f"it has {', '.join(map(str, at))}"
    first, last = form.groups()
    wanted = sorted(set(map(int, steps.split(",")))) if first is None else [
        step for step in at if int(first or 0) <= step <= int(last or step)]
    if not wanted:
        raise ConfigError(f"{run} has no checkpoint in --steps={steps}; {known}")
    if missing := [step for step in wanted if step not in at]:
        raise ConfigError(f"{run} has no checkpoint of step {', '.join(map(str, missing))} (--steps={steps}); {known}")
    return [at[step] for step in wanted]


def capture_run(run: Path, steps: str = ":", layer: int | None = None, head: int | None = None, sequences: int = 4,
                device: str = "cpu", dataset: str | None = None, tokens: int | None = None) -> Scene:
    """The scene of a run: see `Scene`. A checkpoint of step s, which is the state before step s, reads the first
    `sequences` of that step's recorded row (the end of the run: of the last row), of which the scene keeps `tokens`
    leading positions (all). Errors as `open_run`."""
    paths = chosen(run, steps)
    config, plan = open_run(paths, dataset)
    if tokens and tokens > config.block_size:
        raise ConfigError(f"--tokens={tokens} exceeds the run's block_size={config.block_size}")
    if (layer is None) != (head is None):
        raise ConfigError("give both --layer and --head, or neither to have them found")
    if layer is not None and not (0 <= layer < config.n_layer and 0 <= head < config.n_head):
        raise ConfigError(f"--layer={layer} --head={head} is outside layers 0..{config.n_layer - 1}, heads "
                          f"0..{config.n_head - 1}")
    surveys, frames = [], []
    for step, model, layers, autocast in models_of(config, plan, paths[::-1], device):  # the last one says which head
        x, y = (t.to(device) for t in plan.tokens["train"].batch(row_of(config, plan, step)[:sequences],
                                                                 config.block_size))
        surveys.append(survey(model, x, autocast, step))
        if layer is None:
            layer, head = worst_head(surveys[0])
        if frames and layers[layer].spec != specs_at(plan, frames[0].step)[layer]:
            raise ConfigError(f"layer {layer} was switched to another attention between steps {step} and "
                              f"{frames[-1].step}, which one diagnosis cannot mix; choose one side with --steps")
        frames.append(capture(model, x, y, autocast, layer, head, step, len(x) / config.sequences_per_step, tokens))
    return Scene(config.wandb_run_name or run.resolve().name, layer, head, head_spec(layers[layer].spec, head),
                 config.sequences_per_step, surveys[::-1], frames[::-1], _history(run, config.n_layer),
                 config.qk_norm)


def models_of(config, plan: Plan, paths: list[Path], device: str) -> Iterator[tuple]:
    """(step, model, its attention layers, autocast) of each checkpoint in turn, as training had them: one model, which
    the next turn loads anew."""
    set_determinism(config.seed, config.deterministic)  # every product outside attention too
    layers = [AttentionLayer(spec, i, config.seed) for i, spec in enumerate(plan.specs)]
    model = GPT(plan.model_args, layers).to(device)
    dtype = getattr(torch, config.dtype)
    autocast = torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32)
    for path in paths:
        state = checkpoint.load(path)
        model.load_state_dict(checkpoint.strip_prefixes(state["model"]))
        for one, spec in zip(layers, specs_at(plan, state["step"]), strict=True):
            one.spec = spec
        yield state["step"], model, layers, autocast


def specs_at(plan: Plan, step: int) -> list[AttentionSpec]:
    """Each layer's attention in a step, after what the monitor had switched by then."""
    due = {switch.layer: from_key(switch.spec) for switch in plan.switches if switch.step <= step}
    return [due.get(i, spec) for i, spec in enumerate(plan.specs)]


def row_of(config, plan: Plan, step: int):
    if plan.order:
        return plan.order.row(min(step, plan.order.rows - 1))
    return draw_offsets(plan.header.n_tokens, config.block_size, config.sequences_per_step, config.seed, "train", step)


def _history(run: Path, n_layer: int) -> dict:
    log = Run(run, True, {}, read_metrics(run), run.name)
    names = ("ties", "wq_norm", *(f"norm_{kind}" for kind in KINDS))
    probed = [f"{name}/layer{i}" for name in names for i in range(n_layer)]
    return {"val_loss": list(log.series("val_loss")), **{name: list(log.series(f"probe/{name}")) for name in probed}}


def write(scene: Scene, out: Path) -> dict:
    """diagnosis.json, diagnosis.md and the PNGs, in `out`; returns the numbers."""
    found = diagnose(scene)
    write_text(out / "diagnosis.json", to_json(found, indent=1) + "\n")
    figures = draw(scene, found, out)
    pictures = "".join(f"\n![{path.stem}]({path.name})\n" for path in figures)
    write_text(out / "diagnosis.md", words(found) + pictures)
    return found


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 with one sentence for what a user can change."""
    parser = argparse.ArgumentParser(prog="diagnose.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's out_dir with checkpoints")
    parser.add_argument("--scene", metavar="FILE", help="a scene.npz instead of a run")
    parser.add_argument("--steps", default=":", metavar="a:b", help="checkpoints of steps a to b, or of exactly the "
                        "steps a,b; default all")
    parser.add_argument("--layer", type=int, help="with --head, instead of the worst one; both count from 0")
    parser.add_argument("--head", type=int)
    parser.add_argument("--sequences", type=int, default=4, help="of each step's recorded row; default 4")
    parser.add_argument("--tokens", type=int, metavar="N", help="keep the first N positions of each; default all")
    parser.add_argument("--save-scene", metavar="FILE", type=named, help="write the scene there, and nothing else")
    parser.add_argument("--out", metavar="DIR", type=named, help="default: RUN/diagnosis, or the scene's folder")
    parser.add_argument("--dataset", metavar="DIR", help="the run's corpus, where it has moved")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        choices=("cpu", "cuda"))
    args = parser.parse_args(argv)
    try:
        if bool(args.run) == bool(args.scene):
            raise ConfigError("give a RUN or --scene FILE, one of them")
        if args.sequences < 1:
            raise ConfigError(f"--sequences={args.sequences} must be at least 1")
        if args.tokens is not None and args.tokens < 1:
            raise ConfigError(f"--tokens={args.tokens} must be at least 1")
        of_run = ("steps", "layer", "head", "sequences", "tokens", "save_scene", "dataset")
        for name in of_run if args.scene else ():
            if (given := getattr(args, name)) != parser.get_default(name):
                raise ConfigError(f"--{name.replace('_', '-')}={given} takes a RUN, of which --scene={args.scene} is "
                                  "what was captured; leave it out")
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"--device={args.device}, but torch sees no GPU; use --device=cpu")
        out = Path(args.out or (Path(args.scene).parent if args.scene else Path(args.run) / "diagnosis"))
        check_targets(args.save_scene, folders=() if args.save_scene else (out,))
        if args.scene:
            scene = load(args.scene)
        else:
            scene = capture_run(Path(args.run), args.steps, args.layer, args.head, args.sequences, args.device,
                                args.dataset, args.tokens)
            path = save(scene, Path(args.save_scene or out / "scene.npz"))
            if args.save_scene:
                steps = ", ".join(str(frame.step) for frame in scene.frames)
                print(f"{path}: layer {scene.layer}, head {scene.head}, steps {steps}, "
                      f"{path.stat().st_size / 1e6:.2f} MB")
                return 0
        write(scene, out)
    except (ValueError, OSError, checkpoint.CheckpointError, MetricsError) as error:
        print(f"diagnose.py: error: {error}", file=sys.stderr)
        return 2
    print((out / "diagnosis.md").read_text(encoding="utf-8").split("\n\nRounding of")[0])
    print(f"\nwritten to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
