"""The run's configuration: one flat, frozen dataclass; a TOML file, then --key=value, both strict.

Names are nanoGPT's where nanoGPT has one, with its meaning. Imports nothing of ours.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import re
import sys
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Backend = Literal["standard", "sdpa", "flash_bf16", "flash_fa2", "flash_fp32", "stabilized"]


# Of float keys, the least and the largest value beside 0; attention/spec.py has those of its switches.
FP32_HOLDS = (2.0**-126, 1e18)  # and the product of two of the largest
RANGES = {"collective_timeout_s": (1.0, 1e9)}  # gloo's clock ends at 9e9
UNWRITABLE = re.compile("[\0\ud800-\udfff]")  # a byte of a flag that is no UTF-8 is read as one of the latter


class ConfigError(ValueError):
    """A configuration that cannot run: one sentence with the values at fault and the way out."""


@dataclass(frozen=True)
class Config:
    # Input and output
    out_dir: str = "runs/out"  # metrics.jsonl, run.json, order.bin and checkpoints go here
    eval_interval: int = 1000  # steps between evaluations on the validation split
    eval_iters: int = 100  # batches of batch_size sequences an evaluation, over all ranks together
    log_interval: int = 1  # steps between records in metrics.jsonl
    checkpoint_interval: int = 1000  # steps between checkpoints; the last step is always saved
    keep_checkpoints: int = 3  # checkpoints in the ring; older ones are removed
    init_from: str = "scratch"  # scratch | resume | a checkpoint file | gpt2 | gpt2-medium | a Hugging Face folder
    wandb_log: bool = False  # mirror the metrics to wandb; metrics.jsonl stays the truth
    wandb_mode: Literal["disabled", "offline", "online"] = "disabled"  # wandb_log=true alone means online
    wandb_project: str = "low-precision-attention"  # wandb project
    wandb_run_name: str = ""  # wandb run name; empty takes the last part of out_dir
    wandb_group: str = ""  # wandb group, to lay the arms of one experiment side by side
    wandb_tags: tuple[str, ...] = ()  # wandb tags

    # Data and its order
    dataset: str = "data/openwebtext"  # folder with train.bin and val.bin; a bare name is looked up under data/
    gradient_accumulation_steps: int = 16  # micro-batches a step, the total over all ranks
    batch_size: int = 32  # sequences a micro-batch
    block_size: int = 1024  # tokens a sequence
    record: bool = True  # write every step's token offsets to out_dir/order.bin
    replay: str = ""  # take the offsets from this order file instead of drawing them
    replay_switches: bool = False  # also switch the layers that the run of that order switched, at its steps
    seed: int = 1337  # of the weights, the drawn order, dropout and stochastic rounding

    # Model
    n_layer: int = 12  # transformer blocks
    n_head: int = 12  # attention heads a block
    n_embd: int = 768  # width
    dropout: float = 0.0  # on embeddings and residual branches, not on attention probabilities
    bias: bool = False  # biases in Linear and LayerNorm
    vocab_size: int = 0  # 0 takes the data set's, rounded up to a multiple of 64
    gelu: Literal["exact", "tanh"] = "exact"  # nanoGPT's GELU, or the approximation of the released GPT-2 weights
    qk_norm: bool = False  # normalise queries and keys of each head before the scores
    qk_clip: float = 0.0  # MuonClip's tau: rescale W_Q and W_K of heads whose largest score exceeds it; 0 is off
    gated_attention: bool = False  # sigmoid gate on each head's output
    logit_softcap: float = 0.0  # cap * tanh(logits / cap) on the final logits; 0 is off
    loss_chunk: int = 0  # tokens whose logits exist at a time; 0 is all of a micro-batch

    # Attention: a backend is a preset of the switches below it; an unset switch takes the preset's value
    attention: Backend = "flash_bf16"  # backend of every layer that attention_override does not name
    attention_override: str = ""  # per layer, from 0: "1=standard", "1=flash_bf16+output=fp32,default=standard"
    smooth_k: float | None = None  # share of the keys' mean over tokens that is taken out: 1 is all; -1 doubles it
    operands: str | None = None  # bf16 | fp32: inputs of the matrix products
    scores: str | None = None  # bf16 | fp32: rounding of the scores
    softcap: float | None = None  # cap * tanh(S / cap) on the attention scores; 0 is off
    probs: str | None = None  # bf16 | fp32 | fp8_e4m3 | fp8_e5m2: cast of P before P V
    row_sum: str | None = None  # fp32 | bf16: the running row sum
    pv: str | None = None  # fp32 | bf16 | stochastic: rounding of each tile's P V and of the running O
    output: str | None = None  # bf16 | fp32 | stochastic: the stored O
    output_heads: str = ""  # heads that keep an FP32 O: "1:0,6,7;3:2" is LAYER:HEADS;LAYER:HEADS
    delta: str | None = None  # do_o | do_o_exact | do_o_corrected | dp_p | dp_p_normalized | do_o_recomputed
    stabilizer: str | None = None  # none | paper | capped | clamp | fixed | unconditional | lazy_max
    beta: float | None = None  # Algorithm 3's factor on a repeated positive maximum
    epsilon: float | None = None  # scores within epsilon of the row maximum count as equal to it
    shift_cap: float | None = None  # bound of the stabilizer's shift; inf is the paper's rule to the letter
    fixed_shift: float | None = None  # the constant shift of stabilizer=fixed
    lazy_threshold: float | None = None  # growth at which stabilizer=lazy_max takes a new maximum
    tile_q: int | None = None  # rows of a tile
    tile_k: int | Literal["full"] | None = None  # columns of a tile; "full" turns tiling off
    dots: str | None = None  # ieee | tf32x3: how kernels multiply FP32 operands
    kernel: str | None = None  # auto | triton | emulated: auto is Triton on a GPU, PyTorch elsewhere

    # Optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: Muon for matrices, AdamW for embeddings, head and vectors
    learning_rate: float = 1e-3  # AdamW's peak learning rate
    max_iters: int = 600000  # optimizer steps
    weight_decay: float = 0.0  # AdamW's, on parameters of two or more dimensions
    beta1: float = 0.9  # AdamW's decay of the mean
    beta2: float = 0.95  # AdamW's decay of the variance
    eps: float = 1e-8  # AdamW's epsilon
    grad_clip: float = 1.0  # largest gradient norm; 0 is off
    decay_lr: bool = True  # false keeps the peak learning rate after warm-up
    warmup_iters: int = 2000  # steps of linear warm-up
    lr_decay_iters: int = 600000  # step at which the cosine reaches min_lr
    min_lr: float = 1e-5  # learning rate after the decay
    muon_learning_rate: float = 5e-4  # peak learning rate of the matrices that Muon updates
    muon_momentum: float = 0.95  # Muon's decay of the mean
    muon_weight_decay: float = 0.01  # Muon's, on its matrices
    muon_qkv: Literal["whole", "matrix", "head"] = "matrix"  # what of the fused QKV weight is orthogonalised together

    # System
    device: str = "auto"  # auto | cpu | cuda; auto takes a GPU where there is one and says so
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # autocast of everything but the attention's insides
    compile: bool = True  # torch.compile the model; attention stays opaque to it
    compile_mode: Literal["default", "reduce-overhead"] = "default"  # reduce-overhead: CUDA graphs, one rank only
    deterministic: bool = True  # bit-equal runs, or an error where torch has no deterministic kernel
    collective_timeout_s: float = 600.0  # a rank that waits longer for the others stops the run

    # Watching
    probe_interval: int = 0  # steps between probes of ties, spectral norms, alignments and entropies; 0 is off
    probe_sequences: int = 2  # sequences of each rank's first micro-batch that a probe reads
    monitor: Literal["off", "warn", "stop", "switch"] = "off"  # early warning: print, end (status 5), or switch
    monitor_interval: int = 100  # steps between the monitor's measurements, which are logged as probes are
    monitor_remedy: str = "delta=dp_p"  # monitor=switch moves a layer to this: SWITCH=VALUE or BACKEND[+SWITCH=VALUE]
    monitor_ties: float = 0.4  # warn above this share of tied rows of a head, median of 5 measurements; 0 is off
    monitor_wq_ratio: float = 3.0  # warn above this norm of a head's W_Q over the median of all heads; 0 is off
    monitor_wq_norm: float = 0.0  # warn above this spectral norm of a head's W_Q; 0 is off
    monitor_row_max: float = 1000.0  # warn above this largest score of a layer, median of 5 measurements; 0 is off
    monitor_key_mean: float = 0.0  # warn above this mean key of a head over its keys' spread, median of 5; 0 is off
    stop_when_failed: bool = False  # end the run, exit status 4, where it counts as failed (failure.FailureRule)
    on_nonfinite: Literal["stop", "skip", "ignore"] = "stop"  # what a non-finite gradient does, before the update

    def __post_init__(self):
        positive = ("eval_iters eval_interval log_interval checkpoint_interval keep_checkpoints batch_size block_size "
                    "gradient_accumulation_steps n_layer n_head n_embd max_iters learning_rate lr_decay_iters "
                    "collective_timeout_s probe_sequences monitor_interval muon_learning_rate").split()
        not_negative = ("vocab_size dropout qk_clip logit_softcap weight_decay eps grad_clip warmup_iters min_lr "
                        "probe_interval seed muon_weight_decay monitor_ties monitor_wq_ratio monitor_wq_norm "
                        "monitor_row_max monitor_key_mean loss_chunk").split()
        for name in positive + not_negative:
            value = getattr(self, name)
            if not (value > 0 or (value == 0 and name in not_negative)):
                raise ConfigError(f"{name}={value} must be {'positive' if name in positive else 'zero or more'}")
        for name in ("out_dir", "init_from"):
            if not getattr(self, name).strip():
                raise ConfigError(f"{name}={getattr(self, name)!r} is empty; the working folder is .")
        switches = self.switches
        for name in HINTS:
            value, (least, largest) = getattr(self, name), RANGES.get(name, FP32_HOLDS)
            if UNWRITABLE.search("".join(value) if isinstance(value, tuple) else str(value)):
                raise ConfigError(f"{name}={value!r} has a character that no log or file name holds; leave it out")
            if type(value) is int and value >= 1 << 63:
                raise ConfigError(f"{name}={value} must be below 2^63")
            if type(value) is float and value and name not in switches and not least <= value <= largest:
                raise ConfigError(f"{name}={value} cannot be computed with; give {least:.2g} to {largest:g}")
        for name in ("beta1", "beta2", "dropout", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be in [0, 1)")
        if self.monitor_ties >= 1:
            raise ConfigError(f"monitor_ties={self.monitor_ties} is a share of rows, so it must be below 1; 0 is off")
        if self.monitor != "off" and not self.monitor_thresholds:
            raise ConfigError(f"monitor={self.monitor} has nothing to watch: monitor_ties, monitor_wq_ratio, "
                              "monitor_wq_norm, monitor_row_max and monitor_key_mean are all 0; set one, or "
                              "monitor=off")
        if self.n_embd % self.n_head:
            raise ConfigError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens an optimizer step reads, over all ranks."""
        return self.gradient_accumulation_steps * self.batch_size * self.block_size

    @property
    def sequences_per_step(self) -> int:
        return self.gradient_accumulation_steps * self.batch_size

    @property
    def monitor_thresholds(self) -> dict[str, float]:
        """What diagnostics.monitor watches, by signal."""
        values = {name: getattr(self, f"monitor_{name}") for name in ("ties", "wq_ratio", "wq_norm", "row_max",
                                                                      "key_mean")}
        return {name: value for name, value in values.items() if value}

    @property
    def switches(self) -> dict:
        """The attention switches that the user set, by name."""
        names = ("smooth_k operands scores softcap probs row_sum pv output delta stabilizer beta epsilon shift_cap "
                 "fixed_shift lazy_threshold tile_q tile_k dots kernel").split()
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if chosen.get("tile_k") == "full":
            chosen["tile_k"] = 0
        return chosen


