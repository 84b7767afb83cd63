"""train.py on RANKS GPUs (processes, on a CPU) of this machine, or of each of several:

    python scripts/ranks.py RANKS [--nnodes=N --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT] CONFIG.toml [--key=value]

As torchrun starts it, whose flags may stand before CONFIG.toml, but it ends with the exit status of train.py, and what
that said last stays last: torchrun ends with 1 whatever its ranks end with, behind a traceback of its own.
"""

import itertools
import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

import train


def main(argv: list[str]) -> int:
    if not argv or not argv[0].isdecimal() or int(argv[0]) < 1:
        print(f"ranks.py: {' '.join(argv[:1]) or 'nothing'} is no number of ranks, which comes first", file=sys.stderr)
        return train.EXIT_USER
    ranks, *flags = argv
    where = list(itertools.takewhile(lambda flag: flag.startswith("--"), flags))
    if not (flags := flags[len(where):]):
        print("ranks.py: no CONFIG.toml, which comes before train.py's flags", file=sys.stderr)
        return train.EXIT_USER
    command = [*(where or ["--standalone"]), f"--nproc_per_node={ranks}", "--", str(ROOT / "train.py"), *flags]
    logging.disable()  # torchrun's own words, in this process alone
    asked = run.parse_args(command).nnodes
    try:
        nodes = run.parse_min_max_nnodes(asked)[1]
    except (ValueError, RuntimeError):
        print(f"ranks.py: --nnodes={asked} is no number of nodes", file=sys.stderr)
        return train.EXIT_USER
    os.environ["WORLD_SIZE"] = str(int(ranks) * nodes)  # for `prepare`; the ranks get theirs from torchrun
    # Seconds from SIGTERM to SIGKILL, 30 by torchrun's default: rank 0 may still be saving. torch 2.11 has 30 for good.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    try:  # once, before any rank: torchrun ends all of them with the first one, perhaps before rank 0 has said why
        train.prepare(train.load(flags))
    except (ValueError, *train.USER_ERRORS) as error:
        return train.report("error", error, train.EXIT_USER)
    try:
        run.main(command)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return 128 - code if code < 0 else code  # as a shell reports signals
    except SignalException as error:
        return 128 + error.sigval
    except RendezvousError as error:  # the first node's launcher, which the others meet at, is gone or was never there
        print(f"ranks.py: the nodes lost each other ({error}); what the first one said last is why", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
