"""Checkpoints that a kill, a full disk or a flipped bit cannot turn into a lost run.

A checkpoint is one file `out_dir/ckpt_{step:08d}.pt` in torch.save's zip format, and nothing beside it. It is written
under a temporary name, forced to disk and renamed, so the name exists only for a complete file. The zip format stores
a CRC-32 of every record, which torch writes but does not compare when it loads; `load` does, before it reads anything.
"""

import contextlib
import os
import re
import zipfile
import zlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from files import sync_folder

_NAME = re.compile(r"ckpt_(\d{8,})\.pt")
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.Size, torch.device)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file, the reason and the last good one."""


class NonFiniteState(CheckpointError):
    """Refused: a floating-point tensor of the state holds NaN or infinity."""


class _Sink:
    """A file that remembers its first failure instead of raising inside torch's C++ writer, which may not unwind."""

    def __init__(self, fd: int):
        self.fd, self.error = fd, None

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view) and self.error is None:
            try:
                done += os.write(self.fd, view[done:])
            except OSError as error:
                self.error = error
        return len(view)

    def flush(self) -> None:
        pass


def save(out_dir: str | Path, step: int, state: dict, keep: int) -> Path:
    """Writes {"step": step, **state} atomically and, beyond `keep` checkpoints, removes the two oldest.

    `state` holds nested dicts, lists and tuples of tensors and plain values. Tensors are read, never changed, and all
    has been read on return. One save at a time. Checkpoints of later steps than this one belong to a run that was
    rewound; they are renamed to `*.stale`, so that a later resume does not jump onto that branch.
    Raises NonFiniteState if a floating-point tensor holds NaN or infinity (so a broken model never pushes healthy
    checkpoints out of the ring), and CheckpointError if a value could not be loaded again and on any failure of the
    disk.
    """
    path = _check(Path(out_dir), step, state, keep)
    _publish(path, step, state, keep)
    return path


class Writer:
    """`save` in the background: training waits for a copy into host memory, and a thread does the rest.

    One save at a time: the next one waits for it. What fails in the thread is raised by the next `settle` or `save`,
    with the same message and the same promise about what was saved before. A process that ends waits for the thread,
    unless it is killed, and then the folder is as `save` leaves it.
    """

    def __init__(self):
        self._pool, self._pending = ThreadPoolExecutor(1, "checkpoint"), None
        self._buffers: dict[str, Tensor] = {}  # reused: pinning memory takes longer than copying into it

    def save(self, out_dir: str | Path, step: int, state: dict, keep: int) -> Path:
        """As the function `save`, but on return `state` has only been checked and copied. Errors: NonFiniteState or
        CheckpointError of this state, which is then not written; CheckpointError of the save before."""
        self.settle()
        path = _check(Path(out_dir), step, state, keep)
        copied = self._copy(state, "", {})
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the copies out of the device are under way
        self._pending: Future | None = self._pool.submit(_publish, path, step, copied, keep)
        return path

    def settle(self, block: bool = True) -> None:
        """Raises what failed in the thread, once; block=False: if the thread is done."""
        if self._pending and (block or self._pending.done()):
            pending, self._pending = self._pending, None
            pending.result()

    def wait(self) -> None:
        """Until the thread is done; what failed in it is left to `settle`."""
        wait([self._pending] if self._pending else [])

    def _copy(self, value, name: str, copied: dict):
        """`value` with its tensors in host memory; tensors that share memory (tied weights) go on sharing it."""
        if isinstance(value, Tensor):
            key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
            if key not in copied:
                buffer = self._buffers.get(name)
                if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                    buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
                    self._buffers[name] = buffer
                copied[key] = buffer.copy_(value.detach(), non_blocking=True)
            return copied[key]
        if isinstance(value, dict):
            return type(value)((key, self._copy(item, f"{name}.{key}", copied)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, f"{name}[{i}]", copied) for i, item in enumerate(value))
        return value


def _check(out_dir: Path, step: int, state: dict, keep: int) -> Path:
    """The file's name, once everything that can be wrong before writing has been ruled out."""
    if keep < 1:
        raise ValueError(f"keep_checkpoints={keep}: at least one checkpoint has to stay, so give 1 or more")
    path = out_dir / f"ckpt_{step:08d}.pt"
    tensors = dict(_floating(state, "", path))
    for device in {tensor.device for tensor in tensors.values()}:
        names = [name for name, tensor in tensors.items() if tensor.device == device]
        finite = torch.stack([torch.isfinite(tensors[name]).all() for name in names]).tolist()  # one wait for all
        for name in (name for name, good in zip(names, finite, strict=True) if not good):
            bad, count = int((~torch.isfinite(tensors[name])).sum()), tensors[name].numel()
            raise NonFiniteState(f"{path} was not written: {bad} of the {count} values of {name} are NaN or infinite; "
                                 f"the last good checkpoint is {latest(out_dir) or 'none'}")
    return path


