"""Tokens a second of several arms of one config, taking turns in one process on one machine.

    python scripts/bench_throughput.py configs/gpt2_small_flash_bf16.toml --gradient_accumulation_steps=4
    torchrun --standalone --nproc_per_node=2 scripts/bench_throughput.py configs/gpt2_small_flash_bf16.toml

Takes a config and flags as train.py does, and those below besides. Most of the time is compilation, once an arm:
--arms=flash_bf16 --rounds=2 is a cheap measurement.

Data are random tokens with the frequencies of a text, unless --dataset names a corpus. A step is train.py's: batches
read, gradients, clipping, update, and the numbers of the step before read back; no evaluation, log or checkpoint
(scripts/bench_train.py times those).
"""

import argparse
import contextlib
import gc
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

import distributed
from config import ConfigError, check_once, load, override
from data.writer import write_corpus
from determinism import set_determinism
from files import write_text
from plan import prepare
from runinfo import describe_run
from scripts.arms import FURTHER
from scripts.targets import check_targets, named
from stop import StopRequested, StopSignal
from trainer import Trainer

PLAIN = "sdpa+loss_chunk=0+deterministic=False"  # what nanoGPT runs: torch's attention, all logits, fastest algorithms
ARMS = "sdpa,flash_fa2,flash_bf16,stabilized,flash_bf16+deterministic=False"
TOKENS = 4_000_000
KEY = ("config", "arm", "gpus", "batch_size", "tokens_per_step", "fits_gib")  # rows that agree in these are one row

# The first pattern that fits names a kernel's kind; on a CPU, an operator's. The compiler's own kernels are called
# triton_*, after all the operators that they fuse.
KINDS = (
    ("communication", r"nccl|gloo|all_?reduce|c10d"),
    ("loss", r"softmax_gradient|cross_entropy|nll_loss|log_softmax|logsumexp|softmax_online"),
    ("embedding", r"embedding_dense_backward|index_put|indexing_backward|sort|radix|scatter"),
    ("norms, elementwise", r"^triton_"),
    ("attention", r"flash|fmha|mha|sdpa|attention|lpattn::standard|emulated|^forward_kernel|^dq_kernel|^dkdv_kernel"),
    ("optimizer", r"adam|multi_tensor_apply|foreach|lerp"),
    ("matmul", r"gemm|cutlass|cublas|nvjet|xmma|splitk|wgmma|aten::(mm|addmm_?|bmm|linear|baddbmm|matmul)$"),
    ("copies", r"memcpy|memset"),
    ("norms, elementwise", r""),
)


def flags_of(name: str, argv: list[str]) -> list[str]:
    attention, *rest = name.split("+")
    return override(argv, f"--attention={attention}", *(f"--{item}" for item in rest))


class Arm:
    """One trainer; `name` as in --arms."""

    def __init__(self, name: str, argv: list[str], group: distributed.Group, stop: StopSignal):
        self.name, self.group, self.waiting = name, group, None
        self.config = load(flags_of(name, argv))
        self.before = memory(group)
        self.plan = prepare(self.config)
        set_determinism(self.config.seed, self.config.deterministic)
        self.trainer = Trainer(self.config, self.plan, group, stop)

    def turn(self, steps: int) -> float:
        """Seconds a step."""
        set_determinism(self.config.seed, self.config.deterministic)
        synchronize(self.group)
        self.group.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.trainer.optimizer.set_lr(self.trainer.step)
            loss = self.trainer.gradients()
            if self.waiting:
                self.waiting.numbers()
            self.waiting = self.trainer.update(loss)
        synchronize(self.group)
        return (time.perf_counter() - start) / steps

    def warm_up(self) -> dict:
        """Compiles, and returns GiB in use at the peak of a step and between steps, of this arm alone."""
        self.turn(2)
        if self.group.device.type != "cuda":
            self.turn(1)
            return {"peak_memory_gib": None, "static_memory_gib": None}
        torch.cuda.reset_peak_memory_stats()
        self.turn(2)
        return {"peak_memory_gib": (torch.cuda.max_memory_allocated() - self.before) / 2**30,
                "static_memory_gib": (memory(self.group) - self.before) / 2**30}


