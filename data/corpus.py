"""The embedded corpus: real English that any machine has once this project is installed.

It is the prose in the Python standard library and the installed packages: docstrings and other long strings of the
sources (parsed, never imported), README, .rst, .md and .txt files, licences and package descriptions. A paragraph is
kept where it reads like English, and kept once. The same installation gives the same corpus, byte for byte.
"""

import ast
import hashlib
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

ENOUGH = 8_000_000  # characters; what a rich installation has beyond this only makes the corpus slower to build
PER_PACKAGE = 2_000_000  # characters; no single package sets the tone
LARGEST_FILE = 1_000_000  # bytes; larger files are tables and generated code
SKIPPED_FOLDERS = {"test", "tests", "testing", "idlelib", "lib2to3", "__pycache__", "include", "site-packages",
                   "dist-packages", "node_modules", "_vendor", "mpl-data"}
PROSE = {".rst", ".md", ".txt"}
PROSE_NAMES = ("license", "licence", "copying", "notice", "readme", "metadata")
COMMON = frozenset("""a an and any are as at be because been but by can each for from has have if in into is it its may
more no not of on one only or other same so such than that the their then there these they this to used was we
when where which will with you your""".split())
WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
MARKUP = re.compile(r":[a-z:+-]+:(?=`)|`{1,3}|\*{1,2}(?=\S)|(?<=\S)\*{1,2}")


def documents() -> Iterator[tuple[str, str]]:
    """(name, text) of every document, in a fixed order: one a source file, paragraphs separated by an empty line."""
    seen: set[bytes] = set()
    total = 0
    for package in _packages():
        taken = 0
        for name, path in _files(package):
            text = "\n\n".join(p for p in _paragraphs(path) if _first_time(p, seen))
            if not text:
                continue
            yield name, text + "\n"
            taken += len(text)
            if taken >= PER_PACKAGE:
                break
        total += taken
        if total >= ENOUGH:
            return


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph (one line) reads like English: sentences of common words, not code, tables or lists."""
    words = WORD.findall(paragraph)
    if len(words) < 12 or len(paragraph) > 4000 or not (paragraph[0].isalpha() or paragraph[0] in "\"'("):
        return False
    letters = sum(map(len, words))
    common = sum(word.lower() in COMMON for word in words)
    return (common >= 0.25 * len(words) and letters + paragraph.count(" ") >= 0.9 * len(paragraph)
            and 3 <= letters / len(words) <= 8 and paragraph.rstrip("\"')")[-1:] in ".:?!;")


def _packages() -> list[list[Path]]:
    """The standard library, then every installed package by name: lists of folders and files."""
    libraries = [Path(sysconfig.get_paths()["stdlib"])]
    sites = {Path(p) for p in (*sys.path, sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])
             if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir()}
    installed = sorted((entry.name.lower(), entry.name, site) for site in sites for entry in site.iterdir()
                       if not entry.name.startswith((".", "__")))
    return [libraries] + [[site / name] for _, name, site in installed]


def _files(roots: list[Path]) -> Iterator[tuple[str, Path]]:
    for root in roots:
        if root.is_file():
            folders = [(str(root.parent), [], [root.name])]
        else:
            folders = os.walk(root)
        for folder, below, names in folders:
            below[:] = sorted(n for n in below if n not in SKIPPED_FOLDERS and not n.startswith("."))
            for name in sorted(names):
                path = Path(folder, name)
                if _is_source(path) and path.stat().st_size <= LARGEST_FILE:
                    yield path.relative_to(root.parent).as_posix(), path


def _is_source(path: Path) -> bool:
    return (path.suffix == ".py" or path.suffix in PROSE
            or (path.name.lower().startswith(PROSE_NAMES) and path.suffix in ("", *PROSE)))


def _paragraphs(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for piece in _strings(text) if path.suffix == ".py" else [text]:
        for block in re.split(r"\n\s*\n", piece):
            paragraph = MARKUP.sub("", " ".join(block.split()))
            if paragraph and is_prose(paragraph):
                yield paragraph


def _strings(source: str) -> list[str]:
    """String literals with spaces in them and at least 80 characters long, in the order of the source."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
             and len(node.value) >= 80 and " " in node.value]
    return [node.value for node in sorted(found, key=lambda node: (node.lineno, node.col_offset))]


def _first_time(paragraph: str, seen: set[bytes]) -> bool:
    key = hashlib.blake2b(paragraph.encode("utf-8", "replace"), digest_size=8).digest()
    if key in seen:
        return False
    seen.add(key)
    return True
