"""What a run leaves on disk beside its log: the order of its batches, and its checkpoints."""

from pathlib import Path

from checkpoint import CheckpointError, NonFiniteState
from metrics import Metrics
from replay.order import Recorder
from trainer import Trainer


class Keeper:
    """Appends each step's row to order.bin and saves the trainer's state in the background. Only rank 0 writes."""

    def __init__(self, trainer: Trainer, metrics: Metrics, order: dict):
        """order: what run.json says of it, to which each save adds the rows so far and their hash."""
        self.trainer, self.metrics, self.order, self.config = trainer, metrics, order, trainer.config
        self.out, self.recorder = Path(self.config.out_dir), None
        self.saved = trainer.plan.start if self.config.init_from == "resume" else None  # the step of the last save

    def open(self):
        """The order file, with all rows before this run's first."""
        if self.config.record and self.trainer.group.is_main:
            self.recorder = Recorder(self.out / "order.bin", self.trainer.plan.header)
            for step in range(self.recorder.rows, self.trainer.plan.start):  # it starts from another's checkpoint
                self.record(step)

    def record(self, step: int):
        """The row that a step is about to read."""
        if self.recorder:
            self.recorder.append(step, self.trainer.row(step))

    def save(self):
        """In the background, but waits for the first one and for one that is tried once more."""
        self.settle()  # before anything of this save: it may share the disk's queue
        if self.saved == self.trainer.step or not self.trainer.group.is_main:
            return
        first, self.saved = self.saved is None, self.trainer.step
        if self.recorder:
            self.recorder.sync()  # a step's row is on disk before its weights are
            rows, sha256 = self.recorder.rows, self.recorder.sha256()
            self.metrics.update_run(order=self.order | {"rows": rows, "sha256": sha256})
        try:
            self.trainer.writer.save(self.out, self.trainer.step, self.trainer.state(), self.config.keep_checkpoints)
        except NonFiniteState as error:
            if self.config.on_nonfinite != "ignore":
                raise
            self.metrics.say(f"{error}")  # asked to go on regardless: the healthy checkpoints stay
        if first:  # a killed run that has a log and no checkpoint could neither be resumed nor started over
            self.trainer.writer.settle()

    def settle(self, block: bool = True):
        """What failed in the background is tried once more, with the state of now; if that fails too, the run ends.
        block=False: does not wait for what is still on its way."""
        try:
            self.trainer.writer.settle(block)
        except CheckpointError as error:
            self.metrics.say(f"{error}; trying once more, at step {self.trainer.step}")
            self.saved = None
            self.save()

    def finish(self):
        """Saves the state that the run ends with, and waits until it is on disk."""
        self.save()
        self.settle()

    def close(self):
        """However the run ended, and so without another try."""
        try:
            self.trainer.writer.settle()
        except CheckpointError as error:
            self.metrics.say(f"{error}")  # beside what ended the run
        if self.recorder:
            self.recorder.close()