class Schedule:
    """Says what is done, with the time since the start, and whether the next part still fits into `seconds`."""

    def __init__(self, group: distributed.Group, seconds: float, start: float):
        self.group, self.seconds, self.start, self.longest = group, seconds, start, {}

    def now(self) -> float:
        return time.perf_counter() - self.start

    def fits(self, kind: str) -> bool:
        """Whether one more of this kind does, if it takes what the longest one so far took; the same on all ranks."""
        return not self.group.any(self.now() + self.longest.get(kind, 0.0) > self.seconds)

    @contextlib.contextmanager
    def part(self, kind: str, what: str) -> Iterator[None]:
        before = self.now()
        yield
        took = self.now() - before
        self.longest[kind] = max(took, self.longest.get(kind, 0.0))
        self.group.print(f"{self.now():7.1f} s: {what} ({took:.1f} s)")


def memory(group) -> int:
    """Bytes in use on the device."""
    return torch.cuda.memory_allocated() if group.device.type == "cuda" else 0


def synchronize(group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize()


def random_corpus(folder: Path, vocabulary: int = 50257) -> Path:
    """Tokens with Zipf's frequencies, so that as many positions share an embedding's gradient as in a text."""
    weights = 1 / np.arange(1, vocabulary + 1)
    drawn = np.random.Generator(np.random.Philox(0)).choice(vocabulary, TOKENS, p=weights / weights.sum())
    folder.mkdir()
    write_corpus(folder, "gpt2", vocabulary, {"train": [drawn], "val": [drawn[:100_000]]}, {})
    return folder


def matrix_rate(group) -> float:
    """FLOP/s of an 8192-cubed BF16 product of random numbers (512-cubed in FP32 on a CPU), the median of 20."""
    cuda = group.device.type == "cuda"
    n, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    a, b = (torch.randn(n, n, device=group.device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(25):
        synchronize(group)
        start = time.perf_counter()
        a @ b
        synchronize(group)
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(seconds[5:])


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def profile(arm: Arm, steps: int = 2) -> dict:
    """{"ms": kind -> ms a step, "idle" among them; "kernels": the 15 longest as [name, kind, ms a step, launches]}."""
    cuda = arm.group.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as found:
        wall = 1e3 * arm.turn(steps)
    times, kernels, spans = dict.fromkeys((kind for kind, _ in KINDS), 0.0), {}, []
    for event in found.events():
        if (event.device_type == torch.autograd.DeviceType.CUDA) != cuda or (cuda and event.is_user_annotation):
            continue
        ms = (event.time_range.elapsed_us() if cuda else event.self_cpu_time_total) / 1e3 / steps
        kind, total, launches = kernels.get(event.name, (kind_of(event.name), 0.0, 0))
        kernels[event.name] = kind, total + ms, launches + 1 / steps
        times[kind] += ms
        spans.append((event.time_range.start, event.time_range.end))
    busy, end = 0.0, float("-inf")  # kernels of several streams may overlap
    for start, stop in sorted(spans):
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    times["idle"] = max(0.0, wall - busy / 1e3 / steps)
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:15]
    return {"ms": times, "kernels": [[name, *values] for name, values in longest]}


def fit(name: str, argv: list[str], group, stop, limits: list[float]) -> list[dict]:
    """Rows with the largest micro-batch of an arm, a divisor of a step, that trains within each limit in GiB."""
    sequences, total = load(argv).sequences_per_step, torch.cuda.mem_get_info()[1] / 2**30

    def attempt(size: int, limit: float) -> dict | None:
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        micro_batches = min(2, sequences // size)  # with more than one, gradients are in memory during forward
        try:
            arm = Arm(name, override(argv, f"--batch_size={size}", f"--gradient_accumulation_steps={micro_batches}"),
                      group, stop)
            used = arm.warm_up()
            return row_of(arm, 0) | used | {"fits_gib": limit}
        except torch.OutOfMemoryError:
            return None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    sizes = [n for n in range(1, sequences + 1) if sequences % n == 0]
    start = min(8, sequences)  # activations grow with the batch: from one size follow the others, nearly
    one = attempt(start, total)
    fixed = one["static_memory_gib"]
    rows = []
    for limit in limits:
        likely = [n for n in sizes if fixed + (one["peak_memory_gib"] - fixed) * n / start < 1.1 * limit] or sizes[:1]
        row = next(filter(None, (attempt(n, limit) for n in reversed(likely))), None)
        if row is None:
            raise ConfigError(f"{name}: not even one sequence trains in {limit:g} GiB")
        print(f"{name}: {row['batch_size']} sequences train in {limit:g} GiB, peak {row['peak_memory_gib']:.1f} GiB")
        rows.append(row)
    return rows


def row_of(arm: Arm, rate: float) -> dict:
    info = describe_run(arm.config, arm.plan, arm.group, arm.trainer)
    return {"arm": arm.name, "attention": arm.config.attention, "gpus": arm.group.world_size,
            "batch_size": arm.config.batch_size, "tokens_per_step": arm.config.tokens_per_step,
            "loss_chunk": arm.config.loss_chunk, "deterministic": arm.config.deterministic,
            "compile": arm.config.compile, "dtype": arm.config.dtype, "matrix_tflops": rate / 1e12 or None,
            "hardware": info["device_name"], "commit": info["git_commit"], "versions": info["versions"]}


def fit_all(names: list[str], argv: list[str], group, stop, schedule: Schedule,
            limits: list[float]) -> Iterator[list[dict]]:
    """The rows of `fit` of all arms so far, again after every arm. The first is tried whatever `schedule` says."""
    if group.device.type != "cuda" or group.world_size > 1:
        raise ConfigError("--fit measures the memory of one GPU; run it without torchrun, on a GPU")
    found = []
    for name in names:
        if found and not schedule.fits("fit"):
            group.print(f"{schedule.now():7.1f} s: no time for {', '.join(names[names.index(name):])}")
            return
        with schedule.part("fit", name):
            found += fit(name, argv, group, stop, limits)
        yield found


def measure(names: list[str], argv: list[str], group, stop, schedule: Schedule, rounds: int,
            steps: int, profiled: bool) -> Iterator[list[dict]]:
    """A row of each arm that is ready, again after every arm that joined and after every round and profile.

    An arm that joins is compiled; then all that are ready take a turn, so that it has a row, with ratios, before the
    next one is compiled. The first arm is measured whatever `schedule` says."""
    rate = matrix_rate(group)
    arms, used, seconds = [], [], []
    for name in names:
        if arms and not schedule.fits("arm"):
            group.print(f"{schedule.now():7.1f} s: no time for {', '.join(names[len(arms):])}")
            break
        with schedule.part("arm", f"{name} is compiled"):
            arms.append(Arm(name, argv, group, stop))
            used.append(arms[-1].warm_up())
        with schedule.part("round", f"round of {len(arms)} arms"):
            seconds.append([arm.turn(steps) for arm in arms])
        yield rows_of(arms, used, seconds, rate)
    for i in range(rounds - 1):
        if not schedule.fits("round"):
            group.print(f"{schedule.now():7.1f} s: no time for more rounds than {i + 1} of {rounds}")
            break
        with schedule.part("round", f"round {i + 2} of {rounds}"):
            seconds.append([arm.turn(steps) for arm in arms])
        yield rows_of(arms, used, seconds, rate)
    for i, arm in enumerate(arms if profiled else []):
        if not schedule.fits("profile"):
            group.print(f"{schedule.now():7.1f} s: no time for more profiles than {i} of {len(arms)}")
            break
        with schedule.part("profile", f"{arm.name} is profiled"):
            used[i]["profile"] = profile(arm)
        yield rows_of(arms, used, seconds, rate)


def rows_of(arms: list[Arm], used: list[dict], seconds: list[list[float]], rate: float) -> list[dict]:
    """One row an arm: medians, and ratios to the plain recipe and to sdpa under the same flags, round by round.

    seconds[round][arm] a step; the first rounds lack the arms that joined later."""
    rows = []
    for i, arm in enumerate(arms):
        rounds = [times for times in seconds if i < len(times)]
        mine = [times[i] for times in rounds]
        per_s = arm.config.tokens_per_step / statistics.median(mine)
        row = row_of(arm, rate) | used[i] | {
            "rounds": len(mine),
            "step_ms": 1e3 * statistics.median(mine), "step_ms_min": 1e3 * min(mine), "step_ms_max": 1e3 * max(mine),
            "tokens_per_s": per_s,
            "model_flops_utilisation": per_s * arm.trainer.raw.flops_per_token() / (rate * arm.group.world_size)}
        sdpa = "+".join(["sdpa", *arm.name.split("+")[1:]])
        for name, other in (("ratio_to_plain", PLAIN), ("ratio_to_sdpa", sdpa)):
            at = next((j for j, one in enumerate(arms) if one.name == other), None)
            if at is not None and arms[at].config.tokens_per_step == arm.config.tokens_per_step:
                row[name] = statistics.median(times[at] / times[i] for times in rounds if at < len(times))
        rows.append(row)
    return rows


def report(rows: list[dict], known: list[dict]) -> None:
    """Prints what was measured, and scaling against the row of one GPU, where there is one."""
    print(f"{'arm':>42} {'GPUs':>4} {'tokens/s':>11} {'step ms':>8} {'/plain':>7} {'/sdpa':>7} {'MFU':>6} "
          f"{'peak GiB':>8}")
    for row in rows:
        ratios = "".join(f" {row[name]:7.3f}" if name in row else f" {'-':>7}"
                         for name in ("ratio_to_plain", "ratio_to_sdpa"))
        peak = "-" if row["peak_memory_gib"] is None else f"{row['peak_memory_gib']:.2f}"
        line = (f"{row['arm']:>42} {row['gpus']:4} {row['tokens_per_s']:11,.0f} {row['step_ms']:8.1f}{ratios} "
                f"{row['model_flops_utilisation']:6.3f} {peak:>8}")
        one = next((r for r in known if r["gpus"] == 1 and "tokens_per_s" in r and row["gpus"] > 1 and all(
            r.get(k) == row.get(k) for k in ("config", "arm", "batch_size"))), None)
        print(line + (f"  {row['tokens_per_s'] / one['tokens_per_s']:.3f} x one GPU" if one else ""))
    print(f"matrix rate {rows[0]['matrix_tflops']:.1f} TFLOP/s; MFU counts 6 N + 12 L C T FLOP a token")
    for row in (r for r in rows if "profile" in r):
        whole = sum(row["profile"]["ms"].values())
        print(f"{row['arm']}: " + ", ".join(f"{kind} {ms:.2f} ms ({ms / whole:.1%})"
                                            for kind, ms in row["profile"]["ms"].items() if ms))
        for name, kind, ms, launches in row["profile"]["kernels"]:
            print(f"  {ms:9.3f} ms {launches:7.1f} x  {kind:18} {name[:100]}")


def merge(path: Path, rows: list[dict]) -> list[dict]:
    """Rows of the file with `rows` in the place of those that they measure again. Errors: ConfigError for a file that
    is not of this script."""
    try:
        old = json.loads(path.read_text())["rows"] if path.is_file() else []
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is no --out of this script ({error!r}); give another name") from None
    new = {tuple(row.get(k) for k in KEY) for row in rows}
    return [row for row in old if tuple(row.get(k) for k in KEY) not in new] + rows


def save(path: Path, argv: list[str], rows: list[dict]) -> None:
    """Merges rows into the file; a process that is killed leaves the file of before or of after."""
    write_text(path, json.dumps({"command": " ".join(["scripts/bench_throughput.py", *argv]),
                                 "rows": merge(path, rows)}, indent=1) + "\n")


def gibibytes(text: str) -> list[float]:
    """The type of --fit. Errors: ValueError for what is no number of GiB."""
    found = [float(part) for part in text.split(",")]
    if not all(0 < size < math.inf for size in found):
        raise ValueError
    return found


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and train.py's flags. Errors: ConfigError, OSError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s [CONFIG.toml] [--key=value ...]", epilog=FURTHER,
                                     allow_abbrev=False)
    parser.add_argument("--arms", default=ARMS, metavar="A,B,...", help="ATTENTION[+KEY=VALUE...], e.g. "
                        f"flash_bf16+loss_chunk=4096; the plain nanoGPT recipe is always first; default: {ARMS}")
    parser.add_argument("--rounds", type=int, default=5, help="medians over so many are reported; default 5")
    parser.add_argument("--steps", type=int, default=4, help="that every arm makes in each round; default 4")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no arm and no round that would end "
                        "later than this, and report what is known by then")
    parser.add_argument("--profile", action="store_true", help="device time by kind of kernel, longest kernels")
    parser.add_argument("--fit", type=gibibytes, metavar="80,24", help="instead: the largest micro-batch, among those "
                        "that divide a step, that trains in so many GiB")
    parser.add_argument("--out", type=named, metavar="FILE", help="add rows to this JSON file once they are known; "
                        "rows of the same arm, GPUs and size are replaced")
    check_once(argv)
    options, rest = parser.parse_known_args(argv)
    if options.rounds < 1 or options.steps < 1 or math.isnan(options.seconds):
        raise ConfigError(f"--rounds={options.rounds} --steps={options.steps} --seconds={options.seconds}: give at "
                          "least one round and step, and a number of seconds")
    check_targets(options.out)
    if options.out:
        merge(options.out, [])  # what is there is told before anything is measured
    return options, rest


def main(argv: list[str]) -> int:
    """Exit status: 0, or 128 + the signal that ended it. Errors: ValueError, OSError."""
    start = time.perf_counter()
    options, rest = parse(argv)
    names = [PLAIN, *(name for name in options.arms.split(",") if name and name != PLAIN)]
    chosen, out, rows = rest[0] if rest and rest[0].endswith(".toml") else "", options.out, []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if not any(arg.startswith("--dataset=") for arg in rest):
            rest.append(f"--dataset={random_corpus(Path(folder) / 'zipf')}")
        rest = override(rest, f"--out_dir={folder}/run", "--init_from=scratch", "--record=False")
        config, stop = load(rest), StopSignal()
        set_determinism(config.seed, True)  # cuBLAS reads its variable once; arms choose the rest at each turn
        # Each arm is an entry; and shapes are static, as in training, whatever arms differ in.
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=64, automatic_dynamic_shapes=False))
        group = distributed.init(config.device, config.collective_timeout_s)
        stack.callback(group.close)
        schedule = Schedule(group, options.seconds, start)
        for name in names:  # what is wrong with the last one is told before the first one is compiled
            load(flags_of(name, rest))
        every = (fit_all(names, rest, group, stop, schedule, options.fit)
                 if options.fit else measure(names, rest, group, stop, schedule, options.rounds, options.steps,
                                             options.profile))
        code = 0
        try:
            for found in every:
                rows = [{"config": chosen} | row for row in found]
                if out and group.is_main:
                    save(out, argv, rows)
        except StopRequested as stopped:
            code = stopped.status
        if group.is_main:
            if rows and not options.fit:
                report(rows, json.loads(out.read_text())["rows"] if out else rows)
            if code:
                print(f"bench_throughput.py: stopped by a signal after {schedule.now():.1f} s, with {len(rows)} rows "
                      + (f"measured, in {out}" if rows and out else "measured"), file=sys.stderr)
        return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"bench_throughput.py: {error}")
