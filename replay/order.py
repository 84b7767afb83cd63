"""The order file: which sequences every optimizer step read, so that another run can read the same.

    8 bytes   magic
    4 bytes   length of the JSON, little-endian
    4 bytes   CRC-32 of the length and of everything after this field, up to the first row
    JSON      the fields of Header, zero-padded so that the first row starts at a multiple of 512
    rows      one a step: sequences_per_step int64 token offsets, then one int64 CRC-32 of step and offsets

Rows are global: row k lists all sequences of step k in the order micro-step, then rank; so every world size and
accumulation with the same product reads the same set. The file is only ever appended to, and a row is one write: a
killed process leaves at most one torn row, which opening drops. The checksum also finds the rows of zeros that a
power cut can leave. All numbers are little-endian.
"""

import dataclasses
import fcntl
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from files import sync_folder
from replay.header import Header, OrderError, differences, order_hash, read_header

__all__ = ["Header", "OrderError", "OrderFile", "Recorder", "check_continues", "order_hash"]


class _Rows:
    """What reading and recording share: rows by step, checked. `header`, `rows` (whole steps in the file), `path`."""

    def __init__(self, path: Path, fd: int):
        self.path, self._fd = Path(path), fd
        self.header, self._first = read_header(fd, self.path)
        size = os.fstat(fd).st_size - self._first
        self._hashed = 0, order_hash(self.header)
        self.rows, torn = divmod(size, self.header.row_bytes)
        dropped = int(torn > 0)
        while self.rows and not self._whole(self.rows - 1, self._read(self.rows - 1)):
            self.rows, dropped = self.rows - 1, dropped + 1
        if dropped:
            print(f"{self.path}: dropped {dropped} torn row{'s' * (dropped > 1)} at the end; {self.rows} rows stay")

    def row(self, step: int) -> np.ndarray:
        """Offsets of the step's sequences, int64 (sequences_per_step,). OrderError past the end or where damaged."""
        if not 0 <= step < self.rows:
            raise OrderError(f"step {step} is past the end of {self.path}, which has {self.rows} steps, from 0; "
                             "lower max_iters or record a longer order")
        raw = self._read(step)
        if not self._whole(step, raw):
            raise OrderError(f"row {step} of {self.path} is damaged: its checksum does not fit; take a copy or "
                             "record again")
        offsets = np.frombuffer(raw, dtype="<i8", count=self.header.sequences_per_step).astype(np.int64, copy=False)
        self._in_range(step, offsets)
        return offsets

    def sha256(self, rows: int | None = None) -> str:
        """Hex digest of the order: of the data's SHA-256, block size, sequences a step and the first `rows` rows.

        Two runs with one digest read the same sequences in the same order, whatever file, name or seed. Rows that were
        hashed before are not read again, so that a run may ask after each of its checkpoints.
        """
        rows = self.rows if rows is None else rows
        done, digest = self._hashed if self._hashed[0] <= rows else (0, order_hash(self.header))
        digest = digest.copy()
        for step in range(done, rows):
            digest.update(self.row(step).astype("<i8", copy=False).tobytes())
        self._hashed = rows, digest
        return digest.hexdigest()

    def close(self):
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __del__(self):
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def _read(self, step: int) -> bytes:
        return os.pread(self._fd, self.header.row_bytes, self._first + step * self.header.row_bytes)

    def _whole(self, step: int, raw: bytes) -> bool:
        return len(raw) == self.header.row_bytes and raw[-8:] == _checksum(step, raw[:-8])

    def _in_range(self, step: int, offsets: np.ndarray):
        low, high = int(offsets.min()), int(offsets.max())
        if low < 0 or high >= self.header.starts:
            raise OrderError(f"row {step} of {self.path} holds offset {low if low < 0 else high}, but "
                             f"{self.header.n_tokens} tokens and block_size={self.header.block_size} allow 0 to "
                             f"{self.header.starts - 1}")


