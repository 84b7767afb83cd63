"""Every rounding an attention backend performs, named.

A backend is a preset of the switches below; a switch that the user sets replaces the preset's value. A spec
is therefore always fully resolved, and the run header prints it. NUMERIC POINTS, in the order of the
forward and backward pass (paper Algorithms 1 to 3; alpha = 1/sqrt(D)):

    K = K - s mean of K   smooth_k    s times the mean over the sequence, in FP32, cast back: adds one number to all
                                      scores of a row, and so changes no probability. Of every backend, before it; 1 is
                                      SageAttention's smooth K, and below 0 the mean becomes longer than it is
    Q, K, V, dO           operands    format of matrix-product inputs, and of P and dS in the backward pass
    S = alpha Q K^T       scores      round Q K^T, scale, round again; the backward pass rounds dP = dO V^T too
    S = c tanh(S / c)     softcap     c, or 0 for none (Gemma 2, section 2)
    m = rowmax(S)         stabilizer  what replaces the row maximum of a tile (Algorithm 3 and variants)
    P = exp(S - m)        FP32, always
    l = l a + rowsum(P)   row_sum     the running sum, a = exp(m_old - m_new)
    P, cast               probs       the cast that feeds P V
    O = O a + P V         pv          each tile's P V, the rescaled O and their sum
    O = O / l             output      what is stored, and what the backward pass reads
    L = m + log l         FP32, always
    delta                 delta       rowsum(dO O) in FP32, of O as stored or plus BF16 of what its rounding left over;
                                      rowsum(dP P), or that over rowsum(P), which is not 1 where scores are so large
                                      that FP32 holds L coarsely; rowsum(dO (P V)) with P V made again in FP32;
                                      do_o_corrected: rowsum(dO O), and dQ less r (P K), with r = rowsum(P (dP - that))
                                      / rowsum(P): what rows of dS added up to. dK reads that + r. One pass
    dS = P (dP - delta)   FP32, always; dQ, dK, dV are summed in FP32 and cast once

Imports nothing of ours, so that anything may import it.
"""

import dataclasses
import functools
import json
import math
from dataclasses import dataclass

# What a choice switch may be. "stochastic" is BF16, rounded up or down at random so that the mean is exact.
CHOICES = {
    "operands": ("bf16", "fp32"),
    "scores": ("bf16", "fp32"),
    "probs": ("bf16", "fp32", "fp8_e4m3", "fp8_e5m2"),
    "row_sum": ("fp32", "bf16"),
    "pv": ("bf16", "fp32", "stochastic"),
    "output": ("bf16", "fp32", "stochastic"),
    "delta": ("do_o", "do_o_exact", "dp_p", "dp_p_normalized", "do_o_corrected",
              "do_o_recomputed"),
    "stabilizer": ("none", "paper", "capped", "clamp", "fixed", "unconditional", "lazy_max"),
    "dots": ("ieee", "tf32x3"),
    "kernel": ("auto", "triton", "emulated"),
}

# Of number switches, beside 0: what FP32 holds, as it does the product of two; no more than 1 is near the row maximum.
SMALLEST = 2.0**-126
LARGEST = dict(beta=1e18, epsilon=1.0, softcap=1e18, fixed_shift=1e18, lazy_threshold=1e18, shift_cap=1e18)

