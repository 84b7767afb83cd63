"""OpenWebText -> train.bin, val.bin and meta.json, as nanoGPT makes them.

    python data/openwebtext/prepare.py --workers 8
    python data/openwebtext/prepare.py --documents 20000 --out data/openwebtext_small

Documents are split and shuffled with nanoGPT's seed, encoded with GPT-2's byte-pair encoding and followed by the
end-of-text id each, so that token offsets mean what they mean in nanoGPT's files. The work is cut into shards; a shard
that is finished stays through a kill, and the same command goes on from there. The full set takes 54 GB of the
datasets cache (HF_HOME moves it), and twice 18 GB for tokens. --documents N streams only what it needs.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from data.meta import DTYPES, DataError, Meta, corpus_folder
from data.tokenizer import tokenizer
from data.writer import locked, write_corpus

DATASET = "Skylion007/openwebtext"
DOCUMENTS = 8_013_769
EXPECTED = {"train": 9_035_582_198, "val": 4_434_897}  # nanoGPT's counts, for all documents
SPLIT_SEED, TEST_SIZE = 2357, 0.0005  # nanoGPT's
SHARD = 8192  # documents a shard: some 9 M tokens, 40 MB of text
BATCH = 256  # documents read at once
LONE_TAIL = 0.1  # share of a single document that becomes the validation split


def prepare(out: str | Path, dataset: str = DATASET, revision: str | None = None, documents: int | None = None,
            gpt2_ranks: str | Path | None = None, workers: int = 1) -> Meta:
    """Prepare `dataset` (a hub id, a folder of parquet files or one of save_to_disk) into the folder `out`.

    `documents` takes the first N only. DataError where anything is missing or the full set has unexpected counts.
    """
    if workers < 1 or (documents is not None and documents < 1):
        raise DataError(f"--documents={documents} and --workers={workers} must be positive")
    out = corpus_folder(out)
    encoder = tokenizer("gpt2", gpt2_ranks)
    with locked(out):
        work = out / "shards"
        rows = load(dataset, revision, documents, out)
        splits = split_documents(len(rows))
        expected = None
        if (dataset, revision, documents) == (DATASET, None, None):
            expected = EXPECTED
            if len(rows) != DOCUMENTS:
                raise DataError(f"{dataset} has {len(rows)} documents now, not the known {DOCUMENTS}; name a "
                                "--revision to accept its own number")
        source = {"kind": "hugging face", "id": dataset, "revision": revision, "documents": len(rows)}
        _claim(work, source | {"rows": rows._fingerprint, "ranks": _fingerprint(encoder),
                               "shard": SHARD})
        _encode_shards(work, rows, splits, encoder, workers)
        arrays = {split: _joined(work, split, len(indices)) for split, indices in splits.items()}
        if len(rows) == 1:  # nothing to split by document: its end is the validation split
            whole = np.concatenate(list(arrays["train"]))
            at = len(whole) - max(1, int(len(whole) * LONE_TAIL))
            arrays = {"train": [whole[:at]], "val": [whole[at:]]}
        meta = write_corpus(out, encoder.name, encoder.vocab_size, arrays, source, expected)
        shutil.rmtree(work)
        shutil.rmtree(out / "documents", ignore_errors=True)
        return meta


def split_documents(count: int) -> dict[str, np.ndarray]:
    """Indices of the documents of each split, in the order they are written: those of datasets' train_test_split with
    nanoGPT's seed and size. At least one document is for validation, except that a single one is all "train"."""
    order = np.random.default_rng(SPLIT_SEED).permutation(count)
    held_out = math.ceil(TEST_SIZE * count) if count > 1 else 0
    return {"train": order[held_out:], "val": order[:held_out]}


def load(dataset: str, revision: str | None, documents: int | None, out: Path):
    """The data set as a datasets.Dataset with the column "text", its first `documents` only if that is given."""
    import datasets

    local = Path(dataset)
    try:
        if (local / "state.json").is_file():
            rows = datasets.load_from_disk(dataset)
        elif documents is not None and not local.is_dir():
            rows = _first_documents(dataset, revision, documents, out / "documents")
        else:
            rows = datasets.load_dataset(dataset, revision=revision, split="train")
    except Exception as error:  # of the hub, the network, the disk or a file format, each with a class of its own
        raise DataError(
            f"the data set {dataset} (revision {revision or 'latest'}) could not be loaded ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}); without network, point HF_HOME at a cache that has it "
            "(with HF_HUB_OFFLINE=1), or --id at a folder of its parquet files") from error
    if isinstance(rows, datasets.DatasetDict):
        rows = rows["train"]
    if "text" not in rows.column_names:
        raise DataError(f"the data set {dataset} has the columns {', '.join(rows.column_names)}, but none named text")
    rows = rows.select_columns("text")
    if documents is not None:
        rows = rows.select(range(min(documents, len(rows))))
    if not len(rows):
        raise DataError(f"the data set {dataset} has no document")
    return rows


