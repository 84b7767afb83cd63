"""python -m replay info FILE | verify FILE --data DIR | import DIR --out FILE --data DIR ... (--help for the rest)"""

import argparse
import sys
from pathlib import Path

from data.meta import DataError, corpus_folder
from replay.authors import LINES, import_order
from replay.order import Header, OrderError, OrderFile


def info(options: argparse.Namespace):
    with OrderFile(options.file) as order:
        header = order.header
        print(f"data set            {header.dataset}\n"
              f"training tokens     {header.n_tokens:,}\n"
              f"their SHA-256       {header.sha256}\n"
              f"block size          {header.block_size}\n"
              f"sequences a step    {header.sequences_per_step}\n"
              f"seed                {'unknown (imported)' if header.seed is None else header.seed}\n"
              f"steps               {order.rows}\n"
              f"tokens read         {order.rows * header.sequences_per_step * header.block_size:,}\n"
              f"order SHA-256       {order.sha256()}")


def verify(options: argparse.Namespace):
    with OrderFile(options.file) as order:
        digest = order.sha256()  # reads, and so checks, every row
        tokens = _training_tokens(options.data)
        order.check(Header(tokens.name, tokens.n_tokens, tokens.verify(), order.header.block_size,
                           order.header.sequences_per_step))
        print(f"{options.file}: {order.rows} whole steps in range, recorded on {tokens.path}; order SHA-256 {digest}")


def import_(options: argparse.Namespace):
    if options.block_size < 1 or options.sequences < 1:
        raise OrderError(f"--block_size={options.block_size} and --sequences={options.sequences} must both be positive")
    tokens = _training_tokens(options.data)
    header = Header(tokens.name, tokens.n_tokens, tokens.verify(), options.block_size, options.sequences)
    steps = import_order(options.folder, options.out, header, options.batch_size, options.line)
    print(f"{options.out}: {steps} steps of {options.sequences} sequences on {tokens.path}")


def _training_tokens(folder: Path):
    from data.loader import open_tokens  # loads torch, which `info` does without

    return open_tokens(corpus_folder(folder), "train")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m replay", description="Inspect, check and import batch orders.")
    commands = top.add_subparsers(dest="command", required=True, metavar="info | verify | import")
    command = commands.add_parser("info", help="what an order file holds")
    command.add_argument("file", type=Path, metavar="FILE")
    command.set_defaults(run=info)
    command = commands.add_parser("verify", help="check every row, and that the data is what it was recorded on")
    command.add_argument("file", type=Path, metavar="FILE")
    command.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with train.bin")
    command.set_defaults(run=verify)
    command = commands.add_parser("import", help="read the paper authors' generated_indices_rank_R.txt")
    command.add_argument("folder", type=Path, metavar="DIR", help="folder with the text files of all ranks")
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="order file to make")
    command.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with the train.bin they index")
    command.add_argument("--block_size", type=int, required=True, help="tokens a sequence")
    command.add_argument("--sequences", type=int, required=True, help="sequences of a step, over all ranks")
    command.add_argument("--batch_size", type=int, help="sequences of a rank and micro-step; needed with several ranks")
    command.add_argument("--line", choices=LINES, default="step", help="what a line holds (default: step, as released)")
    command.set_defaults(run=import_)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 with one sentence where a file cannot be read or does not fit."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except (OrderError, DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