class OrderFile(_Rows):
    """An order file to read; may be open while a run still records it."""

    def __init__(self, path: Path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise OrderError(f"the order file {path} cannot be read: {error.strerror}") from None
        try:
            super().__init__(path, fd)
        except OSError as error:  # a folder, say
            self.close()
            raise OrderError(f"the order file {path} cannot be read: {error.strerror}") from None

    def check(self, header: Header):
        """OrderError naming both values unless the order fits the run: same data, block size and sequences a step. Name
        and seed may differ: another seed on a recorded order is an experiment."""
        for name, way_out in (("n_tokens", "replay on the data that it was recorded on"),
                              ("sha256", "replay on the data that it was recorded on"),
                              ("block_size", "set block_size to the recorded value"),
                              ("sequences_per_step", "make gradient_accumulation_steps * batch_size that number")):
            recorded, ours = getattr(self.header, name), getattr(header, name)
            if recorded != ours:
                raise OrderError(f"the order file {self.path} was recorded with {name}={recorded} on "
                                 f"{self.header.dataset!r}, but this run has {name}={ours} on {header.dataset!r}; "
                                 f"{way_out}")


class Recorder(_Rows):
    """Opens an order file to append to, or creates it. Holds an exclusive lock, so two runs cannot write one file.
    Errors: OrderError."""

    def __init__(self, path: Path, header: Header):
        try:
            self._open(Path(path), header)
        except OSError as error:
            raise OrderError(f"{path} cannot be recorded to ({error.strerror}); free space, or give another out_dir"
                             ) from None

    def _open(self, path: Path, header: Header):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OrderError(f"another process is recording to {path}; give this run another out_dir") from None
            if _has_no_header(fd, header):
                _write(fd, header.encode(), 0, path, "the header")
                _sync(fd, path)
                sync_folder(path.parent)  # or a power cut may keep a checkpoint and lose the file itself
            _Rows.__init__(self, path, fd)
            _check_same_run(path, self.header, header)
            os.ftruncate(fd, self._first + self.rows * self.header.row_bytes)
        except BaseException:
            self.close()  # releases the lock
            raise

    def append(self, step: int, offsets: np.ndarray):
        """Record the step's offsets, int64 (sequences_per_step,). A step that is already there must have the same
        offsets (a resumed run repeats steps); a step beyond the next one would leave a gap. Both are OrderErrors."""
        offsets = np.ascontiguousarray(offsets, dtype="<i8")
        if offsets.shape != (self.header.sequences_per_step,):
            raise OrderError(f"step {step} has offsets of shape {offsets.shape}, but {self.path} records "
                             f"{self.header.sequences_per_step} sequences a step")
        if step < self.rows:
            recorded = self.row(step)
            if not np.array_equal(recorded, offsets):
                at = int(np.flatnonzero(recorded != offsets)[0])
                raise OrderError(f"step {step} reads offset {offsets[at]} at place {at}, but {self.path} records "
                                 f"{recorded[at]}: this run does not continue that one; give it another out_dir")
            return
        if step > self.rows:
            raise OrderError(f"step {step} cannot be recorded: {self.path} has {self.rows} steps, so the next is "
                             f"{self.rows}; resume from an earlier checkpoint or record to another out_dir")
        self._in_range(step, offsets)
        raw = offsets.tobytes()
        position = self._first + step * self.header.row_bytes
        _write(self._fd, raw + _checksum(step, raw), position, self.path, f"row {step}")
        self.rows += 1

    def sync(self):
        """Return when all rows are on disk; call it before the weights that they led to are saved."""
        _sync(self._fd, self.path)


def check_continues(path: Path, header: Header):
    """OrderError unless a run with this header may go on recording to `path`; changes nothing."""
    if path.is_file():
        with open(path, "rb") as file:
            if _has_no_header(file.fileno(), header):
                return
    with OrderFile(path) as order:
        _check_same_run(path, order.header, header)


def _has_no_header(fd: int, header: Header) -> bool:
    """Whether the file is new, or of a run like this one that was killed while it wrote the header."""
    wanted = header.encode()
    start = os.pread(fd, len(wanted), 0)
    return len(start) < len(wanted) and wanted.startswith(start)


def _check_same_run(path: Path, recorded: Header, ours: Header):
    names = tuple(f.name for f in dataclasses.fields(Header) if f.name != "dataset")
    if found := differences(recorded, ours, names):
        raise OrderError(f"{path} holds the order of another run ({found}); resume that run with its own values, or "
                         "give this one another out_dir")


def _checksum(step: int, raw: bytes) -> bytes:
    return struct.pack("<q", zlib.crc32(raw, zlib.crc32(struct.pack("<q", step))))


def _write(fd: int, raw: bytes, position: int, path: Path, what: str):
    try:
        written = os.pwrite(fd, raw, position)
        if written < len(raw):  # a disk that fills up takes a part; the next call says why
            os.pwrite(fd, raw[written:], position + written)
    except OSError as error:
        raise OrderError(f"{what} of {path} could not be written ({error.strerror}); free space and resume") from None


def _sync(fd: int, path: Path):
    try:
        os.fsync(fd)
    except OSError as error:
        raise OrderError(f"{path} did not reach the disk ({error.strerror}); free some space and resume") from None
