"""Writes a corpus folder so that a killed preparation never leaves one that looks whole."""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from data.meta import DTYPES, UNFINISHED, DataError, Meta


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder and hold it: two preparations of one folder would mix their files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"the folder {folder} cannot be made ({error.strerror}); choose another with --out") from None
    try:
        if not os.access(folder, os.W_OK):
            raise DataError(f"the folder {folder} may not be written to; choose another with --out")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DataError(f"another process is preparing {folder}; wait for it or choose another --out") from None
    finally:
        os.close(fd)


def write_corpus(folder: Path, tokenizer: str, vocab_size: int, splits: dict[str, Iterable[np.ndarray]],
                 source: dict, expected: dict[str, int] | None = None) -> Meta:
    """Write SPLIT.bin for every split, from arrays of token ids, then meta.json; return what meta.json says.

    Ids go to uint16, or to uint32 where the vocabulary needs it. All files are complete under other names and on disk
    before the first is renamed, and UNFINISHED marks the moment in between. `expected` are token counts by split that
    must come out, or nothing is renamed.
    """
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    tokens, digests = {}, {}
    try:
        for split, arrays in splits.items():
            tokens[split], digests[split] = _write_split(_new(folder, split), arrays, dtype, vocab_size)
            if tokens[split] == 0:
                raise DataError(f"the {split} split of {folder} would be empty; give it more text")
        if expected and tokens != expected:
            raise DataError(f"{folder} would have {tokens} tokens, but this data set is known to have {expected}: its "
                            "content or the tokenizer changed; name the wanted --revision to accept its own counts")
        meta = Meta(tokenizer, vocab_size, dtype, tokens, digests, source)
        with open(folder / UNFINISHED, "w", encoding="utf-8") as file:
            file.write(meta.to_json())
            _flush(file)
        for split in splits:
            os.replace(_new(folder, split), folder / f"{split}.bin")
        os.replace(folder / UNFINISHED, folder / "meta.json")
    except OSError as error:
        raise DataError(f"writing {folder} failed ({error.strerror}); free some space and prepare it again") from None
    finally:
        for split in splits:
            _new(folder, split).unlink(missing_ok=True)
    return meta


def _new(folder: Path, split: str) -> Path:
    return folder / f"{split}.new.bin"


def _write_split(path: Path, arrays: Iterable[np.ndarray], dtype: str, vocab_size: int) -> tuple[int, str]:
    digest, count = hashlib.sha256(), 0
    with open(path, "wb", buffering=1 << 20) as file:
        for array in arrays:
            if len(array) and int(array.max()) >= vocab_size:
                raise DataError(f"the tokenizer made id {int(array.max())}, beyond its vocabulary of {vocab_size}")
            raw = np.ascontiguousarray(array, dtype=DTYPES[dtype]).data
            file.write(raw)
            digest.update(raw)
            count += len(array)
        _flush(file)
    return count, digest.hexdigest()


def _flush(file):
    file.flush()
    os.fsync(file.fileno())
