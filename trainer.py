"""One run's state and one step of it: offsets -> micro-batches -> loss -> gradients -> clip -> update."""

import contextlib
import dataclasses
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

import checkpoint
import distributed
from attention import AttentionLayer, same_numerics
from attention.spec import from_key
from config import Config, as_dict
from data.loader import draw_offsets
from determinism import seed_microbatch
from diagnostics import probes, spectra
from hf import load_pretrained
from model import GPT
from optim import build_optimizer
from plan import Plan
from replay.switches import Switch, plain
from stop import StopRequested, StopSignal

EVALUATION_DRAW = 1 << 62  # of stochastic rounding; training counts its micro-batches from 0


class Readback:
    """Numbers on their way from the device: `numbers` waits for them alone, not for what was launched since."""

    def __init__(self, values: torch.Tensor):
        self.event = torch.cuda.Event() if values.is_cuda else None
        self.host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self.host.copy_(values, non_blocking=True)
        if self.event:
            self.event.record()

    def numbers(self) -> list[float]:
        if self.event:
            self.event.synchronize()
        return self.host.tolist()


class Probe(NamedTuple):
    """Numbers of a probe on their way; `record` waits for them."""

    heads: Readback
    spectra: Readback | None

    def record(self) -> dict:
        return probes.as_record(self.heads.numbers()) | (
            spectra.as_record(self.spectra.numbers()) if self.spectra else {})