HINTS = typing.get_type_hints(Config)


def from_file(path: str | Path) -> Config:
    """The config of a TOML file of flat keys. Errors: ConfigError naming file, key and the nearest known key."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        near = sorted(Path(__file__).with_name("configs").glob("*.toml"),
                      key=lambda p: -difflib.SequenceMatcher(None, p.stem, Path(path).stem).ratio())[:1]
        near = "".join(f"; the nearest is {os.path.relpath(p)}" for p in near)
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}{near}") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, and an integer of more digits than Python reads
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return from_dict(table, str(path))


def from_dict(table: dict, origin: str) -> Config:
    """A config from plain values, as a TOML file, a checkpoint or a run.json holds them, also of an older commit.
    Errors: ConfigError."""
    for key in table:
        if key not in HINTS:
            raise ConfigError(f"{origin}: unknown key {key!r}; the nearest known key is {_nearest(key)!r}")
    return Config(**{key: _read(key, value, origin) for key, value in table.items()})


def read_values(table: dict, origin: str) -> dict:
    """A run's values as a Config has them, from what `from_dict` takes; keys and choices that other commits have stay.
    Errors: ConfigError for a value of another type."""
    return {key: _read(key, value, origin, choices=False) if key in HINTS else value for key, value in table.items()}


def _read(key: str, value, origin: str, choices: bool = True):
    number = _accepts(HINTS[key], 1.0)
    if isinstance(value, list):
        value = tuple(value)
    if number and value in ("Infinity", "-Infinity", "NaN"):  # as JSON has them
        value = float(value)
    if number and (type(value) is int or (type(value) is bool and key == "smooth_k")):  # which was all or nothing once
        try:
            value = float(value)
        except OverflowError:
            raise ConfigError(f"{origin}: {key}={value!s:.9}... is larger than any float") from None
    if not _accepts(HINTS[key], value, choices):
        raise ConfigError(f"{origin}: {key}={value!r} is not of type {_spell(HINTS[key])}")
    return value


def load(argv: list[str]) -> Config:
    """[CONFIG.toml] [--key=value ...] -> Config; the command line wins. Exits on --help; errors as above."""
    argv = list(argv)
    base = from_file(argv.pop(0)) if argv and not argv[0].startswith("-") else Config()
    if not argv:
        return base
    if late := [arg for arg in argv if arg.endswith(".toml") and not arg.startswith("-")]:
        raise ConfigError(f"the config file {late[0]} comes first: train.py {late[0]} --key=value ...")
    for flag in (arg.partition("=")[0] for arg in argv if arg.startswith("--")):
        if (key := key_of(flag)) not in (*HINTS, "help"):
            raise ConfigError(f"unknown flag {flag}; the nearest is --{_nearest(key)}, and --help lists all")
    check_once(argv)
    import tyro  # here, so that reading a config file needs nothing but Python

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(Config, default=base, args=argv, config=(tyro.conf.FlagConversionOff,),
                            use_underscores=True, prog="train.py [CONFIG.toml]",
                            description="Train GPT-2 with pluggable attention. The defaults shown are those of the "
                                        "config file, where one is named before the first flag.")
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise ConfigError(_unboxed(said.getvalue())) from None


def _unboxed(box: str) -> str:
    """The sentence at the head of the box that tyro draws, in Unicode or ASCII, around an error and its flag's help."""
    lines = [line.strip("│| ").strip("─╭╮╰╯-+") for line in box.splitlines()[1:]]
    said = itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, lines))
    return re.sub("^Error parsing (Config: )?", "", " ".join(said)) or " ".join(box.split())


