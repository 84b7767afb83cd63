"""The order file's header: what the offsets in it mean, and a checksum that finds any damaged byte of it."""

import dataclasses
import hashlib
import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"ORDER\r\n\x1a"  # as in PNG, the line end and control-Z show a transfer in text mode
VERSION = 1
ALIGN = 512
FIXED = len(MAGIC) + 8
LONGEST_HEADER = 1 << 20


class OrderError(ValueError):
    """An order file that is damaged or does not fit the run: one sentence with the values and the way out."""


@dataclass(frozen=True)
class Header:
    """What the offsets mean. `n_tokens` and `sha256` are of train.bin; `seed` is None for an imported order."""

    dataset: str
    n_tokens: int
    sha256: str
    block_size: int
    sequences_per_step: int
    seed: int | None = None
    version: int = VERSION

    @property
    def starts(self) -> int:
        """Valid offsets are 0 ... starts - 1."""
        return self.n_tokens - self.block_size

    @property
    def row_bytes(self) -> int:
        return 8 * (self.sequences_per_step + 1)

    def encode(self) -> bytes:
        """All bytes before the first row, as replay.order lays them out."""
        text = json.dumps(dataclasses.asdict(self)).encode()
        rest = text.ljust(-(-(FIXED + len(text)) // ALIGN) * ALIGN - FIXED, b"\0")
        length = struct.pack("<I", len(text))
        return MAGIC + length + struct.pack("<I", zlib.crc32(length + rest)) + rest


def read_header(fd: int, path: Path) -> tuple[Header, int]:
    """The header and its size in bytes. OrderError where any of its bytes is damaged."""
    fixed = os.pread(fd, FIXED, 0)
    if fixed[: len(MAGIC)] != MAGIC:
        raise OrderError(f"{path} is not an order file: it begins with {fixed[:8]!r}; text files "
                         "generated_indices_rank_R.txt are read by `python -m replay import DIR`")
    if len(fixed) < FIXED:
        raise OrderError(f"{path} ends inside its header; it holds no step, so delete it and record again")
    length, crc = struct.unpack("<II", fixed[len(MAGIC):])
    size = -(-(FIXED + length) // ALIGN) * ALIGN
    damaged = OrderError(f"the header of {path} is damaged: its checksum does not fit; its offsets cannot be trusted, "
                         "so take a copy or record again")
    if length > LONGEST_HEADER:
        raise damaged
    rest = os.pread(fd, size - FIXED, FIXED)
    if len(rest) < size - FIXED:
        raise OrderError(f"{path} ends inside its header; it holds no step, so delete it and record again")
    if zlib.crc32(fixed[len(MAGIC):len(MAGIC) + 4] + rest) != crc:
        raise damaged
    fields = json.loads(rest[:length])
    if fields.get("version") != VERSION:
        raise OrderError(f"{path} has format version {fields.get('version')}, but this program reads version {VERSION}")
    try:
        header = Header(**fields)
        sane = header.starts > 0 and header.block_size > 0 and header.sequences_per_step > 0
    except TypeError as error:
        raise OrderError(f"the header of {path} has other fields than version {VERSION} has ({error})") from None
    if not sane:
        raise OrderError(f"the header of {path} makes no sense: {header.n_tokens} tokens, "
                         f"block_size={header.block_size}, {header.sequences_per_step} sequences a step")
    return header, size


def differences(ours: Header, theirs: Header, names: tuple[str, ...]) -> str:
    """The fields of `names` that differ, with both values, in words; "" where none does."""
    return ", ".join(f"{name} {getattr(ours, name)!r} against {getattr(theirs, name)!r}" for name in names
                     if getattr(ours, name) != getattr(theirs, name))


def order_hash(header: Header):
    """A hashlib object to feed with rows (int64 little-endian bytes, step by step): ends as `OrderFile.sha256` does."""
    return hashlib.sha256(f"{header.sha256} {header.block_size} {header.sequences_per_step}\n".encode())
