"""Launches the Triton kernels: `flash`, a differentiable custom operator like `emulated`.

Launch configurations are pinned per GPU generation, head size and operand format, so that a recorded run and its
replay execute the same code; `scripts/bench_attention.py --tune` finds them, nothing tunes while training. A row's
result depends on spec.tile_k alone. Every other size below only moves the order of FP32 sums between programs that
do not share a row (forward, dQ) or a key (dK, dV), and is printed by `describe_launch`.

Where a tile says so and `fitted` allows it, Hopper's copy engine loads by descriptors (TMA). The host makes them: they
travel by value in the launch, so CUDA graphs keep their own copy, streams share nothing, and no memory is needed. A
kernel that made its own would need 128 bytes of global memory a descriptor and program, from an allocator that all of
Triton shares, and would wait for them.
"""

import contextlib
import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention import kernels, tiles
from attention.op import NOTHING, differentiable, output_like, rest_like
from attention.spec import FULL, SMALLEST_SHIFT, AttentionSpec

LARGEST_HEAD = 128
LARGEST_TILE = 128  # longer key tiles are walked in parts of this many keys
GROUP_BYTES = 12 << 20  # K and V of the heads that run side by side, well within Hopper's 60 MB of L2 cache
INTERPRET = tiles.INTERPRET.value


class Tile(NamedTuple):
    """rows x keys of one step of a kernel, warps of a program, stages of its load pipeline, the registers of a thread
    where the compiler must use fewer than it would, so that one more program fits (0: its choice), whether the copy
    engine loads, and what is launched where it cannot (None: the same tile, loading by pointers)."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int = 0
    tma: bool = False
    otherwise: "Tile | None" = None

    def __str__(self):
        registers = f"/{self.registers}r" if self.registers else ""
        return f"{self.rows}x{self.keys}/{self.warps}w/{self.stages}s{registers}{'/tma' if self.tma else ''}"

    def with_pointers(self) -> "Tile":
        return self.otherwise or self._replace(tma=False)

    def with_rows(self, most: int) -> "Tile":
        """No more rows than `most`, whatever loads."""
        return self._replace(rows=min(self.rows, most), otherwise=self.otherwise and self.otherwise.with_rows(most))


class Launch(NamedTuple):
    forward: dict[int, Tile]  # by key tile
    dq: Tile
    dkdv: Tile


# (generation, head size up to, operands). Generation 9: Hopper; 8 stands for every other one and needs 99 KB at most.
# A tile that is faster by descriptors may spill by pointers, where addresses take registers too.
# "tf32x3": FP32 operands whose every product is of TF32 parts, which take more registers and shared memory than BF16.
LAUNCHES = {
    (9, 64, "bf16"): Launch({128: Tile(64, 128, 4, 2, 168, True), 64: Tile(64, 64, 4, 3, 128), 32: Tile(128, 32, 4, 3)},
                            Tile(64, 64, 4, 2, 128, True), Tile(64, 64, 4, 3, 168, True, Tile(32, 64, 4, 3, 128))),
    (9, 128, "bf16"): Launch({128: Tile(64, 128, 4, 1, 168, True, Tile(128, 128, 8, 2)),
                              64: Tile(64, 64, 4, 3, 0, True), 32: Tile(128, 32, 4, 3)},
                             Tile(64, 64, 4, 2, 0, True), Tile(64, 64, 4, 2, 0, True)),
    (9, 64, "fp32"): Launch({128: Tile(64, 128, 4, 1), 64: Tile(64, 64, 4, 2), 32: Tile(64, 32, 4, 2)},
                            Tile(64, 32, 4, 2), Tile(32, 128, 8, 1)),
    (9, 64, "tf32x3"): Launch({128: Tile(64, 128, 8, 1), 64: Tile(128, 64, 8, 1), 32: Tile(128, 32, 8, 2, 128)},
                              Tile(128, 64, 8, 1), Tile(32, 128, 8, 1)),
    (9, 128, "fp32"): Launch({128: Tile(64, 128, 8, 1), 64: Tile(64, 64, 8, 1), 32: Tile(64, 32, 4, 1)},
                             Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    (9, 128, "tf32x3"): Launch({128: Tile(128, 32, 8, 1), 64: Tile(128, 64, 8, 1), 32: Tile(128, 32, 8, 1)},
                               Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    (8, 64, "bf16"): Launch({128: Tile(64, 128, 4, 2), 64: Tile(64, 64, 4, 2), 32: Tile(64, 32, 4, 2)},
                            Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    (8, 128, "bf16"): Launch({128: Tile(64, 128, 4, 1), 64: Tile(64, 64, 4, 2), 32: Tile(64, 32, 4, 2)},
                             Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    (8, 64, "fp32"): Launch({128: Tile(32, 128, 4, 1), 64: Tile(32, 64, 4, 1), 32: Tile(32, 32, 4, 1)},
                            Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    (8, 128, "fp32"): Launch({128: Tile(16, 64, 4, 1), 64: Tile(16, 64, 4, 1), 32: Tile(16, 32, 4, 1)},
                             Tile(16, 32, 4, 1), Tile(16, 32, 4, 1)),
}


def check_available(device: torch.device) -> None:
    """Errors: ValueError where the kernels cannot run on this device."""
    if device.type == "cuda":
        if INTERPRET:
            raise ValueError("TRITON_INTERPRET=1 runs the kernels on CPU tensors; unset it to use the GPU")
    elif device.type != "cpu" or not INTERPRET:
        raise ValueError(f"kernel=triton needs a CUDA GPU, got device {device}; use kernel=emulated (or auto), or set "
                         "TRITON_INTERPRET=1 to run the kernels on the CPU, slowly")


def operands_of(spec: AttentionSpec, dtype: torch.dtype) -> str:
    """The last part of a key of LAUNCHES, for tensors of this dtype."""
    parts = spec.operands == "fp32" and spec.dots == "tf32x3" and dtype != torch.bfloat16
    return "tf32x3" if parts else spec.operands


def launch_for(spec: AttentionSpec, head_size: int, device: torch.device, dtype: torch.dtype) -> tuple[tuple, Launch]:
    """The table's key and entry, its forward tile resolved to the one that spec.tile_k asks for."""
    generation = 9 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 else 8
    key = (generation, 64 if head_size <= 64 else 128, operands_of(spec, dtype) if generation == 9 else spec.operands)
    launch = LAUNCHES[key]
    if head_size > 64 and (spec.operands, spec.dots) == ("fp32", "ieee"):  # without tensor cores factors take registers
        launch = launch._replace(dq=launch.dq._replace(keys=16), dkdv=launch.dkdv._replace(rows=16))
    if spec.delta == "do_o_corrected" and launch.dq.registers:  # it sums P K beside dQ
        launch = launch._replace(dq=launch.dq._replace(registers=168))
    keys = min(spec.tile_k or LARGEST_TILE, LARGEST_TILE)
    tile = launch.forward[max(keys, 32)].with_rows(max(spec.tile_q, 16))
    tile = tile._replace(keys=min(keys, tile.keys))
    return key, launch._replace(forward={keys: tile.with_pointers() if _is_wide(spec, tile) else tile})


