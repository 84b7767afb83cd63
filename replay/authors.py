"""Reads the batch order that the paper's released code writes: one text file a rank, generated_indices_rank_R.txt.

There a line holds a rank's offsets of one optimizer step, comma-separated, micro-step after micro-step. Files with a
line a micro-step are read as well. The files say nothing of the data, the block size or the batch size they belong to;
whoever imports them does, and all offsets are checked against that.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from replay.order import Header, OrderError, Recorder

NAME = re.compile(r"generated_indices_rank_(\d+)\.txt")
LINES = ("step", "micro_step")


def import_order(folder: Path, out: Path, header: Header, batch_size: int | None = None, line: str = "step") -> int:
    """Write the order of the text files in `folder` to the new order file `out`; return its number of steps.

    A global row lists the sequences of all ranks in the order micro-step, then rank. `batch_size` is the number of
    sequences of a rank in a micro-step; lines of a micro-step tell it themselves, and one rank does not need it.
    Steps that not every rank has whole are dropped with a message, as is a last line without its line end, since a
    killed run may have cut its last number. OrderError, with file and line, where anything else is wrong.
    """
    folder, out = Path(folder), Path(out)
    if line not in LINES:
        raise OrderError(f"a line can hold a {' or a '.join(LINES)}, not {line!r}")
    if header.starts <= 0:
        raise OrderError(f"block_size={header.block_size} is too large for data of {header.n_tokens} tokens")
    files = rank_files(folder)
    per_rank, rest = divmod(header.sequences_per_step, len(files))
    if rest or per_rank < 1:
        raise OrderError(f"{header.sequences_per_step} sequences a step do not divide over the {len(files)} ranks in "
                         f"{folder}; --sequences is the number over all ranks")
    if batch_size is None:
        batch_size = _guess_batch_size(files, per_rank, line)
    micro_steps, rest = divmod(per_rank, batch_size) if batch_size > 0 else (0, 1)
    if rest:
        raise OrderError(f"{per_rank} sequences a step and rank are no multiple of batch_size={batch_size}; "
                         "--batch_size is the number of a rank in one micro-step")
    lines, length = (1, per_rank) if line == "step" else (micro_steps, batch_size)
    if out.exists():
        raise OrderError(f"{out} exists already; delete it or choose another --out")
    unfinished = out.with_name(out.name + ".part")
    unfinished.unlink(missing_ok=True)
    try:
        with Recorder(unfinished, header) as recorder:
            ranks = [_steps(file, lines, length, header) for file in files]
            while True:
                shares = [next(steps, None) for steps in ranks]
                missing = [file.name for file, share in zip(files, shares, strict=True) if share is None]
                if missing:
                    break
                # (rank, micro-step, sequence) to (micro-step, rank, sequence)
                rows = np.stack(shares).reshape(len(files), micro_steps, batch_size).swapaxes(0, 1)
                recorder.append(recorder.rows, rows.reshape(-1))
            if not recorder.rows:
                raise OrderError(f"{', '.join(missing)} in {folder} has no whole step: {lines} "
                                 f"line{'s' * (lines > 1)} of {length} offsets")
            if len(missing) < len(files):
                print(f"{', '.join(missing)} ends after {recorder.rows} steps; what other ranks have beyond is dropped")
            recorder.sync()
            steps = recorder.rows
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    return steps


def rank_files(folder: Path) -> list[Path]:
    """The folder's text files by rank; OrderError unless they are the ranks 0, 1, ... without a gap."""
    if not folder.is_dir():
        raise OrderError(f"{folder} is not a folder with files generated_indices_rank_R.txt")
    found = {int(match[1]): path for path in folder.iterdir() if (match := NAME.fullmatch(path.name))}
    if not found:
        raise OrderError(f"{folder} has no file generated_indices_rank_R.txt")
    missing = sorted(set(range(max(found) + 1)) - set(found))
    if missing:
        raise OrderError(f"{folder} has no generated_indices_rank_{missing[0]}.txt, though it has rank {max(found)}; "
                         "bring the files of all ranks")
    return [found[rank] for rank in range(len(found))]


def _guess_batch_size(files: list[Path], per_rank: int, line: str) -> int:
    if line == "micro_step":
        with open(files[0], encoding="utf-8", errors="replace") as file:
            return file.readline().count(",") + 1
    if len(files) == 1:
        return per_rank
    raise OrderError(f"{len(files)} ranks with a line a step need --batch_size, the sequences of a rank in one "
                     "micro-step, to put the micro-steps in order")


def _steps(path: Path, lines: int, length: int, header: Header) -> Iterator[np.ndarray]:
    """One rank's offsets of each whole step, int64 (lines * length,)."""
    pending: list[int] = []
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                print(f"{path}, line {number}: dropped, since it has no line end and may be cut short")
                break
            pending += _offsets(text, length, header, f"{path}, line {number}")
            if len(pending) == lines * length:
                yield np.array(pending, dtype=np.int64)
                pending = []
    if pending:
        print(f"{path}: dropped the last {len(pending) // length} of {lines} lines, which make no whole step")


def _offsets(text: str, length: int, header: Header, where: str) -> list[int]:
    fields = text.strip().split(",")
    if not text.strip():
        raise OrderError(f"{where}: the line is empty, but {length} offsets are expected")
    if len(fields) != length:
        raise OrderError(f"{where}: {len(fields)} offsets, but {length} are expected; see --sequences, --batch_size "
                         "and --line")
    offsets = []
    for field in fields:
        try:
            offsets.append(int(field))
        except ValueError:
            raise OrderError(f"{where}: {field[:40]!r} is not a token offset") from None
    low, high = min(offsets), max(offsets)
    if low < 0 or high >= header.starts:
        raise OrderError(f"{where}: offset {low if low < 0 else high} is outside 0 to {header.starts - 1}, the "
                         f"starts that {header.n_tokens} tokens have with block_size={header.block_size}; "
                         "is this the right data?")
    return offsets
