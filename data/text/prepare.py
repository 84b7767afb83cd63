"""Any folder of text files, or the embedded default corpus -> train.bin, val.bin and meta.json.

    python data/text/prepare.py DIR --out NAME --tokenizer gpt2
    python data/text/prepare.py --out embedded           the embedded corpus, in bytes

Every file below DIR is one document, in the order of its path; hidden files, empty ones and binary ones (with a zero
byte) are left out, and bytes that are not UTF-8 become U+FFFD. The same files give the same corpus.
"""

import argparse
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from data import corpus
from data.meta import DataError, Meta, corpus_folder
from data.tokenizer import tokenizer
from data.writer import locked, write_corpus

SPLIT_SEED = 2357  # nanoGPT's, for its OpenWebText split
SNIFF = 8192  # bytes looked at for a zero byte


def prepare(folder: str | Path | None, out: str | Path, tokenizer_name: str = "bytes",
            gpt2_ranks: str | Path | None = None, val_fraction: float = 0.05) -> Meta:
    """Prepare the text files below `folder`, or with None the embedded corpus, into the folder `out`; or DataError."""
    if not 0 < val_fraction < 1:
        raise DataError(f"val_fraction={val_fraction} must lie between 0 and 1")
    out = corpus_folder(out)
    encoder = tokenizer(tokenizer_name, gpt2_ranks)
    with locked(out):
        if folder is None:
            texts = dict(corpus.documents())
            names, sizes, read = list(texts), [len(text) for text in texts.values()], texts.__getitem__
            source = {"kind": "embedded corpus", "python": ".".join(map(str, sys.version_info[:3]))}
        else:
            folder = Path(folder)
            names, sizes, skipped = text_files(folder, out)
            source = {"kind": "text", "folder": folder.resolve().name, "files_left_out": skipped}

            def read(name: str) -> str:
                return (folder / name).read_bytes().decode("utf-8", "replace").removeprefix("\ufeff")

        head_shares = split_documents(sizes, val_fraction)
        splits = {split: _encoded(names, head_shares, read, encoder, split) for split in ("train", "val")}
        return write_corpus(out, encoder.name, encoder.vocab_size, splits,
                            source | {"documents": len(names), "val_fraction": val_fraction})


def text_files(folder: Path, out: Path) -> tuple[list[str], list[int], int]:
    """Names relative to `folder` and sizes in bytes of its text files, and how many files were left out."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder of text files")
    found, skipped = [], 0
    for at, below, names in os.walk(folder):
        below[:] = [n for n in below if not n.startswith(".") and not os.path.samefile(Path(at, n), out)]
        for path in (Path(at, name) for name in names):
            if _is_text(path):
                found.append((path.relative_to(folder).as_posix(), path.stat().st_size))
            else:
                skipped += 1
    if not found:
        raise DataError(f"{folder} has no text file ({skipped} empty, hidden or binary files); give a folder of text")
    names, sizes = zip(*sorted(found), strict=True)
    return list(names), list(sizes), skipped


def _is_text(path: Path) -> bool:
    if path.name.startswith(".") or not path.is_file():
        return False
    try:
        with open(path, "rb") as file:
            start = file.read(SNIFF)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); make it readable or move it away") from None
    return bool(start.strip()) and b"\0" not in start


def split_documents(sizes: list[int], val_fraction: float) -> list[float]:
    """For each document the share of it, from its start, that belongs to training; the rest is for validation.

    Whole documents, taken in a seeded order, go to validation until it has its fraction of the bytes; the one that
    would be too much is cut. So one file, a few large ones and many small ones all split as asked.
    """
    left = val_fraction * sum(sizes)
    shares = [1.0] * len(sizes)
    order = list(range(len(sizes)))
    random.Random(SPLIT_SEED).shuffle(order)
    for index in order:
        if left <= 0:
            break
        taken = min(left, sizes[index])
        shares[index] = 1 - taken / sizes[index]
        left -= taken
    return shares


def cut(text: str, share: float) -> tuple[str, str]:
    """The first `share` of a text and the rest, cut before white space where there is some near."""
    at = int(len(text) * share)
    if 0 < at < len(text) and (space := re.compile(r"\s").search(text, at, at + 200)):
        at = space.start()
    return text[:at], text[at:]


def _encoded(names: list[str], shares: list[float], read: Callable[[str], str], encoder, split: str
             ) -> Iterator[np.ndarray]:
    nothing = 0.0 if split == "train" else 1.0
    for name, share in zip(names, shares, strict=True):
        if share != nothing and (text := cut(read(name), share)[split == "val"]):
            yield np.append(encoder.encode(text), np.uint32(encoder.end_of_text))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python data/text/prepare.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", metavar="DIR", help="folder of text files; left out: the embedded corpus")
    parser.add_argument("--default_corpus", action="store_true", help="the embedded corpus, said aloud")
    parser.add_argument("--out", help="folder to write, or a bare name for data/NAME; default for the embedded corpus: "
                        "data/embedded")
    parser.add_argument("--tokenizer", metavar="NAME",
                        help="gpt2, gpt2-N (its N - 1 tokens of lowest rank and end of text) or bytes; "
                        "default: gpt2 for DIR, bytes for the embedded corpus")
    parser.add_argument("--gpt2_ranks", metavar="FILE", help="merge ranks in tiktoken's format instead of a download")
    parser.add_argument("--val_fraction", type=float, default=0.05, help="share of the text for val.bin (default 0.05)")
    options = parser.parse_args(arguments)
    if options.default_corpus and options.folder:
        parser.error(f"--default_corpus and DIR={options.folder} exclude each other")
    if options.folder is not None and not options.folder.strip():
        parser.error("DIR is empty; leave it out for the embedded corpus, and the working folder is .")
    if options.folder and options.out is None:
        parser.error("DIR needs --out NAME, the folder to write")
    name = options.tokenizer or ("gpt2" if options.folder or options.gpt2_ranks else "bytes")
    out = "embedded" if options.out is None else options.out
    try:
        meta = prepare(options.folder, out, name, options.gpt2_ranks, options.val_fraction)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{corpus_folder(out)}: {meta.tokens['train']:,} training and {meta.tokens['val']:,} validation tokens, "
          f"{meta.source['documents']:,} documents, tokenizer {meta.tokenizer}, vocabulary {meta.vocab_size}, "
          f"{meta.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