SMALLEST_FP8 = {"fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-16}  # a P below half of it is cast to 0

FULL = 0  # tile_k: one tile of the whole sequence, no tiling
LARGEST_CLAMPED_P = 1 - 2**-8  # stabilizer=clamp: the largest BF16 value below 1

# A shift c that many rows share makes their P exp(-c), once for all. Two things must hold, or it biases them all: BF16
# holds exp(-c), since it would else be rounded the same way in every row, and not in l; and exp(-c) is no power of two,
# which would only move the exponents of P V and leave its roundings, the paper's bias, as they are with P = 1. So the
# shifts of about 1 and 12 are those of the BF16 numbers next to exp(-1) and exp(-12).
SMALLEST_SHIFT = -math.log(47 * 2**-7)  # stabilizer=capped: of a row whose maximum is nearer to 0 than this
SHIFT_CAP = -math.log(103 * 2**-24)

_FLASH_BF16 = dict(operands="bf16", scores="bf16", probs="bf16", row_sum="fp32", pv="bf16", output="bf16",
                   delta="do_o", stabilizer="none", tile_k=128)
PRESETS = {
    # nanoGPT without flash: materialised scores, softmax in FP32. Its roundings are autocast's, so it has no switches.
    "standard": dict(operands="bf16", scores="bf16", probs="bf16", row_sum="fp32", pv="fp32", output="bf16",
                     delta="dp_p", stabilizer="none", tile_k=FULL),
    # torch's fused kernels: a FlashAttention-2 class kernel on a GPU. Its roundings are torch's.
    "sdpa": dict(operands="bf16", scores="fp32", probs="bf16", row_sum="fp32", pv="fp32", output="bf16",
                 delta="do_o", stabilizer="none", tile_k=FULL),
    "flash_bf16": _FLASH_BF16,  # the paper's low-precision arm, which fails
    # What a FlashAttention-2 kernel rounds. P V and its sum are not rounded at the edges of a key tile here and in
    # flash_fp32, so theirs is chosen for speed.
    "flash_fa2": _FLASH_BF16 | dict(scores="fp32", pv="fp32", tile_k=64),
    "flash_fp32": _FLASH_BF16 | dict(operands="fp32", scores="fp32", probs="fp32", pv="fp32", output="fp32", tile_k=32),
    "stabilized": _FLASH_BF16 | dict(stabilizer="capped"),  # flash_bf16 with P < 1 wherever maxima tie
}
BACKENDS = tuple(PRESETS)
NO_SWITCHES = ("standard", "sdpa")


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention. Fields left None take the preset's value; afterwards none is None.

    Shapes elsewhere: Q, K, V, O, dO are (B, H, T, D). Errors: ValueError with the value at fault and the choices.
    """

    backend: str = "flash_bf16"
    smooth_k: float = 0.0
    operands: str | None = None
    scores: str | None = None
    probs: str | None = None
    row_sum: str | None = None
    pv: str | None = None
    output: str | None = None
    output_heads: tuple[int, ...] = ()  # these heads keep an FP32 O (paper section 3.2), the others follow `output`
    delta: str | None = None
    stabilizer: str | None = None
    beta: float = 2.0  # paper Algorithm 3: m' = beta * rowmax where a positive maximum repeats
    epsilon: float = 1e-3  # S >= rowmax - epsilon, in FP32, counts as equal to the row maximum
    shift_cap: float = SHIFT_CAP  # bounds |m' - rowmax|; inf is the paper's rule to the letter, which can underflow
    # stabilizer=fixed: m' = rowmax + fixed_shift, Appendix C's negative control: BF16 rounds exp(-1) down in every row.
    fixed_shift: float = 1.0
    lazy_threshold: float = 8 * math.log(2)  # stabilizer=lazy_max: keep the old maximum until it grows by this
    softcap: float = 0.0
    tile_q: int = 128
    tile_k: int | None = None  # FULL (0) turns tiling off; it decides where P V is rounded and where ties are seen
    dots: str = "tf32x3"  # how a kernel multiplies FP32 operands; plain TF32 is not offered
    kernel: str = "auto"  # triton on a GPU, emulated elsewhere; named in the run header

    def __post_init__(self):
        if self.backend not in PRESETS:
            raise ValueError(f"attention={self.backend!r} is no backend; choose from {', '.join(BACKENDS)}")
        preset = PRESETS[self.backend]
        for name in preset:
            if getattr(self, name) is None:
                object.__setattr__(self, name, preset[name])
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        if not -100 <= self.smooth_k <= 1 or 0 < abs(self.smooth_k) < SMALLEST:
            raise ValueError(f"smooth_k={self.smooth_k} must be from -100 to 1: the share of the keys' mean that is "
                             "taken out, 1 for all of it; below 0 it is added")
        object.__setattr__(self, "smooth_k", float(self.smooth_k))
        self._check_combination(preset)
        # One canonical string, for custom operators, whose arguments cannot be dataclasses; made here and not on
        # demand, so that torch.compile sees a constant.
        object.__setattr__(self, "key", json.dumps(dataclasses.asdict(self)))

    def _check_combination(self, preset):
        for name in SWITCHES:
            value = getattr(self, name)
            if not has_switch(self.backend, name) and value != preset.get(name, DEFAULTS[name]):
                raise ValueError(f"attention={self.backend} has no switch {name} (asked for {value!r}): its "
                                 "roundings are torch's; use a flash backend")
        for name in ("tile_q", "tile_k"):
            tile = getattr(self, name)
            if tile < (1 if name == "tile_q" else 0) or tile & (tile - 1) or 0 < tile < 16:
                raise ValueError(f"{name}={tile} is not a power of two of at least 16"
                                 + (", or full (0): the whole sequence" if name == "tile_k" else ""))
        if self.smooth_k and self.softcap:
            raise ValueError(f"smooth_k={self.smooth_k:g} with softcap={self.softcap:g}: the mean of the keys, of "
                             "later tokens too, leaves the softmax unchanged but not the cap, so tokens would see what "
                             "follows; choose one of them")
        if self.operands == "fp32" and self.scores == "bf16":
            raise ValueError("scores=bf16 rounds products of BF16 operands; with operands=fp32 it makes no sense")
        if self.operands == "fp32" and self.probs != "fp32":
            raise ValueError(f"probs={self.probs} needs operands=bf16: P and V of one product share a format")
        if self.output_heads and self.output == "fp32":
            raise ValueError(f"output_heads={self.output_heads} with output=fp32: every head is FP32 already")
        if self.delta == "do_o_exact" and self.output == "fp32":
            raise ValueError("delta=do_o_exact with output=fp32 changes nothing: an FP32 O leaves nothing over; use "
                             "delta=do_o")
        if any(h < 0 for h in self.output_heads):
            raise ValueError(f"output_heads={self.output_heads} has a negative head; heads are counted from 0")
        if not self.beta > 1:
            raise ValueError(f"beta={self.beta} must exceed 1, or the shifted maximum still gives P = 1")
        if not self.shift_cap > 0:
            raise ValueError(f"shift_cap={self.shift_cap} must be positive (inf is the paper's uncapped rule)")
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if value != 0 and not SMALLEST <= value <= largest and (name, value) != ("shift_cap", math.inf):
                raise ValueError(f"{name}={value} must be 0 or from {SMALLEST:.2g} to {largest:g}")
        if self.stabilizer == "capped" and self.shift_cap == math.inf:
            raise ValueError("stabilizer=capped needs a finite shift_cap; the uncapped rule is stabilizer=paper")
        bound = "fixed_shift" if self.stabilizer == "fixed" else "shift_cap"
        least = SMALLEST_FP8.get(self.probs, 0.0)
        if self.stabilizer in ("paper", "capped", "unconditional", "fixed") and math.exp(-getattr(self, bound)) < least:
            raise ValueError(f"probs={self.probs} with stabilizer={self.stabilizer} and {bound}="
                             f"{getattr(self, bound):g}: the largest P of a row may be exp of minus that, which "
                             f"{self.probs} makes 0, and O with it; give a {bound} below {-math.log(least):.2g}, or "
                             "probs=bf16")

    @property
    def stores_fp32(self) -> bool:
        """Whether O travels in FP32: all of it, or some heads of it."""
        return self.output == "fp32" or bool(self.output_heads)

    @property
    def keeps_rest(self) -> bool:
        """Whether the forward pass also keeps, for delta, what O's rounding left over."""
        return self.delta == "do_o_exact"

    @property
    def stochastic(self) -> bool:
        """Whether something is rounded at random, which the layer's `rng` decides."""
        return "stochastic" in (self.pv, self.output)

    @property
    def rounds_bf16(self) -> bool:
        """Whether this project's own code rounds to BF16 here, which float16 inputs would not survive."""
        return self.operands == "bf16" and self.backend not in NO_SWITCHES

    def describe(self) -> str:
        """One line for the run header: the backend and every rounding it does."""
        smooth = f" smooth_k={self.smooth_k:g}" if self.smooth_k else ""
        if self.backend in NO_SWITCHES:
            cap = f" softcap={self.softcap:g}" if self.softcap else ""
            how = "delta = rowsum(dP P)" if self.backend == "standard" else "fused kernel"
            return f"{self.backend} (roundings are torch's; {how}){cap}" + smooth
        words = [self.backend + smooth] + [f"{n}={getattr(self, n)}" for n in
                                  ("operands", "scores", "probs", "row_sum", "pv", "output", "delta")]
        if self.output_heads:
            words.append("fp32_heads=" + ",".join(map(str, self.output_heads)))
        words.append(f"stabilizer={self.stabilizer}" + {
            "none": "",
            "clamp": "",
            "fixed": f"(shift={self.fixed_shift:g})",
            "lazy_max": f"(threshold={self.lazy_threshold:.3g})",
        }.get(self.stabilizer, f"(beta={self.beta:g},epsilon={self.epsilon:g},cap={self.shift_cap:g})"))
        if self.softcap:
            words.append(f"softcap={self.softcap:g}")
        words.append(f"tiles={self.tile_q}x{self.tile_k or 'full'}")
        if self.operands == "fp32":
            words.append(f"dots={self.dots}")
        return " ".join(words)


@functools.lru_cache
def from_key(key: str) -> AttentionSpec:
    """The spec whose `key` this is."""
    fields = json.loads(key)
    return AttentionSpec(**fields | {"output_heads": tuple(fields["output_heads"])})


DEFAULTS = {f.name: f.default for f in dataclasses.fields(AttentionSpec)}
SWITCHES = tuple(name for name in DEFAULTS if name not in ("backend", "kernel"))


def has_switch(backend: str, name: str) -> bool:
    """Whether a backend lets the user set this; every backend accepts what is not of its own arithmetic."""
    return (backend not in NO_SWITCHES or name in ("kernel", "smooth_k")
            or (name == "softcap" and backend == "standard"))
