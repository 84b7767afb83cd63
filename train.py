"""Train a GPT with pluggable attention, recording or replaying the order of its batches.

    torchrun --standalone --nproc_per_node=4 train.py configs/gpt2_small_flash_bf16.toml
    python train.py configs/mini_flash_bf16.toml --delta=dp_p --replay=runs/mini/order.bin

One step: row of offsets -> micro-batches -> loss -> gradients -> clip -> update -> metrics. Everything that can be
wrong with a config, a corpus or an order file is found by plan.py, before anything is started or written.
"""

import contextlib
import os
import sys

import torch

import distributed
from checkpoint import CheckpointError
from config import Config, as_dict, load
from data.meta import DataError
from determinism import set_determinism
from keeper import Keeper
from metrics import Metrics, MetricsError
from plan import check_ranks_agree, prepare
from replay.order import OrderError
from runinfo import describe_run, print_header, print_switches
from steplog import NonFiniteError, RunFailed, RunWarned, StepLog
from stop import EXIT_SIGINT, StopRequested, StopSignal
from trainer import Trainer

EXIT_USER, EXIT_NONFINITE, EXIT_FAILED, EXIT_WARNED = 2, 3, 4, 5
USER_ERRORS = (CheckpointError, MetricsError, OrderError, DataError)
EXIT_STATUS = {  # of a run that one of these ended
    USER_ERRORS: EXIT_USER,
    NonFiniteError: EXIT_NONFINITE,
    RunFailed: EXIT_FAILED,
    RunWarned: EXIT_WARNED,
    KeyboardInterrupt: EXIT_SIGINT,  # a second Ctrl-C
}


def exit_status(error: BaseException) -> int:
    """1 where none of them did: another rank is gone, memory did not suffice, or it is a bug."""
    return next((status for kind, status in EXIT_STATUS.items() if isinstance(error, kind)), 1)


def run_steps(trainer: Trainer, metrics: Metrics, log: StepLog, keeper: Keeper) -> None:
    """The loop, from the trainer's step to max_iters. Errors: StopRequested, RunFailed, RunWarned and `train`'s."""
    config = trainer.config
    intervals = config.probe_interval, config.monitor != "off" and config.monitor_interval
    while trainer.step < config.max_iters:
        step = trainer.step
        record = {"step": step} | trainer.switch()
        if "switched" in record:
            log.keep_switches()
        if step % config.checkpoint_interval == 0:
            with log.pause():
                keeper.save()
        if step % config.eval_interval == 0:
            with log.pause():
                record["val_loss"] = trainer.evaluate()
                metrics.say(f"step {step} of {config.max_iters}: validation loss {record['val_loss']:.4f}")
        keeper.record(step)
        trainer.optimizer.set_lr(step)
        loss = trainer.gradients()
        log.settle()  # the step before, while the device works on this one's gradients
        keeper.settle(block=False)
        whole, watched = (bool(every) and step % every == 0 for every in intervals)
        probed = trainer.probe(whole, exact="val_loss" in record) if whole or watched else None
        log.add(record, trainer.update(loss), probed)
    log.settle()
    record = {"step": trainer.step} | trainer.switch()
    record["val_loss"] = trainer.evaluate()
    metrics.log(record)
    keeper.finish()
    metrics.say(f"done: step {trainer.step}, validation loss {record['val_loss']:.4f}, {keeper.out}")


def train(trainer: Trainer, info: dict) -> int:
    """Runs to max_iters or a signal and returns the exit status. Errors: NonFiniteError, CheckpointError, MetricsError,
    OrderError, DataError."""
    config, group = trainer.config, trainer.group
    print_header(info, group)
    print_switches(config, trainer.plan, group)
    metrics = Metrics(config.out_dir, as_dict(config), info, group.is_main)
    log, keeper = StepLog(trainer, metrics), Keeper(trainer, metrics, info["order"])
    code = None
    try:
        keeper.open()
        run_steps(trainer, metrics, log, keeper)
        code = 0
    except StopRequested as stop:
        with contextlib.suppress(RunFailed, RunWarned):
            log.settle()
        keeper.finish()
        group.print(f"stopped by a signal at step {trainer.step}; saved to {keeper.out}; go on with the same "
                    "command and --init_from=resume")
        code = stop.status
    except (RunFailed, RunWarned) as reason:
        keeper.finish()
        group.print(f"{reason}; saved to {keeper.out}")
        code = exit_status(reason)
    finally:
        if code is None:  # of whatever ended the run, also while it was ending: scripts resume by what run.json says
            code = exit_status(sys.exception())
        with contextlib.suppress(RuntimeError, RunFailed, RunWarned):  # what ends the run is told by its own error
            log.settle()
        keeper.close()
        metrics.close(code)
    return code


def out_of_memory(error: BaseException, config: Config) -> str | None:
    """The sentence for an error that says so; torch's CPU allocator has no class of its own. None for another one."""
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
        return None
    sizes = ", ".join(f"{name}={getattr(config, name)}" for name in (
        "batch_size", "block_size", "n_layer", "n_embd", "gradient_accumulation_steps", "eval_iters"))
    said = (str(error) or repr(error)).splitlines()[0]
    return (f"out of memory with {sizes} ({said:.200}); lower batch_size and raise gradient_accumulation_steps by as "
            "much, or set loss_chunk")


def report(what: str, error: object, code: int, any_rank: bool = False) -> int:
    """One sentence on standard error: of rank 0, or of each rank where the others may not have met the error."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or any_rank:
        print(f"train.py{f' on rank {rank}' if rank != '0' else ''}: {what}: {error}", file=sys.stderr, flush=True)
    return code


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, one of EXIT_*, or 1 where another rank or memory is gone; a traceback is a bug."""
    stop, group, config, failed = StopSignal(), None, None, True
    try:
        config = load(sys.argv[1:] if argv is None else argv)
        plan = prepare(config)
        set_determinism(config.seed, config.deterministic)  # before the first CUDA call, which init makes
        group = distributed.init(config.device, config.collective_timeout_s)
        check_ranks_agree(plan, group)
        trainer = Trainer(config, plan, group, stop)
        info = describe_run(config, plan, group, trainer)
    except (ValueError, *USER_ERRORS) as error:
        if group:
            group.close(failed)
        return report("error", error, EXIT_USER)
    except (MemoryError, RuntimeError) as error:
        if not (told := out_of_memory(error, config)):
            raise
        if group:
            group.close(failed)
        return report("error", told, EXIT_USER, any_rank=True)
    try:
        code = train(trainer, info)
        failed = False
        return code
    except USER_ERRORS as error:
        return report("error", error, EXIT_USER, any_rank=True)
    except NonFiniteError as error:
        return report("stopped", error, EXIT_NONFINITE)
    except (MemoryError, RuntimeError) as error:  # gloo has no error class of its own
        if told := out_of_memory(error, config):
            return report("stopped", f"in step {trainer.step}: {told}", 1, any_rank=True)
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        return report("stopped", f"another rank ended or did not answer within {config.collective_timeout_s:g} s, in "
                      f"step {trainer.step} ({error}); its own message tells why. Go on with --init_from=resume", 1,
                      any_rank=True)
    finally:
        group.close(failed)


if __name__ == "__main__":
    sys.exit(main())
