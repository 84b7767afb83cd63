"""Train a GPT with pluggable attention, recording or replaying the order of its batches.

    torchrun --standalone --nproc_per_node=4 train.py configs/gpt2_small_flash_bf16.toml
    python train.py configs/mini_flash_bf16.toml --attention=stabilized --replay=runs/mini/order.bin

One step: row of offsets -> micro-batches -> loss -> gradients -> clip -> update -> metrics. Everything that can be
wrong with a config, a corpus or an order file is found by plan.py, before anything is started or written.
"""

import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path

import torch

import checkpoint
import distributed
from attention import AttentionLayer
from checkpoint import CheckpointError, NonFiniteState
from config import Config, as_dict, load
from data.loader import DataError, draw_offsets
from determinism import seed_microbatch, set_determinism
from diagnostics.probes import explain_nonfinite, probe
from metrics import Metrics, MetricsError
from model import GPT
from optim import build_optimizer, learning_rate
from plan import Plan, check_ranks_agree, prepare
from replay.order import OrderError, Recorder
from runinfo import describe_run, print_header
from stop import StopRequested, StopSignal

EXIT_USER, EXIT_NONFINITE, EXIT_SIGTERM = 2, 3, 143  # 143 = 128 + SIGTERM, as a shell reports it
EVALUATION_DRAW = 1 << 62  # of stochastic rounding; training counts its micro-batches from 0


class NonFiniteError(RuntimeError):
    """Training stopped before an update that would have put non-finite numbers into the weights."""


