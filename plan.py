"""From a config to a plan: everything a user can get wrong is found here, before anything is started or written."""

import dataclasses
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
from attention import AttentionSpec, layer_specs
from config import Config, ConfigError
from data.loader import Tokens, open_tokens, valid_starts
from data.meta import corpus_folder
from metrics import read_metrics
from model import GPTConfig
from replay.order import Header, OrderError, OrderFile, check_continues


@dataclass
class Plan:
    """What a run needs, read and checked: nothing is started or written yet."""

    specs: list[AttentionSpec]
    tokens: dict[str, Tokens]
    header: Header
    order: OrderFile | None  # None draws the offsets
    model_args: GPTConfig
    state: dict | None  # a checkpoint to go on from
    start: int  # finished steps


def prepare(config: Config) -> Plan:
    """Checks everything a user can get wrong. Errors: ValueError (ConfigError, DataError, ...), CheckpointError."""
    world = os.environ.get("WORLD_SIZE", "1")
    if not world.isdecimal() or int(world) < 1:
        raise ConfigError(f"WORLD_SIZE={world!r} in the environment is no number of ranks; start with torchrun, or "
                          "unset it")
    world = int(world)
    if config.gradient_accumulation_steps % world:
        raise ConfigError(f"gradient_accumulation_steps={config.gradient_accumulation_steps} is the total over ranks "
                          f"and is not divisible by the {world} ranks; use a multiple of {world}")
    specs = layer_specs(config.n_layer, config.n_head, config.attention, config.switches, config.attention_override,
                        config.output_heads)
    if config.dtype == "float16" and any(s.rounds_bf16 for s in specs):
        raise ConfigError(f"dtype=float16 with attention={config.attention}: that backend rounds to BF16; use "
                          "standard, sdpa or flash_fp32 with float16, or dtype=bfloat16")
    out = Path(config.out_dir)
    if config.init_from != "resume" and (checkpoint.checkpoints(out) or _has_records(out)):
        raise ConfigError(f"out_dir={out} already holds a run; go on with --init_from=resume or choose another out_dir")

    folder = corpus_folder(config.dataset)
    tokens = {split: open_tokens(folder, split) for split in ("train", "val")}
    for split in tokens.values():
        valid_starts(split.n_tokens, config.block_size)
    header = Header(dataset=folder.name, n_tokens=tokens["train"].n_tokens, sha256=tokens["train"].sha256,
                    block_size=config.block_size, sequences_per_step=config.sequences_per_step, seed=config.seed)
    if config.record or config.replay:
        tokens["train"].verify()  # the bytes, not what meta.json claims of them
    order = None
    if config.replay:
        order = OrderFile(config.replay)
        order.check(header)
        if order.rows < config.max_iters:
            raise OrderError(f"{config.replay} holds {order.rows} steps, but max_iters={config.max_iters} asks for "
                             f"more; set --max_iters={order.rows} or less")

    vocabulary = config.vocab_size or -(-tokens["train"].vocab_size // 64) * 64
    if vocabulary < tokens["train"].vocab_size:
        raise ConfigError(f"vocab_size={vocabulary} is below the {tokens['train'].vocab_size} of {folder}")
    model_args = GPTConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(GPTConfig)
                              if f.name != "vocab_size"}, vocab_size=vocabulary)
    state = None
    if config.init_from == "resume":
        state = checkpoint.load_latest(out)
    elif config.init_from.endswith(".pt"):
        state = checkpoint.load(Path(config.init_from), "cpu")
    if state and (lacks := {"model", "model_args", "optimizer", "scaler", "step"} - state.keys()):
        raise ConfigError(f"{config.init_from} is no checkpoint of train.py: it lacks {', '.join(sorted(lacks))}")
    for name, saved in (state or {}).get("model_args", {}).items():
        if name != "dropout" and getattr(model_args, name) != saved:
            raise ConfigError(f"{name}={getattr(model_args, name)!r}, but the checkpoint has {name}={saved!r}; the "
                              "model of a checkpoint cannot change")
    start = state["step"] if state else 0
    if start > config.max_iters:
        raise ConfigError(f"the checkpoint is at step {start}, past max_iters={config.max_iters}; raise --max_iters")
    if (out / "order.bin").exists():
        check_continues(out / "order.bin", header)
        if not config.record:
            raise ConfigError(f"{out} holds the order that this run recorded so far; go on with record=true")
    return Plan(specs, tokens, header, order, model_args, state, start)


def _has_records(out: Path) -> bool:
    """Whether a run logged a step there; one that was killed before its first checkpoint may start over."""
    path = out / "metrics.jsonl"
    return path.exists() and bool(read_metrics(path))


def check_ranks_agree(plan: Plan, group) -> None:
    """Errors: ConfigError where ranks would start at different steps or on different data, such as nodes that do not
    share a file system. They would wait for each other, or average gradients of different models."""
    data = int.from_bytes(hashlib.sha256(repr(plan.header).encode()).digest()[:7], "big")
    high, low, data_high, data_low = group.max(torch.tensor([plan.start, -plan.start, data, -data],
                                                            device=group.device)).tolist()
    if high != -low or data_high != -data_low:
        raise ConfigError(f"the ranks disagree: they would start at steps {-low} to {high}, rank {group.rank} at "
                          f"{plan.start}, {'all' if data_high == -data_low else 'not all'} of them on {plan.header}; "
                          "give every node the same files in out_dir and dataset")