def _is_wide(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether a step of the online softmax takes more than one tile of the forward kernel."""
    return spec.tile_k == FULL or spec.tile_k > tile.keys


def fitted(tile: Tile, *tensors: Tensor) -> Tile:
    """tile, or its tile with pointers where descriptors cannot load: the same results, bit for bit, as it takes as many
    keys at a time, and sums over rows add 16 at a time whatever the tile. A descriptor sees (B, H, T, D) as a BF16
    matrix, tokens by columns, and loads whole tiles of it."""
    *_, T, D = tensors[0].shape
    fits = _whole(tile, T, D, tensors[0].dtype) and all(map(_is_matrix, tensors))
    return tile if fits else tile.with_pointers()


def _whole(tile: Tile, T: int, D: int, dtype: torch.dtype) -> bool:
    return (tile.tma and not INTERPRET and dtype == torch.bfloat16 and D in (64, 128)
            and T % max(tile.rows, tile.keys) == 0)


def _is_matrix(x: Tensor) -> bool:
    """Whether x (B, H, T, D) is B T tokens by (at least) H D columns, aligned as the copy engine needs it."""
    B, H, T, D = x.shape
    batch, head, token, _ = x.stride()
    return ((batch == T * token or B == 1) and ((H - 1) * head + D <= token or H == 1) and B * T < 2**31
            and x.dtype == torch.bfloat16 and token % 8 == 0 and x.data_ptr() % 16 == 0)


def describe_launch(spec: AttentionSpec, head_size: int, device: torch.device | str, T: int, dtype: torch.dtype) -> str:
    """One line for the run header: the tile, warps and stages of each kernel, for T tokens of this dtype. Errors:
    ValueError for what the kernels do not take, so that a run is told before it starts."""
    _check_sizes(spec, head_size)
    (generation, size, kind), launch = launch_for(spec, head_size, torch.device(device), dtype)
    (forward,) = launch.forward.values()
    tiles = {name: tile if _whole(tile, T, head_size, dtype) else tile.with_pointers()
             for name, tile in (("forward", forward), ("dq", launch.dq), ("dkdv", launch.dkdv))}
    return (f"triton {triton.__version__} gen{generation} D<={size} {kind}: "
            + " ".join(f"{name}={tile}" for name, tile in tiles.items()) + " (rows x keys/warps/stages/registers)")


def forward(q: Tensor, k: Tensor, v: Tensor, rng: Tensor, spec: AttentionSpec,
            want_stats: bool, counted: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, lse, ties, row_max and rest as op.differentiable describes them."""
    _check(q, spec)
    (B, H, T, D), device = q.shape, q.device
    _, launch = launch_for(spec, D, device, q.dtype)
    (tile,) = launch.forward.values()
    o = output_like(q, spec.stores_fp32)
    rest = rest_like(o, spec)
    lse = torch.empty((B, H, T), device=device, dtype=torch.float32)
    ties = torch.empty((counted, H, T) if want_stats else NOTHING, device=device, dtype=torch.int32)
    row_max = torch.empty((B, H, T) if want_stats else NOTHING, device=device, dtype=torch.float32)
    q, k, v = _rows(q), _rows(k), _rows(v)
    tile = fitted(tile, q, k, v)
    with _on(device):
        kernels.forward_kernel[(_programs(B * H, T, tile.rows),)](
            q, k, v, *_descriptors(tile, q, k, v), o, rest if spec.keeps_rest else None, lse, ties, row_max, rng,
            counted * H,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
            H, T, spec.tile_k or T, B * H, _group(k, B * H),
            **_switches(spec, D), **_forward_switches(spec, D), **_sizes(D, T, tile), STATS=want_stats,
            WIDE=_is_wide(spec, tile))
    return o, lse, ties, row_max, rest


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: AttentionSpec,
             rest: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv as op.differentiable describes them."""
    _check(q, spec)
    _, launch = launch_for(spec, q.shape[3], q.device, q.dtype)
    dq, dk, dv = (output_like(q, False) for _ in range(3))
    delta = torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)  # multiplied by alpha
    do, q, k, v, o, lse = _rows(do), _rows(q), _rows(k), _rows(v), _rows(o), lse.contiguous()
    if rest is not None and rest.stride() != o.stride():  # the kernel has O's strides alone
        o, rest = o.contiguous(), rest.contiguous()
    with _on(q.device):
        launch_dq(launch.dq, spec, do, q, k, v, o, rest, lse, delta, dq)
        launch_dkdv(launch.dkdv, spec, do, q, k, v, lse, delta, dk, dv)
    return dq, dk, dv


def launch_dq(tile: Tile, spec: AttentionSpec, do, q, k, v, o, rest, lse, delta, dq) -> None:
    """Writes delta and dq."""
    (B, H, T, D), tile = q.shape, fitted(tile, q, k, v, do)
    kernels.dq_kernel[(_programs(B * H, T, tile.rows),)](
        q, k, v, *_descriptors(tile, q, k, v, do), o, rest, do, lse, delta, dq, *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], *o.stride()[:3], *do.stride()[:3], *dq.stride()[:3], H, T, B * H, _group(k, B * H),
        **_switches(spec, D), **_sizes(D, T, tile), ALPHA=D**-0.5, DELTA=spec.delta)


def launch_dkdv(tile: Tile, spec: AttentionSpec, do, q, k, v, lse, delta, dk, dv) -> None:
    """Writes dk and dv."""
    (B, H, T, D), tile = q.shape, fitted(tile, q, k, v, do)
    kernels.dkdv_kernel[(_programs(B * H, T, tile.keys),)](
        q, k, v, *_descriptors(tile, q, k, v, do), do, lse, delta, dk, dv, *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], *do.stride()[:3], *dk.stride()[:3], H, T, B * H, _group(k, B * H),
        **_switches(spec, D), **_sizes(D, T, tile), ALPHA=D**-0.5)


flash = differentiable("lpattn::flash", forward, backward)


@functools.lru_cache
def _switches(spec: AttentionSpec, D: int) -> dict:
    """What every kernel is told of a spec. kernels.py says what UNIT and SCALE are."""
    unit, scale = _unit(spec, D)
    return dict(UNIT=unit, LOG2=unit * math.log2(math.e), SCALE=scale, SOFTCAP=float(spec.softcap),
                BF16=spec.operands == "bf16", SCORES=spec.scores,
                DOTS=spec.dots if spec.operands == "fp32" else "bf16")


@functools.lru_cache
def _forward_switches(spec: AttentionSpec, D: int) -> dict:
    """The rest of the forward kernel's switches; what is added to S or compared with it is divided by UNIT, as S is."""
    unit, _ = _unit(spec, D)
    shift = spec.lazy_threshold if spec.stabilizer == "lazy_max" else spec.fixed_shift
    return dict(PROBS=spec.probs, ROW_SUM=spec.row_sum, PV=spec.pv, OUTPUT=spec.output, RULE=spec.stabilizer,
                FP32_HEADS=sum(1 << head for head in spec.output_heads), BETA=spec.beta, LEAST=SMALLEST_SHIFT / unit,
                CAP=0.0 if spec.shift_cap == math.inf else spec.shift_cap / unit, SHIFT=shift / unit,
                EPSILON=spec.epsilon / unit)


def _unit(spec: AttentionSpec, D: int) -> tuple[float, float]:
    """(UNIT, SCALE): alpha may stay out of the scores where the product with it is exact or not rounded further."""
    alpha = D**-0.5
    exact = math.frexp(alpha)[0] == 0.5
    return (alpha, 1.0) if not spec.softcap and (exact or spec.scores == "fp32") else (1.0, alpha)


def _sizes(D: int, T: int, tile: Tile) -> dict:
    options = {"maxnreg": tile.registers} if tile.registers and not INTERPRET else {}
    return dict(D=D, DP=max(16, triton.next_power_of_2(D)), BLOCK_M=tile.rows, BLOCK_N=tile.keys,
                EVEN=T % max(tile.rows, tile.keys) == 0, TMA=tile.tma,
                num_warps=tile.warps, num_stages=tile.stages, **options)


def _descriptors(tile: Tile, q: Tensor, k: Tensor, v: Tensor, *do: Tensor) -> list:
    """What the copy engine reads q, k, v and dO from: each as a matrix of tokens, in tiles of rows or of keys."""
    operands = [(q, tile.rows), (k, tile.keys), (v, tile.keys), *((x, tile.rows) for x in do)]
    return [descriptor(x, rows) if tile.tma else None for x, rows in operands]


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Of x (B, H, T, D) as a (B T, H D) matrix, of which a load takes `rows` tokens of one head."""
    B, H, T, D = x.shape
    _, head, token, _ = x.stride()
    return TensorDescriptor(x, [B * T, (H - 1) * head + D], [token, 1], [rows, D])


def _programs(heads: int, T: int, block: int) -> int:
    count = heads * triton.cdiv(T, block)
    if count >= 2**31:
        raise ValueError(f"B * H = {heads} heads of T = {T} need {count} programs, more than the 2^31 - 1 of a launch; "
                         "use a smaller batch")
    return count


def _group(k: Tensor, heads: int) -> int:
    """How many heads run side by side: about GROUP_BYTES of K and V, twice that for long sequences, in groups of one
    size, as a small last one leaves multiprocessors idle."""
    groups = heads * 2 * k[0, 0].nbytes / (GROUP_BYTES if k.shape[2] < 4096 else 2 * GROUP_BYTES)
    return math.ceil(heads / max(1, round(groups)))


def _rows(x: Tensor) -> Tensor:
    """x with adjacent elements in its last dimension, and strides that a tile's 32-bit offsets can hold."""
    return x if x.stride(-1) == 1 and x.stride(2) < 2**24 else x.contiguous()


def _on(device: torch.device):
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _check(q: Tensor, spec: AttentionSpec) -> None:
    check_available(q.device)
    _check_sizes(spec, q.shape[-1])
    if q.dtype == torch.float64:
        raise ValueError("the kernels compute in FP32 and would round float64 tensors; use kernel=emulated")
    if INTERPRET and q.dtype != torch.float32:
        raise ValueError(f"Triton's interpreter has no {q.dtype} arithmetic; carry BF16 values in float32 tensors")


def _check_sizes(spec: AttentionSpec, head_size: int) -> None:
    if head_size > LARGEST_HEAD:
        raise ValueError(f"the kernels take head sizes up to {LARGEST_HEAD}, got {head_size}; use kernel=emulated")
    if max(spec.output_heads, default=0) > 62:
        raise ValueError(f"output_heads={spec.output_heads}: the kernels take heads up to 62; use kernel=emulated")
