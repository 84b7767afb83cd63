"""What a script is to write: whether it can be written, asked before minutes of work, and files that are whole."""

import os
import re
from pathlib import Path

OF_A_RUN = r"(.*\.)?(run|switches)\.json|.*\.jsonl(\.gz|\.xz)?|.*\.(bin|bin\.xz|pt)"  # what no script may replace


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


def write_text(path: str | Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Makes the folder, too. What was there before is there until all of the content is: a disk may be full, or a
    process killed, halfway. Errors: OSError, one sentence."""
    path = Path(path).resolve()  # a link stays one
    temporary = path if path.exists() and not path.is_file() else path.with_name(f"{path.name}.tmp")  # /dev/stdout
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        if temporary != path:
            os.replace(temporary, path)
    except OSError as error:
        if temporary != path:
            temporary.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written ({error.strerror}), and is as it was before; make room there and "
                      "give the command again") from error
