"""The repository's main job in a few minutes: record a run, replay its batches under other backends, compare.

    python scripts/demo.py [--steps N]

Trains a small GPT on the embedded corpus under flash_bf16 while recording the order, replays the order under standard
and stabilized, and prints what the paper's rounding does to one addition. It uses a GPU where there is one. The
folder runs/demo is this script's own and made anew each time.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from attention.rounding import PAPER_ADDITION, PAPER_TIE, explain_addition

RUNS = ROOT / "runs/demo"
RECORDED, REPLAYED = "flash_bf16", ("standard", "stabilized")


def run(*command: str) -> None:
    """Runs a command of this repository with this Python; stops the demo where it fails."""
    print("\n$ python " + " ".join(command), flush=True)
    status = subprocess.run([sys.executable, *command], cwd=ROOT).returncode
    if status:
        sys.exit(f"demo: that command failed with status {status}; see above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each of the three runs")
    steps = parser.parse_args().steps
    started = time.monotonic()
    if not (ROOT / "data/embedded/meta.json").exists():
        run("data/text/prepare.py", "--out", "embedded")
    shutil.rmtree(RUNS, ignore_errors=True)
    common = ("--device=auto", f"--max_iters={steps}")
    run("train.py", f"configs/cpu_{RECORDED}.toml", *common, f"--out_dir=runs/demo/{RECORDED}")
    for arm in REPLAYED:
        run("train.py", f"configs/cpu_{arm}.toml", *common, f"--out_dir=runs/demo/{arm}",
            f"--replay=runs/demo/{RECORDED}/order.bin")
    run("-m", "replay", "info", f"runs/demo/{RECORDED}/order.bin")
    run("scripts/compare.py", *(f"runs/demo/{arm}" for arm in (RECORDED, *REPLAYED)),
        "-o", "comparison.png", "--json", "runs/demo/comparison.json")
    print("\nThe rounding behind the paper's failure (section 3.3.2), BF16(O + P V) for one feature of one token:\n")
    print(explain_addition(*PAPER_ADDITION))
    print("\nThe same without the bits below BF16, a tie that rounds the other way:\n")
    print(explain_addition(*PAPER_TIE))
    print(f"\ncomparison.png and runs/demo/ written in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
