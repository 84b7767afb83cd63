"""What training knows of a step once its numbers have left the device: the log, and what ends or changes the run."""

import contextlib
import dataclasses
import time
from pathlib import Path

from diagnostics.monitor import Alarm, MonitorRule
from failure import RISE, WINDOW, FailureRule
from metrics import Metrics, read_metrics
from optim import learning_rate
from replay.switches import companion, plain, write_switches
from trainer import Probe, Readback, Trainer


class NonFiniteError(RuntimeError):
    """Training stopped before an update that would have put non-finite numbers into the weights."""


class RunFailed(Exception):
    """The loss exploded by failure.FailureRule, and stop_when_failed asks to end the run there."""


class RunWarned(Exception):
    """The monitor warned, and monitor=stop asks to end the run there."""


class StepLog:
    """Logs each step one step late, when its numbers have left the device: so neither waits for the other."""

    def __init__(self, trainer: Trainer, metrics: Metrics):
        self.trainer, self.config, self.metrics = trainer, trainer.config, metrics
        self.waiting, self.steps, self.began = None, 0, time.perf_counter()
        self.rule, self.monitor = FailureRule(), MonitorRule(self.config.monitor_thresholds)
        if self.config.init_from == "resume" and (self.config.stop_when_failed or self.config.monitor != "off"):
            for record in read_metrics(self.config.out_dir):  # both rules go on where they were
                if record["step"] < trainer.step:
                    self.monitor.update(record)
                    if "loss" in record:
                        self.rule.failed(record["loss"])
            self.switch(self.monitor.active, trainer.step)  # of which an earlier session only warned
        self.keep_switches()

    def add(self, record: dict, readback: Readback, probed: Probe | None = None):
        """What is known of a step, and its numbers that the device may still be working on."""
        self.waiting, self.steps, self.now = (record, readback, probed), self.steps + 1, time.perf_counter()

    def settle(self):
        """Finishes the step that waits, before anything follows from it. Errors: NonFiniteError, MetricsError, and
        RunFailed and RunWarned where that is asked for."""
        if not self.waiting:
            return
        (record, readback, probed), self.waiting = self.waiting, None
        step, config = record["step"], self.config
        loss, norm, bad, updated = readback.numbers()
        stop = bad and config.on_nonfinite == "stop"
        record |= probed.record() if probed else {}
        alarms = self.monitor.update(record) if config.monitor != "off" else []
        record |= {"warnings": [dataclasses.asdict(alarm) for alarm in alarms]} if alarms else {}
        told = bad or not updated or len(record) > 1  # by an evaluation or a probe
        if told or step % config.log_interval == 0 or step + 1 == config.max_iters:
            record |= {"loss": loss, "lr": learning_rate(step, config), "grad_norm": norm,
                       "tokens": (step + 1) * config.tokens_per_step, "time": time.time(),
                       "tokens_per_s": self.steps * config.tokens_per_step / (self.now - self.began)}
            record |= {"stopped": True} if stop else {} if updated else {"skipped": True}
            self.metrics.log(record)
            self.steps, self.began = 0, self.now
            if stop:
                raise NonFiniteError(self.trainer.explain(step, loss, norm))
            if config.stop_when_failed and self.rule.failed(loss):
                raise RunFailed(f"failed at step {step}: the mean of the last {WINDOW} logged losses is {RISE} above "
                                "its minimum, or the loss is not finite")
        self.act(alarms)

    def act(self, alarms: list[Alarm]):
        """Says each warning and does what `monitor` asks for: from the next step on, whenever this one is settled."""
        for alarm in alarms:
            self.metrics.say(f"monitor: {alarm}")
        self.switch({(alarm.layer, alarm.head) for alarm in alarms}, self.trainer.step + 1)
        if alarms and self.config.monitor == "stop":
            raise RunWarned(f"stopped by the monitor: {alarms[0]}")

    def switch(self, places: set[tuple[int, int | None]], step: int):
        """monitor=switch: the layers of these (layer, head) move to their remedy before `step`."""
        if self.config.monitor != "switch":
            return
        if moving := self.trainer.plan_switch({layer for layer, _ in places}, step):
            for layer in moving:
                self.metrics.say(f"monitor: layer {layer} moves to {self.config.monitor_remedy} from step {step} on")
            self.keep_switches()

    def keep_switches(self):
        """Writes the switches of this run beside its order, and into run.json, before any step depends on them."""
        switches, path = self.trainer.switched(), companion(Path(self.config.out_dir) / "order.bin")
        if not self.metrics.enabled or not (switches or path.exists() or self.config.monitor == "switch"):
            return
        if self.config.record:
            write_switches(path, switches)
        self.metrics.update_run(switches=plain(switches))

    @contextlib.contextmanager
    def pause(self):
        """Time that tokens_per_s does not count: it is of training alone."""
        self.settle()
        start = time.perf_counter()
        yield
        self.began += time.perf_counter() - start
