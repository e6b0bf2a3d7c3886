"""What a container allows, as `outrider doctor` looks at it: processors and memory of its control group, open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.cli.check import Check
from outrider.settings import CoordinatorSettings, WorkerSettings

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""From here on a number of bytes is no limit: version 1 writes a very large one."""
OTHER_FILES = 128
"""That a server holds beside one for each of its callers."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the control groups that hold this process; None: without a limit. `throttled`: periods in which it had to wait
    for processors, and all periods."""

    num_cpus: float | None = None
    memory_bytes: int | None = None
    throttled: tuple[int, int] = (0, 0)


def read_limits(root: Path = ROOT, own: Path = OWN) -> Limits:
    """The tightest on the way up; of either version of control groups."""
    paths = _own_paths(own)
    cpus: list[float] = []
    memory: list[int] = []
    throttled = (0, 0)
    for group in _upwards(root, paths.get("", "/")):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cpus.append(int(quota) / int(period))
        memory += _numbers(group / "memory.max")
    for group in _upwards(root / "cpu", paths.get("cpu", "/")):
        quotas, periods = _numbers(group / "cpu.cfs_quota_us"), _numbers(group / "cpu.cfs_period_us")
        cpus += [quota / period for quota, period in zip(quotas, periods, strict=False) if period]
    for group in _upwards(root / "memory", paths.get("memory", "/")):
        memory += _numbers(group / "memory.limit_in_bytes")
    for group in (root / paths.get("", "/").strip("/"), root / "cpu" / paths.get("cpu", "/").strip("/")):
        stat = dict(line.split(maxsplit=1) for line in _text(group / "cpu.stat").splitlines() if " " in line)
        if "nr_throttled" in stat:
            throttled = (int(stat["nr_throttled"]), int(stat.get("nr_periods", 0)))
    memory = [size for size in memory if size < UNLIMITED]
    return Limits(min(cpus, default=None), min(memory, default=None), throttled)


def check_limits(settings: WorkerSettings, limits: Limits, num_cores: int) -> Iterator[Check]:
    """Against the threads and the cache that workers are told to use."""
    threads = settings.num_threads or num_cores
    if limits.num_cpus is None:
        yield Check("ok", "container cpus", f"no limit below the {num_cores} cores")
    else:
        waits, periods = limits.throttled
        detail = f"limited to {limits.num_cpus:g} of {num_cores} cores, a worker runs {threads} threads"
        detail += f"; had to wait in {waits} of {periods} periods" if waits else ""
        if threads > limits.num_cpus:
            fix = f"--num-threads {max(1, int(limits.num_cpus))}, or a higher limit: threads that wait hold up the rest"
            yield Check("warn", "container cpus", detail, fix)
        else:
            yield Check("ok", "container cpus", detail)
    if limits.memory_bytes is None:
        yield Check("ok", "container memory", "no limit")
        return
    detail = f"limited to {limits.memory_bytes / 2**30:.1f} GiB"
    cache = settings.kv_cache_bytes or 0
    if cache >= limits.memory_bytes:
        detail += f", kv_cache_bytes alone is {cache / 2**30:.1f} GiB"
        yield Check("fail", "container memory", detail, "a smaller --kv-cache-bytes, or a higher limit")
    elif settings.memory_fraction and not cache:
        fix = "set --kv-cache-bytes: a share of the machine's memory may be more than the container has"
        yield Check("warn", "container memory", f"{detail}, memory_fraction is {settings.memory_fraction:g}", fix)
    else:
        yield Check("ok", "container memory", detail)


def check_files(settings: CoordinatorSettings, limit: int | None = None) -> Check:
    """Each caller of a coordinator may come with a connection of its own. limit: of open files; None: the process's."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    wanted = settings.max_running_requests + settings.max_waiting_requests + OTHER_FILES
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return Check("ok", "open files", "no limit" if limit == resource.RLIM_INFINITY else f"up to {limit}")
    detail = f"up to {limit}, and a coordinator takes {wanted - OTHER_FILES} streams, each perhaps a connection"
    return Check("warn", "open files", detail, f"`ulimit -n {wanted}` before it starts, or LimitNOFILE={wanted}")


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _own_paths(own: Path) -> dict[str, str]:
    """The group's path by controller; "" is version 2's."""
    paths = {}
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """The group, those above it, and the root, which is all that a container sees of its own."""
    group = root / path.strip("/")
    while group != root and root in group.parents:
        yield group
        group = group.parent
    yield root


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numbers(path: Path) -> list[int]:
    text = _text(path)
    return [int(text)] if text.isdigit() else []
