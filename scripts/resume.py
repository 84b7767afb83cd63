"""How a job that is started again goes on: python scripts/resume.py CONFIG.toml [--key=value ...], as train.py's.

Prints --init_from=resume where their out_dir has a checkpoint, and nothing where it has none. A run that has other
settings by now, or is past max_iters, is refused with one sentence and exit status 2, before anything is changed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checkpoint import checkpoints
from config import ConfigError, load
from metrics import MetricsError
from scripts.arms import check_begun


def main(argv: list[str]) -> int:
    try:
        out = Path(load(argv).out_dir)
        if checkpoints(out):
            check_begun(out, argv, "--out_dir", "--max_iters")
            print("--init_from=resume")
    except (ConfigError, MetricsError) as error:
        print(f"resume.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
