"""Token files to batches, and the offsets that a run draws.

A corpus is a folder with train.bin, val.bin and meta.json (data.meta describes it). A folder without meta.json is
read as nanoGPT writes it: uint16, GPT-2 ids. Imports neither tiktoken nor datasets.
"""

import functools
import hashlib
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from data.meta import DTYPES, GPT2_VOCAB, DataError, Meta, prepare_command, read_meta

HASH_CHUNK = 1 << 22  # bytes read at a time
RACY_NS = 2_000_000_000  # a file written this recently can change again without a new time stamp


class Tokens:
    """One split of a corpus; `open_tokens` opens it.

    Attributes: n_tokens, dtype ("uint16" or "uint32"), vocab_size, tokenizer, path, name (the folder's), and sha256.
    Reads go through pread: no memory map, so resident memory stays flat however many batches are read, and no file
    position, so threads and forked workers may share it.
    """

    def __init__(self, path: Path, meta: Meta, split: str):
        self.path, self.name = Path(path), Path(path).absolute().parent.name
        self.tokenizer, self.vocab_size, self.dtype = meta.tokenizer, meta.vocab_size, meta.dtype
        self._recorded = meta.sha256.get(split)
        self._item = DTYPES[meta.dtype]
        self._file = open(path, "rb", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        if size % self._item.itemsize:
            raise DataError(f"{path} has {size} bytes, which is no multiple of the {self._item.itemsize} bytes of a "
                            f"{meta.dtype} token: the file is cut short or of another dtype; prepare it again")
        self.n_tokens = size // self._item.itemsize
        if split in meta.tokens and meta.tokens[split] != self.n_tokens:
            raise DataError(f"{path} has {self.n_tokens} tokens, but meta.json beside it says {meta.tokens[split]}: "
                            "the file is cut short or replaced; prepare it again")

    @functools.cached_property
    def sha256(self) -> str:
        """Hex digest of the file as meta.json records it; without meta.json, of the file (hashed on first use)."""
        return self._recorded or self.verify()

    def verify(self) -> str:
        """Hash the file itself and return the digest; DataError where meta.json records another one.

        Hashing OpenWebText's 18 GB takes a while, so a digest is remembered in .NAME.sha256 beside the file, if that
        folder is writable, and used again while size, modification time and change time stay what they were.
        """
        cache = self.path.with_name(f".{self.path.name}.sha256")
        before = self._stamp()
        try:
            known = json.loads(cache.read_text())
            digest = known["sha256"] if [known["size"], known["mtime_ns"], known["ctime_ns"]] == before else None
        except (OSError, ValueError, KeyError, TypeError):
            digest = None
        if digest is None:
            started = time.time_ns()
            digest = self._hash()
            if self._stamp() == before and max(before[1:]) < started - RACY_NS:
                _remember(cache, dict(zip(("size", "mtime_ns", "ctime_ns"), before, strict=True), sha256=digest))
        if self._recorded and digest != self._recorded:
            raise DataError(f"{self.path} has SHA-256 {digest}, but meta.json beside it says {self._recorded}: the "
                            "tokens changed after they were prepared; prepare the corpus again")
        return digest

    def batch(self, offsets: np.ndarray, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and next-token targets, int64 CPU tensors (n, block_size), of sequences starting at `offsets` (n,).

        A start outside 0 ... n_tokens - block_size - 1, or an id that the vocabulary lacks, is a DataError.
        """
        offsets = np.asarray(offsets, dtype=np.int64)
        starts = valid_starts(self.n_tokens, block_size)
        buffer = np.empty((len(offsets), block_size + 1), dtype=self._item)
        fd, size = self._file.fileno(), self._item.itemsize
        for row, offset in zip(buffer, offsets.tolist(), strict=True):
            if not 0 <= offset < starts:
                raise DataError(f"a sequence of {block_size} + 1 tokens cannot start at token {offset} of {self.path}: "
                                f"its {self.n_tokens} tokens have starts 0 to {starts - 1}")
            if os.preadv(fd, [row], offset * size) != row.nbytes:
                raise DataError(f"{self.path} became shorter than the {self.n_tokens} tokens it had when it was opened")
        if len(offsets) and (largest := int(buffer.max())) >= self.vocab_size:
            raise DataError(f"{self.path} holds token id {largest}, but its vocabulary of {self.vocab_size} ends at "
                            f"{self.vocab_size - 1}: the data is of another dtype or tokenizer; prepare it again")
        return torch.from_numpy(buffer[:, :-1].astype(np.int64)), torch.from_numpy(buffer[:, 1:].astype(np.int64))

    def _stamp(self) -> list[int]:
        stat = os.fstat(self._file.fileno())
        return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]

    def _hash(self) -> str:
        digest, position = hashlib.sha256(), 0
        while chunk := os.pread(self._file.fileno(), HASH_CHUNK, position):
            digest.update(chunk)
            position += len(chunk)
        return digest.hexdigest()


def _remember(cache: Path, known: dict):
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}")  # ranks of one host may all verify at once
    try:
        temporary.write_text(json.dumps(known))
        os.replace(temporary, cache)
    except OSError:
        pass  # a read-only corpus is hashed each time


def open_tokens(folder: Path, split: str) -> Tokens:
    """Open one split ("train" or "val") of the corpus in `folder`; DataError where it is missing or inconsistent."""
    folder = Path(folder)
    path = folder / f"{split}.bin"
    if not path.is_file():
        what = f"has no {path.name}" if folder.is_dir() else "does not exist"
        raise DataError(f"the data folder {folder} {what}; make it with: {prepare_command(folder)}")
    meta = read_meta(folder)
    if meta is None:
        # nanoGPT's meta.pkl is a pickle and stays unread: its tokenizer is then unknown, its ids still train.
        tokenizer = "unknown" if (folder / "meta.pkl").exists() else "gpt2"
        print(f"{folder} has no meta.json: reading {path.name} as uint16 with GPT-2's vocabulary of {GPT2_VOCAB}")
        meta = Meta(tokenizer, GPT2_VOCAB, "uint16", {}, {})
    elif split not in meta.tokens:
        raise DataError(f"{folder / 'meta.json'} does not mention the split {split!r}, though {path.name} is there; "
                        f"make both with: {prepare_command(folder)}")
    return Tokens(path, meta, split)


def valid_starts(n_tokens: int, block_size: int) -> int:
    """Number of valid starts: a sequence reads block_size + 1 tokens, so block_size + 1 tokens have one start, 0."""
    if n_tokens <= block_size:
        raise DataError(f"the data has {n_tokens} tokens, but a sequence of block_size={block_size} reads "
                        f"{block_size + 1} of them; lower block_size or prepare more text")
    return n_tokens - block_size


@functools.cache
def _stream_key(stream: str) -> int:
    return int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")


def draw_offsets(n_tokens: int, block_size: int, count: int, seed: int, stream: str, step: int) -> np.ndarray:
    """Starts of the `count` sequences of a step: int64 (count,), uniform over 0 ... n_tokens - block_size - 1.

    A pure function of its arguments (Philox, keyed by seed and stream, with the step as the counter's third word):
    resuming needs no generator state, evaluation has a stream of its own, and every rank can draw the whole step
    and take its share. Raw 64-bit words modulo the number of starts rather than numpy's `integers`: NumPy promises
    the words, not the distribution, across its versions. The bias is below n_tokens / 2^64.
    """
    if not (0 <= seed < 1 << 64 and 0 <= step < 1 << 64):
        raise DataError(f"seed={seed} and step={step} must both be in 0 ... 2^64 - 1")
    starts = valid_starts(n_tokens, block_size)
    key = np.array([seed, _stream_key(stream)], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=np.array([0, 0, step, 0], dtype=np.uint64)).random_raw(count)
    return (words % np.uint64(starts)).astype(np.int64)
