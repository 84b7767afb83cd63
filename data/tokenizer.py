"""The tokenizers: GPT-2's byte-pair encoding (tiktoken, imported on use), its first merges alone, and bytes, which
needs nothing. gpt2-N has GPT-2's N - 1 tokens of lowest rank and end of text: for small models, whose time the head's
products over 50,257 tokens would take.

All have `name`, `vocab_size`, `end_of_text` (the id between documents), `encode(text)` -> uint32 (n,), and
`decode(ids)` -> text.
"""

import base64
import binascii
import hashlib
import re
from pathlib import Path

import numpy as np

from data.meta import DataError

GPT2_MERGES = 50256  # byte-pair ranks of GPT-2; end of text is the next id
GPT2_FILES = tuple("https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/" + name
                   for name in ("vocab.bpe", "encoder.json"))  # what tiktoken downloads for "gpt2"
PIECE = 1 << 20  # characters encoded at once: Python's list of ids takes some 10 bytes a character
END_OF_TEXT = "<|endoftext|>"
# GPT-2's split: contractions, letters, digits and other symbols, each with at most one space in front; white space.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class Bytes:
    """UTF-8 bytes 0 ... 255, and 256 as end of text."""

    name, vocab_size, end_of_text = "bytes", 257, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class GPT2:
    """GPT-2's byte-pair encoding. Special tokens in a text are encoded as the characters that they are."""

    def __init__(self, encoding, name: str = "gpt2"):
        self._encoding, self.name = encoding, name
        self.vocab_size, self.end_of_text = encoding.n_vocab, encoding.eot_token

    def encode(self, text: str) -> np.ndarray:
        parts = [np.array(self._encoding.encode_ordinary(piece), dtype=np.uint32) for piece in pieces(text)]
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)

    def decode(self, ids) -> str:
        return self._encoding.decode([i for i in ids if i != self.end_of_text and i < self.vocab_size])


def tokenizer(name: str, gpt2_ranks: str | Path | None = None) -> Bytes | GPT2:
    """The tokenizer "gpt2", "gpt2-N" or "bytes". `gpt2_ranks` is a merge-rank file in tiktoken's format that replaces
    its download. DataError where the name is unknown, the file is malformed or the download fails."""
    if name == "bytes":
        if gpt2_ranks:
            raise DataError(f"--gpt2_ranks={gpt2_ranks} needs --tokenizer gpt2, but the tokenizer is bytes")
        return Bytes()
    if not (form := re.fullmatch(r"gpt2(?:-(\d{1,9}))?", name, re.ASCII)):
        raise DataError(f"the tokenizer {name!r} is unknown; there are gpt2, gpt2-N with N tokens, and bytes")
    try:
        import tiktoken
    except ImportError:
        raise DataError("the gpt2 tokenizer needs tiktoken (pip install tiktoken); bytes needs nothing") from None
    if gpt2_ranks:
        ranks = read_ranks(Path(gpt2_ranks))
        if len(ranks) != GPT2_MERGES:
            print(f"{gpt2_ranks} has {len(ranks)} ranks, not GPT-2's {GPT2_MERGES}: end of text is id {len(ranks)}")
    else:
        try:
            ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
        except Exception as error:  # whatever the network, the proxy or the cache folder raised
            files = " and ".join(f"{url} as {hashlib.sha1(url.encode()).hexdigest()}" for url in GPT2_FILES)
            raise DataError(
                f"GPT-2's tokenizer could not be downloaded ({type(error).__name__}); on a machine with network save "
                f"{files} in a folder and set TIKTOKEN_CACHE_DIR to it; or pass a merge-rank file in tiktoken's format "
                "with --gpt2_ranks FILE, or take --tokenizer bytes") from error
    kept = int(form[1]) - 1 if form[1] else len(ranks)
    if not 256 <= kept <= len(ranks):
        raise DataError(f"the tokenizer {name} is outside gpt2-257 (bytes and end of text) to gpt2-{len(ranks) + 1} "
                        "(all merges)")
    # A token is made of two of lower rank, so the first ranks are an encoding of their own.
    ranks = {token: rank for token, rank in ranks.items() if rank < kept}
    return GPT2(tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: kept}),
                name)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Merge ranks from lines of base64 token and rank. The ranks must be 0 ... n - 1 and cover the 256 single bytes."""
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"the merge-rank file {path} cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(f"{path}, line {number}: {line[:40]!r} is not a base64 token and a rank, as tiktoken's "
                            "files have") from None
    missing = sum(bytes([b]) not in ranks for b in range(256))
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f"{path} is no complete merge-rank file: its {len(ranks)} tokens lack {missing} of the 256 "
                        "single bytes, or their ranks are not 0, 1, 2, ... each once; take a whole one")
    return ranks


def pieces(text: str, size: int = PIECE):
    """Cut a text into pieces of about `size` characters that encode to the same ids as the whole.

    A single space between two other characters starts a token of its own in GPT-2's split, so the cut goes before one.
    """
    start = 0
    while len(text) - start > size:
        cut = re.compile(r"(?<=\S) (?=\S)").search(text, start + size)
        if cut is None:
            break
        yield text[start:cut.start()]
        start = cut.start()
    if start < len(text):
        yield text[start:]
