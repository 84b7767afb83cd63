"""One process per device under torchrun, or one process alone, behind the same object.

Collectives have a time limit, so a rank that died ends the others with an error instead of leaving them waiting.
"""

import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


@dataclass
class Group:
    """This process and its peers. With one process every method works without a process group.

    Flags and barriers go over `control`, a gloo group on the CPU: they need no GPU stream, so they work while a GPU is
    in an unknown state.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = field(default=None, repr=False)
    timeout_s: float = 600.0

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.rank == 0

    def print(self, *values) -> None:
        """Prints on rank 0 alone."""
        if self.is_main:
            print(*values, flush=True)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of a tensor of equal shape on all of them; a new tensor, equal on all ranks."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over ranks; as `sum`. For a floating-point tensor."""
        return self._reduce(tensor, dist.ReduceOp.SUM) / self.world_size

    def max(self, tensor: Tensor) -> Tensor:
        """The maximum over ranks; as `sum`. What becomes of NaN is up to the library: ask `any` about those."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """True on every rank if the flag is true on one of them."""
        if self.control is None:
            return bool(flag)
        value = torch.tensor([int(bool(flag))], dtype=torch.int32)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.control)
        return bool(value.item())

    def barrier(self) -> None:
        """Waits for all ranks; raises RuntimeError that names a missing rank after the time limit."""
        if self.control is not None:
            dist.monitored_barrier(self.control, timedelta(seconds=self.timeout_s))

    def close(self, failed: bool = False) -> None:
        """Leaves the process group; may be called twice. After an exception pass failed=True: the peers may be gone or
        inside a collective that never completes, so theirs is aborted instead of waited for."""
        if self.control is None:
            return
        self.control = None
        if not dist.is_initialized():
            return
        time.sleep(0.1)  # or gloo's threads may still want the GIL, which its destructor holds as it waits for them
        try:
            if failed and self.device.type == "cuda":
                dist.group.WORLD.abort()
            dist.destroy_process_group()
        except Exception as error:  # the run is over: what went wrong before is the message that counts
            if not failed:
                print(f"rank {self.rank}: closing the process group failed ({error})", file=sys.stderr, flush=True)

    def _reduce(self, tensor: Tensor, op) -> Tensor:
        result = tensor.detach().clone()
        if self.control is not None:
            dist.all_reduce(result, op)
        return result


def init(device: str, timeout_s: float = 600.0) -> Group:
    """Joins the group that torchrun describes, or stands alone where its variables are absent.

    device: "cpu", "cuda", "cuda:N" (without torchrun only), or "auto" (cuda where there is a GPU). With "cpu" no CUDA
    function is called. timeout_s, in seconds, bounds every collective: it has to exceed the slowest step, compilation
    included. Raises ValueError for a device that does not exist, more ranks than GPUs, or half an environment.
    """
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"the time limit of collectives is {timeout_s} s; give a positive number of seconds")
    given = [name for name in _VARIABLES if name in os.environ]
    alone = not {"RANK", "WORLD_SIZE"} & set(given)
    if not alone and len(given) < len(_VARIABLES):
        missing = ", ".join(name for name in _VARIABLES if name not in given)
        raise ValueError(f"the environment has {', '.join(given)} but not {missing}; start with torchrun, which sets "
                         "them all, or unset them to run one process")
    rank, local_rank, world_size = (0, 0, 1) if alone else (int(os.environ[name]) for name in _VARIABLES[:3])
    local_size = 1 if alone else int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    place = place_of(device, local_rank, local_size)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    group = Group(rank, local_rank, world_size, place, timeout_s=timeout_s)
    if world_size > 1:
        limit = timedelta(seconds=timeout_s)
        if local_size == world_size and sys.platform == "linux":
            # One machine: gloo talks over loopback. Else it looks the host name up, which fails or hangs without a
            # network, and may find an address that a firewall blocks.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if place.type == "cuda":
            dist.init_process_group("nccl", timeout=limit, device_id=place)
            group.control = dist.new_group(backend="gloo", timeout=limit)
        else:
            dist.init_process_group("gloo", timeout=limit)
            group.control = dist.group.WORLD
    return group


def place_of(device: str, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """The device of this rank; every local rank comes to the same verdict, so none is left waiting for another. Errors
    as `init`."""
    if device == "cpu":
        return torch.device("cpu")
    kind, _, number = device.partition(":")
    if kind not in ("cuda", "auto") or (number and (kind == "auto" or not number.isdecimal())):
        raise ValueError(f"device={device} is unknown; choose cpu, cuda, cuda:N or auto")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        if kind == "auto":
            return torch.device("cpu")
        raise ValueError(f"device={device} needs a CUDA GPU and PyTorch {torch.__version__} sees none; "
                         "use --device=cpu, or install a CUDA build of PyTorch and check nvidia-smi")
    if local_size > count:
        raise ValueError(f"{local_size} ranks on this machine share {count} GPUs; one rank needs one GPU, so use "
                         f"--nproc_per_node={count} or --device=cpu")
    if number:
        if local_size > 1:
            raise ValueError(f"device={device} with {local_size} ranks would put all on one GPU; use --device=cuda")
        if int(number) >= count:
            raise ValueError(f"device={device} does not exist: PyTorch sees {count} GPUs, cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", int(number) if number else local_rank)
