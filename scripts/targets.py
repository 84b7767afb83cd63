"""Whether what a script is to write can be written, asked before minutes of work."""

import argparse
import os
import re
from pathlib import Path

OF_A_RUN = r"(.*\.)?(run|switches)\.json|.*\.jsonl(\.gz|\.xz)?|.*\.(bin|bin\.xz|pt)"  # what no script may replace


def named(text: str) -> Path:
    """The type of a flag that names a file or folder: an empty one would be the working folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty; the working folder is .")
    return Path(text)


def check_targets(*files: str | Path | None, folders: tuple[str | Path, ...] = ()) -> None:
    """Makes nothing; None is a file that was not asked for. Errors: OSError, one sentence, for the first of `files` and
    `folders` that could not be written: where a file is in the way of a folder or the other way round, what is there
    may not be written to or belongs to a run, or two of the files are one."""
    places = [os.path.realpath(file) for file in files if file]
    if twice := [file for file in files if file and places.count(os.path.realpath(file)) > 1 and file != os.devnull]:
        raise OSError(f"{' and '.join(map(str, twice))} are one file; only the last would stay, so give two names")
    for target, folder in [(file, False) for file in files if file] + [(name, True) for name in folders]:
        path = Path(target).absolute()
        there = next(one for one in (path, *path.parents) if one.exists())
        if there.is_dir() != (folder or there != path):
            raise OSError(f"{target} cannot be written: {there} is {'a' if there.is_dir() else 'no'} folder")
        if not os.access(there, os.W_OK):
            raise OSError(f"{target} cannot be written: {there} may not be written to")
        if there == path and not folder and re.fullmatch(OF_A_RUN, path.name):
            raise OSError(f"{target} cannot be written: it is there and belongs to a run; give another name")
