"""From a config to a plan: everything a user can get wrong is found here, before anything is started or written."""

import contextlib
import dataclasses
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
from attention import AttentionSpec, changed, same_numerics, specs_of
from attention.spec import from_key
from config import Config, ConfigError
from data.loader import Tokens, open_tokens, valid_starts
from data.meta import corpus_folder
from metrics import read_metrics
from model import GPTConfig
from replay.order import Header, OrderError, OrderFile, check_continues
from replay.switches import Switch, companion, from_plain, read_switches

CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # v2, v1


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
    remedies: list[AttentionSpec]  # what monitor=switch moves each layer to; empty without it
    switches: list[Switch]  # layers that change their attention on the way, by step: replayed, or of the checkpoint

    @property
    def all_specs(self) -> list[AttentionSpec]:
        """Every spec that a layer may come to have."""
        return [*self.specs, *self.remedies, *(from_key(switch.spec) for switch in self.switches)]


def prepare(config: Config) -> Plan:
    """Checks everything a user can get wrong. Errors: ValueError (ConfigError, DataError, ...), CheckpointError."""
    world = os.environ.get("WORLD_SIZE", "1")
    if not world.isdecimal() or int(world) < 1:
        raise ConfigError(f"WORLD_SIZE={world!r} in the environment is no number of ranks; start with torchrun, or "
                          "unset it")
    world = int(world)
    check_memory(config)
    if config.gradient_accumulation_steps % world:
        raise ConfigError(f"gradient_accumulation_steps={config.gradient_accumulation_steps} is the total over ranks "
                          f"and is not divisible by the {world} ranks; use a multiple of {world}")
    if config.compile and config.compile_mode == "reduce-overhead" and world > 1:
        raise ConfigError(f"compile_mode=reduce-overhead with {world} ranks: CUDA graphs under DDP have not been tried;"
                          " use compile_mode=default, or one rank")
    specs = specs_of(config)
    _check_float16(config, specs)
    remedies = remedies_of(config, specs)
    out = Path(config.out_dir)
    if config.init_from != "resume" and checkpoint.checkpoints(out):
        raise ConfigError(f"out_dir={out} already holds a run; go on with --init_from=resume or choose another out_dir")
    if config.init_from != "resume" and _has_records(out):
        raise ConfigError(f"out_dir={out} already holds the log of a run, and no checkpoint to go on from; move it "
                          "away or choose another out_dir")

    tokens, header, order = open_data(config)
    if config.record or config.replay:
        tokens["train"].verify()  # the bytes, not what meta.json claims of them

    vocabulary = config.vocab_size or -(-tokens["train"].vocab_size // 64) * 64
    if vocabulary < tokens["train"].vocab_size:
        raise ConfigError(f"vocab_size={vocabulary} is below the {tokens['train'].vocab_size} of "
                          f"{corpus_folder(config.dataset)}")
    model_args = GPTConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(GPTConfig)
                              if f.name != "vocab_size"}, vocab_size=vocabulary)
    state = _read_state(config, model_args)
    if (out / "order.bin").exists():
        check_continues(out / "order.bin", header)
        if not config.record:
            raise ConfigError(f"{out} holds the order that this run recorded so far; go on with record=true")
    return Plan(specs, tokens, header, order, model_args, state, state["step"] if state else 0, remedies,
                _switches(config, state))


def open_data(config: Config) -> tuple[dict[str, Tokens], Header, OrderFile | None]:
    """The tokens of each split, what an order of this run says of itself, and the order that it replays. Errors:
    ValueError (DataError, OrderError)."""
    folder = corpus_folder(config.dataset)
    tokens = {split: open_tokens(folder, split) for split in ("train", "val")}
    for split in tokens.values():
        valid_starts(split.n_tokens, config.block_size)
    header = Header(dataset=folder.name, n_tokens=tokens["train"].n_tokens, sha256=tokens["train"].sha256,
                    block_size=config.block_size, sequences_per_step=config.sequences_per_step, seed=config.seed)
    order = None
    if config.replay:
        order = OrderFile(config.replay)
        order.check(header)
        if order.rows < config.max_iters:
            raise OrderError(f"{config.replay} holds {order.rows} steps, but max_iters={config.max_iters} asks for "
                             f"more; set --max_iters={order.rows} or less")
    return tokens, header, order


def check_memory(config: Config) -> None:
    """Errors: ConfigError for sizes at which one part alone, of those that are made on the host, exceeds its memory."""
    here, c = host_memory(), config
    for names, what, needed in (
            ("eval_iters batch_size", "the starts of an evaluation's sequences", 24 * c.eval_iters * c.batch_size),
            ("gradient_accumulation_steps batch_size", "the starts of a step's sequences", 24 * c.sequences_per_step),
            ("batch_size block_size", "inputs and targets of a micro-batch", 16 * c.batch_size * c.block_size),
            ("n_layer n_embd vocab_size block_size", "the weights",
             4 * c.n_embd * (12 * c.n_layer * c.n_embd + c.vocab_size + c.block_size))):
        if needed > here:
            given = ", ".join(f"{name}={getattr(c, name)}" for name in names.split())
            raise ConfigError(f"{given}: {what} alone take {needed / 2**30:.3g} GiB, and this machine, or its "
                              f"container, has {here / 2**30:.3g}; give less")


