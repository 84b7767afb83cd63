"""What is worth keeping of a run, small: python scripts/collect.py RUN [RUN ...] --out results/mini [--order]

For each run, named after its folder: NAME.jsonl.xz (metrics), NAME.run.json (header), with --order NAME.order.bin.xz.
The runs may still be training: what they have logged so far is taken. Every script that reads runs reads these files.
"""

import argparse
import lzma
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from metrics import MetricsError, read_metrics, read_run, to_json


def collect(run: Path, out: Path, order: bool) -> list[Path]:
    """Writes the files of one run into `out` and returns their paths. Errors: MetricsError for what is no run."""
    metrics, header, name = run / "metrics.jsonl", read_run(run), run.resolve().name
    if not header or not metrics.is_file():
        raise MetricsError(f"{run} is not the out_dir of a run: it has no run.json or no metrics.jsonl")
    if order and not (run / "order.bin").is_file():
        raise MetricsError(f"{run} has no order.bin: it replayed one, or did not record; leave out --order")
    read_metrics(run)  # refuses what is no log, before anything is written
    text = metrics.read_bytes()  # up to the last whole line: a live run may be writing one
    files = {f"{name}.jsonl.xz": lzma.compress(text[: text.rfind(b"\n") + 1], preset=9),
             f"{name}.run.json": (to_json(header, indent=1) + "\n").encode()}
    if order:
        files[f"{name}.order.bin.xz"] = lzma.compress((run / "order.bin").read_bytes())
    out.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (out / file).write_bytes(content)
    return [out / file for file in files]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="out_dir of a run")
    parser.add_argument("--out", type=Path, required=True, help="folder; files of the same name are replaced")
    parser.add_argument("--order", action="store_true", help="the order file too")
    args = parser.parse_args(argv)
    names = [run.resolve().name for run in args.runs]
    if len(set(names)) < len(names):
        print(f"collect: two runs share a name, among {', '.join(names)}; collect them into folders of their own",
              file=sys.stderr)
        return 2
    try:
        for run in args.runs:
            for path in collect(run, args.out, args.order):
                print(f"{path}: {path.stat().st_size:,} bytes")
    except (MetricsError, OSError) as error:
        print(f"collect: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
