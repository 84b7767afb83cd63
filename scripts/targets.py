"""Whether what a script is to write can be written, asked before minutes of work."""

import os
from pathlib import Path


def check_targets(*files: str | Path | None, folders: tuple[str | Path, ...] = ()) -> None:
    """Makes nothing; None is a file that was not asked for. Errors: OSError, one sentence, for the first of `files` and
    `folders` that could not be written: where a file is in the way of a folder or the other way round, or what is there
    may not be written to."""
    for target, folder in [(file, False) for file in files if file] + [(name, True) for name in folders]:
        path = Path(target).absolute()
        there = next(one for one in (path, *path.parents) if one.exists())
        if there.is_dir() != (folder or there != path):
            raise OSError(f"{target} cannot be written: {there} is {'a' if there.is_dir() else 'no'} folder")
        if not os.access(there, os.W_OK):
            raise OSError(f"{target} cannot be written: {there} may not be written to")