def host_memory() -> int:
    """Bytes of the machine's memory, or of the container's limit where that is less."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # it is not there, or says "max"
            sizes.append(int(path.read_text()))
    return min(size for size in sizes if size > 0)  # 0 and -1 stand for no limit, too


def _read_state(config: Config, model_args: GPTConfig) -> dict | None:
    """The checkpoint that the run goes on from. Errors: CheckpointError, and ConfigError for one of another model or
    past max_iters."""
    if config.init_from == "resume":
        state = checkpoint.load_latest(config.out_dir)
    elif config.init_from.endswith(".pt"):
        state = checkpoint.load(config.init_from)
    else:
        return None
    entries = state.keys() if isinstance(state, dict) else ()
    if lacks := {"model", "model_args", "optimizer", "scaler", "step"}.difference(entries):
        raise ConfigError(f"{config.init_from} is no checkpoint of train.py: it lacks {', '.join(sorted(lacks))}")
    for name, saved in state["model_args"].items():
        if name not in ("dropout", "loss_chunk") and getattr(model_args, name) != saved:
            raise ConfigError(f"{name}={getattr(model_args, name)!r}, but the checkpoint has {name}={saved!r}; the "
                              "model of a checkpoint cannot change")
    if state["step"] > config.max_iters:
        raise ConfigError(f"the checkpoint is at step {state['step']}, past max_iters={config.max_iters}; raise "
                          "--max_iters")
    return state


def _check_float16(config: Config, specs: list[AttentionSpec]) -> None:
    if config.dtype == "float16" and any(s.rounds_bf16 for s in specs):
        backend = next(s.backend for s in specs if s.rounds_bf16)
        raise ConfigError(f"dtype=float16 with attention={backend}: that backend rounds to BF16; use "
                          "standard, sdpa or flash_fp32 with float16, or dtype=bfloat16")


def remedies_of(config: Config, specs: list[AttentionSpec]) -> list[AttentionSpec]:
    """What monitor=switch would move each layer to; a layer that rounds so already stays. Errors: ConfigError for a
    remedy that a layer cannot take, or that changes none."""
    if config.monitor != "switch":
        return []
    if config.replay_switches:
        raise ConfigError("monitor=switch with replay_switches=True: the order's switches are replayed, so no new ones "
                          "can be decided; use monitor=warn, or replay_switches=False")
    remedies = []
    for layer, spec in enumerate(specs):
        try:
            remedies.append(changed(spec, config.monitor_remedy, config.switches))
        except ValueError as error:
            works = _with_backend(config, specs)
            raise ConfigError(f"monitor_remedy={config.monitor_remedy!r}: layer {layer}: {error}"
                              + (f"; every layer can take monitor_remedy={works}" if works else "")) from None
    if all(map(same_numerics, specs, remedies)):
        raise ConfigError(f"monitor_remedy={config.monitor_remedy!r} changes nothing: every layer rounds so already "
                          f"({specs[0].describe()}); choose another remedy, or monitor=warn")
    _check_float16(config, remedies)
    return remedies


def _with_backend(config: Config, specs: list[AttentionSpec]) -> str:
    """The switches of monitor_remedy on top of a backend that has them, as every layer can take it; "" for none."""
    for backend in ("flash_fa2", "flash_fp32"):  # what is nearest to torch's kernels, and what float16 needs
        remedy = f"{backend}+{config.monitor_remedy}"
        with contextlib.suppress(ValueError):
            _check_float16(config, [changed(spec, remedy, config.switches) for spec in specs])
            return remedy
    return ""


def _switches(config: Config, state: dict | None) -> list[Switch]:
    """The changes that a resumed run has made or is about to make, and those of the run whose order is replayed."""
    switches = []
    if config.init_from == "resume":
        switches = from_plain(state.get("switches", []), f"the checkpoint in {config.out_dir}")
    if config.replay_switches:
        if not config.replay:
            raise ConfigError("replay_switches=True without an order file; give --replay=order.bin too, or leave it")
        path = companion(config.replay)
        switches += [switch for switch in read_switches(path) if switch not in switches]
    for switch in switches:
        what = f"the switch of layer {switch.layer} at step {switch.step}"
        if switch.layer >= config.n_layer:
            raise OrderError(f"{what} cannot be replayed with n_layer={config.n_layer}; use replay_switches=False")
        try:
            spec = from_key(switch.spec)
        except (TypeError, ValueError) as error:
            raise OrderError(f"{what} is to a spec that this program cannot compute ({error}); replay with "
                             "replay_switches=False") from None
        if max(spec.output_heads, default=0) >= config.n_head:
            raise OrderError(f"{what} names output_heads={spec.output_heads}, but n_head={config.n_head}; replay with "
                             "replay_switches=False")
        _check_float16(config, [spec])
    return sorted(switches, key=lambda s: s.step)


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