class Trainer:
    """The state of one run and its step."""

    def __init__(self, config: Config, plan: Plan, group: distributed.Group, stop: StopSignal):
        self.config, self.plan, self.group, self.stop = config, plan, group, stop
        self.device = group.device
        set_determinism(config.seed, config.deterministic)
        layers = [AttentionLayer(spec, i, config.seed) for i, spec in enumerate(plan.specs)]
        self.raw = GPT(plan.model_args, layers)
        if plan.state:
            self.raw.load_state_dict(checkpoint.strip_prefixes(plan.state["model"]))
        elif config.init_from != "scratch":
            from hf import load_pretrained  # only here: it may need transformers

            load_pretrained(self.raw, config.init_from)
        self.raw.to(self.device)
        self.optimizer = build_optimizer(self.raw, config, self.device.type)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.dtype == "float16")
        if plan.state:
            self.optimizer.load_state_dict(plan.state["optimizer"])
            self.scaler.load_state_dict(plan.state["scaler"])
        self.step = plan.start
        self.stochastic = [m for m in layers if m.spec.output == "stochastic"]
        self.micro_batches = config.gradient_accumulation_steps // group.world_size
        dtype = getattr(torch, config.dtype)
        self.autocast = torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)
        model = torch.compile(self.raw) if config.compile else self.raw
        if group.world_size > 1:
            # Buffers are derived from the step, so broadcasting them would only cost time.
            ids = [group.local_rank] if self.device.type == "cuda" else None
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)
        self.model = model
        self.ahead = {}  # the batch that was read while the device worked

    def row(self, step: int):
        """The token offsets of all sequences of a step, in the order micro-step, then rank."""
        if self.plan.order:
            return self.plan.order.row(step)
        return draw_offsets(self.plan.header.n_tokens, self.config.block_size, self.config.sequences_per_step,
                            self.config.seed, "train", step)

    def read(self, split: str, offsets):
        x, y = self.plan.tokens[split].batch(offsets, self.config.block_size)
        if self.device.type != "cuda":
            return x, y
        return tuple(t.pin_memory().to(self.device, non_blocking=True) for t in (x, y))

    def micro_batch(self, step: int, micro: int):
        """Micro-batch `micro` of this rank: (index over the whole run, x, y)."""
        index = micro * self.group.world_size + self.group.rank
        size = self.config.batch_size
        x, y = self.read("train", self.row(step)[index * size : (index + 1) * size])
        return step * self.config.gradient_accumulation_steps + index, x, y

    def set_draw(self, draw: int):
        """Makes stochastic rounding a function of the batch: neither a resume nor the number of ranks changes it."""
        for layer in self.stochastic:
            layer.rng[2] = draw

    def gradients(self) -> torch.Tensor:
        """Forward and backward over this rank's micro-batches; returns their mean loss, on the device."""
        total = torch.zeros((), device=self.device)
        for micro in range(self.micro_batches):
            self.check_stop()
            draw, x, y = self.ahead.pop((self.step, micro), None) or self.micro_batch(self.step, micro)
            if micro == 0:
                self.first = x
            if self.config.dropout:
                seed_microbatch(self.config.seed, draw)
            self.set_draw(draw)
            last = micro == self.micro_batches - 1
            sync = contextlib.nullcontext() if last or self.group.world_size == 1 else self.model.no_sync()
            with sync:
                with self.autocast:
                    _, loss = self.model(x, y)
                    loss = loss / self.micro_batches
                following = (self.step, micro + 1) if not last else (self.step + 1, 0)
                if following[0] < self.config.max_iters:
                    self.ahead = {following: self.micro_batch(*following)}
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def update(self, loss: torch.Tensor) -> tuple[float, bool]:
        """Clips, and updates the weights unless something is not finite; returns gradient norm and whether it did."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.raw.parameters(), self.config.grad_clip or float("inf"))
        # With FP16 a gradient that overflowed under the loss scale is an ordinary skipped step; a loss that did is not.
        value = loss if self.scaler.is_enabled() else norm
        finite = bool(self.group.mean(value.detach().float()).isfinite())
        if finite or self.config.on_nonfinite == "ignore":
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.config.qk_clip:
                self.raw.apply_qk_clip(self.group.max)
            return norm.item(), self.scaler.get_scale() >= before
        if self.config.on_nonfinite == "stop":
            raise NonFiniteError(self.explain(loss.item(), norm.item()))
        self.scaler.update()  # lowers the loss scale, and readies it for the next step
        return norm.item(), False

    def explain(self, loss: float, norm: float) -> str:
        """Which step, layer, head and backend; over the micro-batches of all ranks, so that rank 0 alone can tell."""
        rows = self.row(self.step).reshape(-1, self.config.batch_size)
        place = explain_nonfinite(self.raw, (self.read("train", row)[0] for row in rows), self.autocast)
        last = checkpoint.latest(Path(self.config.out_dir))
        return (f"step {self.step}: loss {loss}, gradient norm {norm}: {place}. Stopped before the update; the last "
                f"good checkpoint is {last or 'none'}. Replay with another --attention, or go on past it with "
                "--on_nonfinite=skip")

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over eval_iters batches of the validation split: the same sequences for any world size and step."""
        config, total = self.config, torch.zeros(2, device=self.device, dtype=torch.float64)
        offsets = draw_offsets(self.plan.tokens["val"].n_tokens, config.block_size,
                               config.eval_iters * config.batch_size, config.seed, "val", 0)
        self.model.eval()
        for i in range(-(-config.eval_iters // self.group.world_size)):
            self.check_stop()
            batch = i * self.group.world_size + self.group.rank
            if batch >= config.eval_iters:
                continue  # this rank is done; it goes on answering check_stop
            self.set_draw(EVALUATION_DRAW + batch)
            x, y = self.read("val", offsets[batch * config.batch_size : (batch + 1) * config.batch_size])
            with self.autocast:
                _, loss = self.raw(x, y) if not config.compile else self.model(x, y)
            total += torch.stack([loss.double(), torch.ones_like(loss, dtype=torch.float64)])
        self.model.train()
        summed = self.group.sum(total)
        return (summed[0] / summed[1]).item()

    def check_stop(self):
        if self.group.any(self.stop.requested):
            raise StopRequested

    def state(self) -> dict:
        """Everything a resume needs. No generator state: order and dropout are functions of seed and step."""
        tokens = self.plan.tokens["train"]
        return {"model": self.raw.state_dict(), "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(), "step": self.step, "config": as_dict(self.config),
                "model_args": dataclasses.asdict(self.plan.model_args),
                "data": {"tokenizer": tokens.tokenizer, "vocab_size": tokens.vocab_size}}


def train(trainer: Trainer, info: dict) -> int:
    """Runs to max_iters or a signal and returns the exit status. Errors: NonFiniteError, CheckpointError, MetricsError,
    OrderError, DataError."""
    config, plan, group = trainer.config, trainer.plan, trainer.group
    out = Path(config.out_dir)
    print_header(info, group)
    metrics = Metrics(out, as_dict(config), info, group.is_main)
    recorder = Recorder(out / "order.bin", plan.header) if config.record and group.is_main else None
    if recorder:
        for step in range(recorder.rows, plan.start):  # a run that starts from another's checkpoint
            recorder.append(step, trainer.row(step))
    saved = plan.start if config.init_from == "resume" else None

    def save():
        nonlocal saved
        if group.is_main and saved != trainer.step:
            if recorder:
                recorder.sync()  # a step's row is on disk before its weights are
                metrics.update_run(order=info["order"] | {"rows": recorder.rows, "sha256": recorder.sha256()})
            try:
                checkpoint.save(out, trainer.step, trainer.state(), config.keep_checkpoints)
            except NonFiniteState as error:
                if config.on_nonfinite != "ignore":
                    raise
                metrics.say(f"{error}")  # asked to go on regardless: the healthy checkpoints stay
        saved = trainer.step

    code, clock, steps, seconds = 1, time.perf_counter(), 0, 0.0
    try:
        while trainer.step < config.max_iters:
            step, record = trainer.step, {"step": trainer.step}
            if step % config.eval_interval == 0:
                record["val_loss"] = trainer.evaluate()
            if step % config.checkpoint_interval == 0:
                save()
            clock = time.perf_counter()
            if recorder:
                recorder.append(step, trainer.row(step))
            trainer.optimizer.set_lr(step)
            loss = trainer.gradients()
            if config.probe_interval and step % config.probe_interval == 0:
                record |= probe(trainer.raw, trainer.first[: config.probe_sequences], trainer.autocast)
            norm, updated = trainer.update(loss)
            trainer.optimizer.zero_grad()
            trainer.step += 1
            steps, seconds = steps + 1, seconds + time.perf_counter() - clock  # training alone
            if step % config.log_interval == 0 or "val_loss" in record or trainer.step == config.max_iters:
                record |= {"loss": group.mean(loss).item(), "lr": learning_rate(step, config), "grad_norm": norm,
                           "tokens": trainer.step * config.tokens_per_step, "time": time.time(),
                           "tokens_per_s": steps * config.tokens_per_step / seconds,
                           **({} if updated else {"skipped": True})}
                metrics.log(record)
                steps, seconds = 0, 0.0
        metrics.log({"step": trainer.step, "val_loss": trainer.evaluate()})
        save()
        code = 0
    except StopRequested:
        trainer.optimizer.zero_grad()
        save()
        group.print(f"stopped by a signal at step {trainer.step}; saved to {out}, go on with --init_from=resume")
        code = EXIT_SIGTERM
    finally:
        if recorder:
            recorder.close()
        metrics.close(code)
    return code


def report(what: str, error: object, code: int, any_rank: bool = False) -> int:
    """One sentence on standard error: of rank 0, or of each rank where the others may not have met the error."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or any_rank:
        print(f"train.py{f' on rank {rank}' if rank != '0' else ''}: {what}: {error}", file=sys.stderr, flush=True)
    return code


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, EXIT_USER, EXIT_NONFINITE, EXIT_SIGTERM; 1 where another rank is gone; a traceback is a bug."""
    stop, group, failed = StopSignal(), None, True
    try:
        config = load(sys.argv[1:] if argv is None else argv)
        plan = prepare(config)
        group = distributed.init(config.device, config.collective_timeout_s)
        check_ranks_agree(plan, group)
        trainer = Trainer(config, plan, group, stop)
        info = describe_run(config, plan, group, trainer)
    except (ValueError, CheckpointError) as error:
        if group:
            group.close(failed)
        return report("error", error, EXIT_USER)
    try:
        code = train(trainer, info)
        failed = False
        return code
    except (CheckpointError, MetricsError, OrderError, DataError) as error:
        return report("error", error, EXIT_USER, any_rank=True)
    except NonFiniteError as error:
        return report("stopped", error, EXIT_NONFINITE)
    except RuntimeError as error:  # gloo has no error class of its own
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        return report("stopped", f"another rank ended or did not answer within {config.collective_timeout_s:g} s, in "
                      f"step {trainer.step} ({error}); its own message tells why. Go on with --init_from=resume", 1,
                      any_rank=True)
    finally:
        if group.world_size > 1:
            time.sleep(0.1)  # or gloo's threads may still want the GIL, which its destructor holds as it waits for them
        group.close(failed)


if __name__ == "__main__":
    sys.exit(main())