def key_of(flag: str) -> str:
    """The key of --key=value."""
    return flag.removeprefix("--").partition("=")[0].replace("-", "_")


def check_once(argv: list[str]) -> None:
    """Errors: ConfigError for a flag that is given twice, of which one would be lost. But --init_from=resume may come
    last: whoever goes on with the same command appends it."""
    flags = [arg for arg in argv if arg.startswith("--")]
    if flags[-1:] == ["--init_from=resume"]:
        flags = override(flags, "--init_from=resume")
    for flag in flags:
        if len(same := [other for other in flags if key_of(other) == key_of(flag)]) > 1:
            raise ConfigError(f"--{key_of(flag)} is given more than once, {' and '.join(same)}; give it once")


def override(argv: list[str], *flags: str) -> list[str]:
    """A command line with `flags` in the place of its own of the same keys."""
    keys, kept, stays = {key_of(flag) for flag in flags if flag.startswith("--")}, [], True
    for arg in argv:
        stays = key_of(arg) not in keys if arg.startswith("--") else stays  # with a flag goes the value behind it
        kept += [arg] * stays
    return [*kept, *flags]


def _nearest(key: str) -> str:
    return difflib.get_close_matches(key, HINTS, n=1, cutoff=0)[0]


def _accepts(hint, value, choices: bool = True) -> bool:
    """Whether a value is of this type; choices=False: or of the type of its choices."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args if choices else type(value) in map(type, args)
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(arg, value, choices) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(_accepts(args[0], v) for v in value)
    return type(value) is hint


def _spell(hint) -> str:
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(repr, typing.get_args(hint)))
    return getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint).replace("typing.", "")


def as_dict(config: Config) -> dict:
    """Every field, for the run header, checkpoints and wandb."""
    return dataclasses.asdict(config)


if __name__ == "__main__":
    print(load(sys.argv[1:]))
