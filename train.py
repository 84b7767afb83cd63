"""Train a GPT with pluggable attention, recording or replaying the order of its batches.

    torchrun --standalone --nproc_per_node=4 train.py configs/gpt2_small_flash_bf16.toml
    python train.py configs/mini_flash_bf16.toml --delta=dp_p --replay=runs/mini/order.bin

One step: row of offsets -> micro-batches -> loss -> gradients -> clip -> update -> metrics. Everything that can be
wrong with a config, a corpus or an order file is found by plan.py, before anything is started or written.
"""

import contextlib
import os
import sys
from pathlib import Path

import torch

import distributed
from checkpoint import CheckpointError, NonFiniteState
from config import as_dict, load
from data.loader import DataError
from determinism import set_determinism
from metrics import Metrics, MetricsError
from plan import check_ranks_agree, prepare
from replay.order import OrderError, Recorder
from runinfo import describe_run, print_header, print_switches
from steplog import NonFiniteError, RunFailed, RunWarned, StepLog
from stop import EXIT_SIGINT, StopRequested, StopSignal
from trainer import Trainer

USER_ERRORS = (CheckpointError, MetricsError, OrderError, DataError)
EXIT_USER, EXIT_NONFINITE, EXIT_FAILED, EXIT_WARNED = 2, 3, 4, 5


def train(trainer: Trainer, info: dict) -> int:
    """Runs to max_iters or a signal and returns the exit status. Errors: NonFiniteError, CheckpointError, MetricsError,
    OrderError, DataError."""
    config, plan, group = trainer.config, trainer.plan, trainer.group
    out = Path(config.out_dir)
    print_header(info, group)
    print_switches(config, plan, group)
    metrics = Metrics(out, as_dict(config), info, group.is_main)
    log = StepLog(trainer, metrics)
    recorder, intervals = None, (config.probe_interval, config.monitor != "off" and config.monitor_interval)
    saved = plan.start if config.init_from == "resume" else None

    def settle(block: bool = True):
        """What failed in the background is tried once more, with the state of now; if that fails too, the run ends."""
        nonlocal saved
        try:
            trainer.writer.settle(block)
        except CheckpointError as error:
            metrics.say(f"{error}; trying once more, at step {trainer.step}")
            saved = None
            save()

    def save():
        """In the background, but waits for the first one and for one that is tried once more."""
        nonlocal saved
        settle()  # before anything of this save: it may share the disk's queue
        if saved == trainer.step or not group.is_main:
            return
        first, saved = saved is None, trainer.step
        if recorder:
            recorder.sync()  # a step's row is on disk before its weights are
            metrics.update_run(order=info["order"] | {"rows": recorder.rows, "sha256": recorder.sha256()})
        try:
            trainer.writer.save(out, trainer.step, trainer.state(), config.keep_checkpoints)
        except NonFiniteState as error:
            if config.on_nonfinite != "ignore":
                raise
            metrics.say(f"{error}")  # asked to go on regardless: the healthy checkpoints stay
        if first:  # a killed run that has a log and no checkpoint could neither be resumed nor started over
            trainer.writer.settle()

    def finish():
        save()
        settle()

    code = None
    try:
        if config.record and group.is_main:
            recorder = Recorder(out / "order.bin", plan.header)
            for step in range(recorder.rows, plan.start):  # a run that starts from another's checkpoint
                recorder.append(step, trainer.row(step))
        while trainer.step < config.max_iters:
            step = trainer.step
            record = {"step": step} | trainer.switch()
            if "switched" in record:
                log.keep_switches()
            if step % config.checkpoint_interval == 0:
                with log.pause():
                    save()
            if step % config.eval_interval == 0:
                with log.pause():
                    record["val_loss"] = trainer.evaluate()
                    metrics.say(f"step {step} of {config.max_iters}: validation loss {record['val_loss']:.4f}")
            if recorder:
                recorder.append(step, trainer.row(step))
            trainer.optimizer.set_lr(step)
            loss = trainer.gradients()
            log.settle()  # the step before, while the device works on this one's gradients
            settle(block=False)
            whole, watched = (bool(every) and step % every == 0 for every in intervals)
            probed = trainer.probe(whole, exact="val_loss" in record) if whole or watched else None
            log.add(record, trainer.update(loss), probed)
        log.settle()
        record = {"step": trainer.step} | trainer.switch()
        record["val_loss"] = trainer.evaluate()
        metrics.log(record)
        finish()
        metrics.say(f"done: step {trainer.step}, validation loss {record['val_loss']:.4f}, {out}")
        code = 0
    except StopRequested as stop:
        with contextlib.suppress(RunFailed, RunWarned):
            log.settle()
        finish()
        group.print(f"stopped by a signal at step {trainer.step}; saved to {out}; go on with the same "
                    "command and --init_from=resume")
        code = stop.status
    except (RunFailed, RunWarned) as reason:
        finish()
        group.print(f"{reason}; saved to {out}")
        code = EXIT_FAILED if isinstance(reason, RunFailed) else EXIT_WARNED
    finally:
        if code is None:  # of whatever ended the run, also while it was ending: scripts resume by what run.json says
            error = sys.exception()
            code = (EXIT_NONFINITE if isinstance(error, NonFiniteError) else
                    EXIT_USER if isinstance(error, USER_ERRORS) else
                    EXIT_SIGINT if isinstance(error, KeyboardInterrupt) else 1)  # a second Ctrl-C
        with contextlib.suppress(RuntimeError, RunFailed, RunWarned):  # what ends the run is told by its own error
            log.settle()
        try:
            trainer.writer.settle()
        except CheckpointError as error:
            metrics.say(f"{error}")  # beside what ended the run
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
    """Exit status: 0, one of EXIT_*, or 1 where another rank is gone; a traceback is a bug."""
    stop, group, failed = StopSignal(), None, True
    try:
        config = load(sys.argv[1:] if argv is None else argv)
        plan = prepare(config)
        set_determinism(config.seed, config.deterministic)  # before the first CUDA call, which init makes
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
    except USER_ERRORS as error:
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
        group.close(failed)


if __name__ == "__main__":
    sys.exit(main())
