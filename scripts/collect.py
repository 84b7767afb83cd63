"""What is worth keeping of a run, small: python scripts/collect.py RUN [RUN ...] --out results/mini [--order] [--thin]

For each run, named after its folder: NAME.jsonl.xz (metrics), NAME.run.json (header), with --order NAME.order.bin.xz.
The runs may still be training: what they have logged so far is taken. Every script that reads runs reads these files.
"""

import argparse
import lzma
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from files import write_bytes
from metrics import MetricsError, read_metrics, read_run, to_json
from scripts.targets import check_targets, named

EVERY_PROBE = ("probe/ties", "probe/row_max", "probe/wq_norm", "probe/key_mean")
SPECTRA_EVERY = 500  # steps


def thin(records: list[dict]) -> list[dict]:
    """What tables, figures and the monitor of many runs read, at a third of the size: of every record the loss, the
    gradient norm, warnings, and ties, largest scores and W_Q norms, but the other probes only at multiples of 500
    steps; of numbers of a layer (not of a head, which are short as logged) and of clocks six digits."""
    def kept(step: int, key: str) -> bool:
        return not key.startswith("probe/") or key.startswith(EVERY_PROBE) or step % SPECTRA_EVERY == 0

    def short(key: str, value):
        if not isinstance(value, float) or not math.isfinite(value) or not key.startswith(("probe/", "time", "tokens")):
            return value
        return round(value, 1) if key == "time" else float(f"{value:.6g}")

    return [{key: short(key, value) for key, value in r.items() if kept(r["step"], key)} for r in records]


def name_of(run: Path) -> str:
    """What the files of a run are called: after its folder, or as the file that was kept of it."""
    run = run.resolve()
    if run.is_dir():
        return run.name
    return run.parent.name if run.name.startswith("metrics.jsonl") else run.name.partition(".jsonl")[0]


def collect(run: Path, out: Path, order: bool, thinned: bool = False) -> list[Path]:
    """Writes the files of one run, an out_dir or a file that was kept, into `out` and returns their paths. Errors:
    MetricsError for what is no run."""
    header, name = read_run(run), name_of(run)
    if not header:
        raise MetricsError(f"{run} is not the out_dir of a run: it has no run.json")
    if order and not (run / "order.bin").is_file():
        raise MetricsError(f"{run} has no order.bin: it replayed one, or did not record; leave out --order")
    records = read_metrics(run)
    text = "".join(to_json(record) + "\n" for record in (thin(records) if thinned else records))
    files = {f"{name}.jsonl.xz": lzma.compress(text.encode(), preset=9),
             f"{name}.run.json": (to_json(header, indent=1) + "\n").encode()}
    if order:
        files[f"{name}.order.bin.xz"] = lzma.compress((run / "order.bin").read_bytes())
    for file, content in files.items():  # whole at any time: it may be all that is left of a machine
        write_bytes(out / file, content)
    return [out / file for file in files]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=named, metavar="RUN", help="out_dir of a run")
    parser.add_argument("--out", type=named, required=True, help="folder; files of the same name are replaced")
    parser.add_argument("--order", action="store_true", help="the order file too")
    parser.add_argument("--thin", action="store_true", help="of many runs: fewer probes and digits, by `thin`")
    args = parser.parse_args(argv)
    names = [name_of(run) for run in args.runs]
    if len(set(names)) < len(names):
        print(f"collect: two runs share a name, among {', '.join(names)}; collect them into folders of their own",
              file=sys.stderr)
        return 2
    try:
        check_targets(folders=(args.out,))
        paths = [path for run in args.runs for path in collect(run, args.out, args.order, args.thin)]
        print("\n".join(f"{path}: {path.stat().st_size:,} bytes" for path in paths))
    except (MetricsError, OSError) as error:
        print(f"collect: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
