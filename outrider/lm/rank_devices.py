"""Where the ranks of a tensor-parallel model compute, and what carries their sums: NCCL between GPUs, one a rank, gloo
between processes of a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from outrider.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class RankDevice:
    """device: the rank's own. backend: of the process group, the same on all ranks."""

    device: torch.device
    backend: str

    def use(self) -> None:
        """Makes the device current in this process: NCCL and unnamed allocations go to the current one."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)


def rank_device(wanted: str, rank: int, num_ranks: int) -> RankDevice:
    """wanted: the setting `device`. "auto" is the GPUs where there is one for every rank, else the CPU.

    Raises InvalidArgument, naming the fix, where ranks cannot have what is wanted.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if wanted == "cpu" or (wanted == "auto" and (num_gpus < num_ranks or not has_nccl)):
        return RankDevice(torch.device("cpu"), "gloo")
    if wanted not in ("auto", "cuda"):
        raise _fault(f"ranks take GPUs 0, 1, ... themselves: give device cuda, or device cpu, not {wanted}")
    if num_gpus < num_ranks:
        raise _fault(f"{num_ranks} ranks need a GPU each, {num_gpus} are here: use device cpu, or fewer ranks")
    if not has_nccl:
        raise _fault("this build of torch has no NCCL for ranks on GPUs: use device cpu")
    return RankDevice(torch.device("cuda", rank), "nccl")


def _fault(what: str) -> InvalidArgument:
    return InvalidArgument(f"tensor_parallel: {what}", field="device")