class Trainer:
    """The state of one run and its step."""

    def __init__(self, config: Config, plan: Plan, group: distributed.Group, stop: StopSignal):
        self.config, self.plan, self.group, self.stop = config, plan, group, stop
        self.device = group.device
        torch.manual_seed(config.seed)  # the initial weights
        layers = self.layers = [AttentionLayer(spec, i, config.seed) for i, spec in enumerate(plan.specs)]
        self.raw = GPT(plan.model_args, layers)
        if plan.state:
            self.raw.load_state_dict(checkpoint.strip_prefixes(plan.state["model"]))
        elif config.init_from != "scratch":
            load_pretrained(self.raw, config.init_from)
        self.raw.to(self.device)
        self.optimizer = build_optimizer(self.raw, config, self.device.type)
        self.spectra = spectra.Spectra(self.raw) if config.probe_interval else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.dtype == "float16")
        if plan.state:
            self.optimizer.load_state_dict(plan.state["optimizer"])
            if self.spectra and "spectra" in plan.state:
                self.spectra.load_state_dict(plan.state["spectra"])
            if plan.state["scaler"]:  # empty where the checkpoint is of another dtype: the scale starts anew
                self.scaler.load_state_dict(plan.state["scaler"])
        self.step, self.switches, self.writer = plan.start, list(plan.switches), checkpoint.Writer()
        self.micro_batches = config.gradient_accumulation_steps // group.world_size
        dtype = getattr(torch, config.dtype)
        self.autocast = torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)
        model = torch.compile(self.raw, mode=config.compile_mode) if config.compile else self.raw
        # A CUDA graph writes its gradients to one place at every replay. Gradients that exist already are added to; new
        # ones would be that place itself, which the next micro-batch overwrites.
        self.keep_gradients = config.compile and config.compile_mode == "reduce-overhead"
        if self.keep_gradients:
            for p in self.raw.parameters():
                p.grad = torch.zeros_like(p)
        if group.world_size > 1:
            # Buffers are derived from the step, so broadcasting them would only cost time.
            ids = [group.local_rank] if self.device.type == "cuda" else None
            with warnings.catch_warnings():  # torch 2.13 renames the flag; 2.11 has no other
                warnings.filterwarnings("ignore", message=".*broadcast_buffers")
                model = torch.nn.parallel.DistributedDataParallel(
                    model, device_ids=ids, broadcast_buffers=False,
                    gradient_as_bucket_view=True)  # else gradients exist twice, and are copied
        self.model = model
        self.ahead = {}  # the batch that was read while the device worked

    def row(self, step: int):
        """The token offsets of all sequences of a step, in the order micro-step, then rank."""
        if self.plan.order:
            return self.plan.order.row(step)
        return draw_offsets(self.plan.header.n_tokens, self.config.block_size, self.config.sequences_per_step,
                            self.config.seed, "train", step)

    def read(self, split: str, offsets):
        """Inputs and targets of the sequences at n offsets, (n, block_size) int64, on the device or on its way."""
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
        for layer in self.layers:
            if layer.spec.stochastic:
                layer.rng[2].fill_(draw)  # an assignment would copy the number from the host, and wait

    def switch(self) -> dict:
        """Moves the layers whose switch is due; returns what the log says of this step's: layer and new attention."""
        due = {switch.layer: switch for switch in self.switches if switch.step <= self.step}
        moved = {i: from_key(switch.spec) for i, switch in due.items() if self.layers[i].spec != from_key(switch.spec)}
        for i, spec in moved.items():
            self.layers[i].spec = spec
        if moved and self.config.compile:
            torch.compiler.reset()  # its graphs hold the specs as constants, and it gives up after some recompilations
        now = [{"layer": i, "attention": moved[i].describe()} for i in sorted(moved) if due[i].step == self.step]
        return {"switched": now} if now else {}

    def plan_switch(self, layers: set[int], step: int) -> list[int]:
        """Has `layers` move to their remedy before `step`, those that do not have it by then; returns these."""
        moving = []
        for i in sorted(layers):
            spec = next((from_key(s.spec) for s in reversed(self.switches) if s.layer == i), self.plan.specs[i])
            if not same_numerics(spec, self.plan.remedies[i]):
                self.switches.append(Switch(step, i, self.plan.remedies[i].key))
                moving.append(i)
        return moving

    def switched(self) -> list[Switch]:
        """The switches of this run: made, or decided for the next step."""
        return [switch for switch in self.switches if switch.step <= self.step + 1]

    def probe(self, whole: bool, exact: bool = False) -> Probe:
        """`probes.measure` over the first sequences of all ranks; equal on all of them, so that they come to one
        decision. whole: `spectra.Spectra` too, which needs a probe_interval; exact: its norms are."""
        listening = contextlib.nullcontext()
        if whole:
            self.spectra.update(exact)
            listening = self.spectra.listening()
        with listening:
            values = probes.measure(self.raw, self.first[: self.config.probe_sequences], self.autocast)
        found = Readback(torch.cat([self.group.mean(values[:1]), self.group.max(values[1:])]))
        return Probe(found, Readback(self.group.mean(self.spectra.values())) if whole else None)

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

    def update(self, loss: torch.Tensor) -> Readback:
        """Clips, and updates the weights unless something is not finite. The device makes that choice, so it need not
        wait for this process. The readback is mean loss, gradient norm, whether they are bad, whether it updated."""
        scaled = self.scaler.is_enabled()
        if scaled:
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.raw.parameters(), self.config.grad_clip or float("inf"))
        loss = self.group.mean(loss)
        # With FP16 a gradient that overflowed under the loss scale is an ordinary skipped step; a loss that did is not.
        bad = ~(loss if scaled else norm).isfinite()
        skip = bad & (self.config.on_nonfinite != "ignore")
        if not scaled:
            self.optimizer.step(skip)
        else:  # the scaler asks the device anyway
            before = self.scaler.get_scale()
            if not skip:
                self.scaler.step(self.optimizer)
            self.scaler.update()  # lowers the loss scale after an overflow, and readies it for the next step
            skip = skip | (self.scaler.get_scale() < before)
        if self.config.qk_clip:
            self.raw.apply_qk_clip(self.group.max, skip)
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)
        self.step += 1
        return Readback(torch.stack([loss, norm, bad, ~skip]))

    def explain(self, step: int, loss: float, norm: float) -> str:
        """Which step, layer, head and backend; over the micro-batches of all ranks, so that rank 0 alone can tell."""
        self.step, self.stop.requested = step, False  # the run ends here, so a signal has nothing left to ask for
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)
        self.gradients()  # once more: those of the next step have replaced them
        rows = self.row(step).reshape(-1, self.config.batch_size)
        place = probes.explain_nonfinite(self.raw, (self.read("train", row)[0] for row in rows), self.autocast)
        self.writer.wait()  # the checkpoint to go back to may be on its way to the disk
        begun = self.config.init_from if self.config.init_from.endswith(".pt") else "none"
        return (f"step {step}: loss {loss}, gradient norm {norm}: {place}. Stopped before the update; the last good "
                f"checkpoint is {checkpoint.latest(Path(self.config.out_dir)) or begun}. Replay with another "
                "--attention, or go on past it with --on_nonfinite=skip")

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over eval_iters batches of the validation split: the same sequences for any world size and step."""
        config, total = self.config, torch.zeros((), device=self.device, dtype=torch.float64)
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
            total += loss.double()
        self.model.train()
        return self.group.sum(total).item() / config.eval_iters

    def check_stop(self):
        if self.group.any(self.stop.requested):
            raise StopRequested(self.stop.status)

    def state(self) -> dict:
        """Everything a resume needs. No generator state: order and dropout are functions of seed and step."""
        tokens = self.plan.tokens["train"]
        return {"model": self.raw.state_dict(), "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(), "step": self.step, "config": as_dict(self.config),
                "model_args": dataclasses.asdict(self.plan.model_args),
                "switches": plain(self.switched()),
                "data": {"tokenizer": tokens.tokenizer, "vocab_size": tokens.vocab_size},
                **({"spectra": self.spectra.state_dict()} if self.spectra else {})}
