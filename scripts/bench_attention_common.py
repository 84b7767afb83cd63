"""What the modes of bench_attention.py share: naming what to time, its inputs, the clock and the file of results."""

import json
import re
import statistics
import sys

import torch

from attention import AttentionSpec
from attention.layers import changed
from files import write_text
from runinfo import git_state, processor

DTYPES = ("bfloat16", "float16", "float32")
RNG = (1234567, 3, 5)  # seed, layer and draw of stochastic rounding


def parse_shapes(text: str) -> list[tuple[int, int, int, int]]:
    """"B,H,T,D;..." -> [(B, H, T, D), ...]. Errors: ValueError with the item at fault."""
    shapes = []
    for item in text.split(";"):
        numbers = item.split(",")
        if len(numbers) != 4 or not all(n.strip().isdigit() and int(n) > 0 for n in numbers):
            raise ValueError(f"--shapes item {item!r} is not B,H,T,D, four positive numbers (shapes separated by ';')")
        shapes.append(tuple(map(int, numbers)))
    return shapes


def parse_arm(text: str) -> tuple[AttentionSpec, int | None, torch.dtype]:
    """BACKEND[@TILE_K][+SWITCH=VALUE...][+stats[N]][/DTYPE] -> spec, the sequences whose ties are counted (-1: all;
    None: no row statistics are asked for), dtype of the tensors.

    Errors: ValueError with the part at fault.
    """
    rest, slash, dtype = text.partition("/")
    head, *parts = rest.split("+")
    backend, at, tile = head.partition("@")
    counted = next((part.removeprefix("stats") for part in parts if re.fullmatch(r"stats\d*", part)), None)
    switches = [part for part in parts if not part.startswith("stats")]
    if ((slash and dtype not in DTYPES) or (at and not tile.isdigit()) or not all("=" in part for part in switches)
            or len(parts) - len(switches) != (counted is not None)):
        raise ValueError(f"--arms item {text!r} is not BACKEND[@TILE_K][+SWITCH=VALUE...][+stats[N]][/DTYPE] with a "
                         f"DTYPE of {', '.join(DTYPES)}")
    spec = changed(AttentionSpec(), "+".join([backend, *([f"tile_k={tile}"] if at else []), *switches]))
    if dtype == "float16" and spec.rounds_bf16:
        raise ValueError(f"--arms item {text!r}: {spec.backend} rounds to BF16, so it takes no float16 tensors")
    if counted is not None and spec.backend == "sdpa":
        raise ValueError(f"--arms item {text!r}: sdpa is timed as torch has it, without row statistics; leave them out")
    return spec, None if counted is None else int(counted or -1), getattr(torch, dtype or "bfloat16")


def tensors(shape, dtype, std=1.0, seed=0):
    """q, k, v (leaves that share one packed tensor) and dO."""
    B, H, T, D = shape
    g = torch.Generator("cuda").manual_seed(seed)
    packed = (torch.randn(B, T, 3, H, D, device="cuda", generator=g) * std).bfloat16().to(dtype)
    do = torch.randn(B, T, H, D, device="cuda", generator=g).bfloat16().to(dtype).transpose(1, 2)
    return [packed[:, :, i].transpose(1, 2).detach().requires_grad_() for i in range(3)], do


class Clock:
    """Medians of calls that take turns."""

    def __init__(self):
        self.cache = torch.empty(1 << 30, dtype=torch.int8, device="cuda")

    def one(self, call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # half a millisecond, so that the launches are queued before the call's turn comes
        self.cache.zero_()
        start.record()
        call()
        end.record()
        return start, end

    def medians(self, calls: list, rounds: int) -> list[float]:
        """ms of each call."""
        for call in calls:
            for _ in range(2):
                call()
        events = [[self.one(call) for call in calls] for _ in range(rounds)]
        torch.cuda.synchronize()
        return [statistics.median(start.elapsed_time(end) for start, end in turns)
                for turns in zip(*events, strict=True)]


def write(path, **content):
    """Hardware, commit and versions, then `content`, as JSON."""
    import triton

    head = dict(hardware=torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
                commit=git_state()["git_commit"],
                versions=dict(python=sys.version.split()[0], torch=torch.__version__, triton=triton.__version__,
                              cuda=torch.version.cuda))
    write_text(path, json.dumps(head | content, indent=1) + "\n")