def _publish(path: Path, step: int, state: dict, keep: int) -> None:
    out_dir = path.parent
    temporary = path.with_name(path.name + ".tmp")
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for leftover in out_dir.glob("ckpt_*.pt.tmp"):  # of a run that was killed while it saved
            leftover.unlink()
        _write({"step": step, **state}, temporary)
        os.replace(temporary, path)
        sync_folder(out_dir)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        last = latest(out_dir)
        raise CheckpointError(f"{path} was not written ({error.strerror or error}); "
                              f"{f'the last good checkpoint is {last}' if last else 'there is no earlier one'}"
                              ) from error
    try:
        _prune(out_dir, step, keep)
    except OSError as error:
        raise CheckpointError(f"{path} is safe, but an older checkpoint could not be removed "
                              f"({error.strerror or error}: {error.filename})") from error


def checkpoints(out_dir: str | Path) -> list[Path]:
    """All checkpoints of a folder, oldest step first; an absent folder has none."""
    return sorted((path for path in Path(out_dir).glob("ckpt_*.pt") if _NAME.fullmatch(path.name)), key=step_of)


def latest(out_dir: str | Path) -> Path | None:
    """The checkpoint of the highest step, or None. Not opened: `load_latest` also checks it."""
    return (checkpoints(out_dir) or [None])[-1]


def load(path: str | Path) -> dict:
    """Reads a checkpoint, its tensors on the CPU. Never unpickles anything but tensors and plain values.

    Raises CheckpointError if the file is absent, damaged in any byte that matters, or holds other objects; the message
    names the next older checkpoint that is intact.
    """
    path = Path(path)
    problem = _problem(path)
    if problem is None:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:  # pickle, zip and torch each have their own; every one means: cannot be used
            problem = f"cannot be loaded ({str(error).strip().splitlines()[0] if str(error).strip() else repr(error)})"
    older = [other for other in checkpoints(path.parent)
             if other != path and (not _NAME.fullmatch(path.name) or step_of(other) < step_of(path))]
    good = next((other for other in reversed(older) if _problem(other) is None), None)
    raise CheckpointError(f"{path} {problem}; "
                          f"{f'the next older good one is {good}' if good else 'there is no older good one'}")


def load_latest(out_dir: str | Path) -> dict:
    """Loads the newest checkpoint that is intact, and prints which damaged ones it passed over.

    Raises CheckpointError if the folder has none that can be read.
    """
    paths = checkpoints(out_dir)
    for path in reversed(paths):
        try:
            return load(path)
        except CheckpointError as error:
            print(f"passed over a damaged checkpoint: {error}")
    raise CheckpointError(f"{out_dir} has no {'readable ' if paths else ''}checkpoint (ckpt_*.pt); give the out_dir "
                          "of a run that has, or begin one with init_from=scratch")


def strip_prefixes(state_dict: dict) -> dict:
    """The same entries under the names of the plain model: without torch.compile's `_orig_mod.`, which may stand at any
    depth, and DDP's leading `module.`. Raises ValueError if two names become one."""
    plain = {}
    for name, value in state_dict.items():
        parts = [part for part in name.split(".") if part != "_orig_mod"]
        while len(parts) > 1 and parts[0] == "module":
            parts = parts[1:]
        short = ".".join(parts)
        if short in plain:
            raise ValueError(f"two entries of the state dict are called {short} once prefixes are removed")
        plain[short] = value
    return plain


def step_of(path: Path) -> int:
    """The finished steps of a checkpoint, by its name."""
    return int(_NAME.fullmatch(path.name)[1])


def _write(state: dict, path: Path) -> None:
    """Writes and forces to disk; raises OSError with the system's reason."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        sink = _Sink(fd)
        torch.save(state, sink)
        if sink.error is not None:
            raise sink.error
        os.fsync(fd)
    finally:
        os.close(fd)


def _prune(out_dir: Path, step: int, keep: int) -> None:
    """Removes the oldest checkpoints up to `step` where there are more than `keep`; renames those of later steps."""
    older = [path for path in checkpoints(out_dir) if step_of(path) <= step]
    for later in checkpoints(out_dir)[len(older):]:
        stale = later.with_name(later.name + ".stale")
        os.replace(later, stale)
        print(f"{later} is of a later step than {step}, which this run was rewound to; renamed to {stale.name}")
    # Two at most: a run that is resumed with a smaller `keep`, maybe by oversight, does not lose all others at once;
    # and one that was killed between a save and this has one too many.
    for old in older[:-keep][:2]:
        old.unlink()


def _floating(value, name: str, path: Path):
    """Name and value of every tensor that can hold NaN. Refuses objects that weights_only loading would reject."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield name, value
    elif type(value) in (dict, OrderedDict):  # no subclass: weights_only refuses the others
        for key, item in value.items():
            yield from _floating(key, f"{name} key {key!r}", path)
            yield from _floating(item, f"{name}.{key}" if name else str(key), path)
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _floating(item, f"{name}[{index}]", path)
    elif type(value) not in _PLAIN:
        raise CheckpointError(f"{path} was not written: {name} is a {type(value).__name__}, which a safe load would "
                              "refuse; save tensors, numbers, strings, and dicts, lists or tuples of them")


def _problem(path: Path) -> str | None:
    """What is wrong with the file, or None: compares every record with the CRC-32 that torch.save wrote."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    # Damaged headers surface as whatever field they hit: a bad signature, an unknown compression, a broken name.
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, ValueError, EOFError, LookupError):
        return "is damaged or incomplete (not a readable zip archive)"
    return None if damaged is None else f"is damaged (checksum of its record {damaged})"