def _first_documents(dataset: str, revision: str | None, documents: int, folder: Path):
    """The first documents, streamed to a folder of their own, so that a subset needs no download of the whole."""
    import datasets
    from tqdm import tqdm

    stream = datasets.load_dataset(dataset, revision=revision, split="train", streaming=True).take(documents)
    target = folder / hashlib.sha256(f"{dataset} {revision} {documents}".encode()).hexdigest()[:16]
    if not target.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        rows = datasets.Dataset.from_generator(
            lambda: ({"text": row["text"]} for row in tqdm(stream, total=documents, unit=" documents")),
            cache_dir=str(folder / "cache"))
        rows.save_to_disk(folder / "new")
        os.replace(folder / "new", target)
        shutil.rmtree(folder / "cache")
    return datasets.load_from_disk(target)


def _fingerprint(encoder) -> str:
    """Tells encodings apart: how a fixed text of every kind of character comes out."""
    probe = " ".join(map(chr, range(33, 1500))) + " the tokenizer's fingerprint, 2357"
    return hashlib.sha256(encoder.encode(probe).tobytes() + str(encoder.vocab_size).encode()).hexdigest()


def _claim(work: Path, task: dict):
    """Keep the finished shards of the same task; those of another one are of no use and go."""
    note = work / "task.json"
    if note.is_file() and note.read_text() == json.dumps(task):
        return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    note.write_text(json.dumps(task))


def _shards(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + SHARD, count)) for start in range(0, count, SHARD)]


def _shard_path(work: Path, split: str, start: int) -> Path:
    return work / f"{split}-{start:08d}.bin"


def _joined(work: Path, split: str, count: int) -> Iterator[np.ndarray]:
    for start, _ in _shards(count):
        yield np.fromfile(_shard_path(work, split, start), dtype=DTYPES["uint32"])


def _encode_shards(work: Path, rows, splits: dict[str, np.ndarray], encoder, workers: int):
    from tqdm import tqdm

    todo = [(split, start, stop) for split, indices in splits.items()
            for start, stop in _shards(len(indices))]
    left = [shard for shard in todo if not _shard_path(work, *shard[:2]).exists()]
    if len(left) < len(todo):
        print(f"{work}: {len(todo) - len(left)} of {len(todo)} shards are finished already", flush=True)
    # Forked workers share the data set, the encoder and all imports: each costs little memory of its own.
    pool = ProcessPoolExecutor(min(workers, max(1, len(left))), multiprocessing.get_context("fork"), _start_worker,
                               (work, rows, splits, encoder, os.getpid()))
    done = len(rows) - sum(stop - start for _, start, stop in left)
    try:
        with tqdm(total=len(rows), initial=done, unit=" documents", desc="encoding") as bar:
            for future in as_completed([pool.submit(_encode_shard, *shard) for shard in left]):
                bar.update(future.result())
    except BrokenProcessPool:
        raise DataError(f"a worker process died, perhaps for lack of memory; finished shards are kept in {work}: run "
                        f"the same command again, with fewer than --workers={workers}") from None
    except OSError as error:
        raise DataError(f"writing {work} failed ({error.strerror}); free some space and run the same command again: "
                        "finished shards are kept") from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple = ()


def _start_worker(work: Path, rows, splits: dict[str, np.ndarray], encoder, parent: int):
    global _worker
    _worker = (work, rows, splits, encoder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the parent, which lets started shards finish

    def leave_with_parent():  # or a killed parent would leave workers that wait, and hold its lock, for ever
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def _encode_shard(split: str, start: int, stop: int) -> int:
    """Encode documents start ... stop of the split to one file; its name, given last, says that it is whole."""
    work, rows, splits, encoder = _worker
    path = _shard_path(work, split, start)
    unfinished = path.with_suffix(f".{os.getpid()}")
    with open(unfinished, "wb", buffering=1 << 20) as file:
        for at in range(start, stop, BATCH):
            for text in rows[splits[split][at:min(at + BATCH, stop)].tolist()]["text"]:
                file.write(np.append(encoder.encode(text), np.uint32(encoder.end_of_text)).astype("<u4").tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return stop - start


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python data/openwebtext/prepare.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="openwebtext", help="folder, or a bare name for data/NAME (data/openwebtext)")
    parser.add_argument("--id", default=DATASET, help=f"hub id, or a local folder of parquet files ({DATASET})")
    parser.add_argument("--revision", help="commit, branch or tag on the hub (default: the latest)")
    parser.add_argument("--documents", type=int, metavar="N", help="only the first N documents")
    parser.add_argument("--gpt2_ranks", metavar="FILE", help="merge ranks in tiktoken's format instead of a download")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes (cores, at most 8)")
    options = parser.parse_args(arguments)
    try:
        meta = prepare(options.out, options.id, options.revision, options.documents, options.gpt2_ranks,
                       options.workers)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the finished shards", file=sys.stderr)
        return 130
    print(f"{corpus_folder(options.out)}: {meta.tokens['train']:,} training and {meta.tokens['val']:,} validation "
          "tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
