"""The processes of a tensor-parallel model: rank 0 is the worker itself, and tells the others every pass.

Decisions are made on rank 0 alone; what they come to is in the batches, which go down a pipe to each rank's stdin. A
pipe that ends, for whatever cause, ends the rank, so none outlives its worker. A rank that ends ends the worker: its
share of the weights is gone. Sums between ranks wait a bounded time.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import itertools
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch.distributed as dist

from outrider.errors import Internal, InvalidArgument
from outrider.lm.interface import LanguageModel, LoadedModel, PackedBatch, Segment
from outrider.lm.rank_devices import rank_device
from outrider.lm.states import feature_model
from outrider.settings import TargetWorkerSettings

log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 60.0
"""Longest wait of a rank for another one within a pass; also covers the slowest loading."""
STOP_TIMEOUT_S = 10.0
FORWARD, ALLOCATE, COPY_BLOCK, MOVE_SLOTS = range(4)

_HEADER = struct.Struct("<qq")


class Ranks:
    """Starts ranks 1 to N - 1 and joins them in one process group. They load the same model at the same time."""

    def __init__(self, settings: TargetWorkerSettings, on_lost: Callable[[str], None] | None = None) -> None:
        """on_lost: told, on any thread, why the ranks cannot go on; by default this process then ends with status 1."""
        num_ranks = settings.tensor_parallel
        self._closing = False
        self._on_lost = on_lost or _end_process
        timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", 0, num_ranks, is_master=True, timeout=timeout, wait_for_workers=False)
        self._processes = [self._start(rank, store.port, settings) for rank in range(1, num_ranks)]
        self._store = store
        atexit.register(self.close)
        own = rank_device(settings.device, 0, num_ranks)
        own.use()
        dist.init_process_group(own.backend, store=store, rank=0, world_size=num_ranks, timeout=timeout)

    @property
    def pids(self) -> list[int]:
        """Of ranks 1, 2, ..."""
        return [process.pid for process in self._processes]

    def ended(self) -> str:
        """Which rank ended, and how; empty when all run."""
        for rank, process in enumerate(self._processes, start=1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return _ended(rank, process.wait(1.0))
        return ""

    def watch(self) -> None:
        """From here on a rank that ends is told to `on_lost`, at once if it has ended already."""
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def lose(self, why: str) -> None:
        """The ranks cannot go on."""
        if not self._closing:
            self._on_lost(why)

    def send(self, operation: int, values: np.ndarray) -> None:
        """values: int64[n], to every rank."""
        frame = _HEADER.pack(operation, len(values)) + values.tobytes()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(frame)
            process.stdin.flush()

    def close(self) -> None:
        """Ends all ranks; kills those that do not end in time. Idempotent."""
        if self._closing:
            return
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _start(self, rank: int, port: int, settings: TargetWorkerSettings) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "outrider.lm.ranks", str(rank), str(port)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        text = settings.model_dump_json().encode()
        assert process.stdin is not None
        process.stdin.write(_HEADER.pack(0, len(text)) + text)
        process.stdin.flush()
        return process

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.lose(_ended(rank, process.wait()))


class TensorParallelModel:
    """The `LanguageModel` of rank 0: every call is made on all ranks."""

    def __init__(self, model: LanguageModel, ranks: Ranks) -> None:
        self._model = model
        self.ranks = ranks
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.num_layers: int = getattr(model, "num_layers", 0)
        self.hidden_size: int = getattr(model, "hidden_size", 0)

    @property
    def num_rows_computed(self) -> int:
        """This rank's count."""
        return int(getattr(self._model, "num_rows_computed", 0))

    def bytes_per_block(self, block_size: int) -> int:
        """This rank's share, which no other one exceeds."""
        return self._model.bytes_per_block(block_size)

    def keep_features(self, states: Sequence[int]) -> None:
        """As `FeatureModel`: on this rank, since every rank has whole states."""
        feature_model(self._model).keep_features(states)

    def exit_after(self, num_layers: int) -> None:
        """Raises InvalidArgument: the other ranks have no states to go on from."""
        raise InvalidArgument("tensor_parallel: early exit is for one rank only", field="tensor_parallel")

    def skip_layers(self, layers: Sequence[int]) -> None:
        """Raises InvalidArgument, as `exit_after`."""
        raise InvalidArgument("tensor_parallel: skipping layers is for one rank only", field="tensor_parallel")

    def read_features(self, slots: Sequence[int], states: Sequence[int]) -> Any:
        """As `FeatureModel`."""
        return feature_model(self._model).read_features(slots, states)

    def free_bytes(self) -> int:
        """Memory free for each rank: on a CPU all share it, GPUs are each rank's own."""
        model: Any = self._model
        has_own = getattr(getattr(model, "device", None), "type", "cpu") == "cuda"
        num_sharing = 1 if has_own else len(self.ranks.pids) + 1
        return int(model.free_bytes()) // num_sharing

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """On all ranks."""
        with self._together(ALLOCATE, np.array([num_blocks, block_size], np.int64)):
            self._model.allocate_cache(num_blocks, block_size)

    def copy_block(self, source: int, destination: int) -> None:
        """On all ranks."""
        with self._together(COPY_BLOCK, np.array([source, destination], np.int64)):
            self._model.copy_block(source, destination)

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """On all ranks."""
        with self._together(MOVE_SLOTS, np.array([*sources, *destinations], np.int64)):
            self._model.move_slots(sources, destinations)

    def forward(self, batch: PackedBatch) -> np.ndarray:
        """float32[num_logit_rows, vocab_size]."""
        with self._together(FORWARD, encode(batch)):
            return self._model.forward(batch)

    @contextlib.contextmanager
    def _together(self, operation: int, values: np.ndarray) -> Iterator[None]:
        """A call that fails here leaves the ranks out of step for good: it ends them."""
        try:
            self.ranks.send(operation, values)
            yield
        except Exception as error:
            self.ranks.lose(f"a tensor-parallel call failed ({type(error).__name__}: {error})")
            raise


def encode(batch: PackedBatch) -> np.ndarray:
    """int64: of each segment its five lengths, then its ids, its blocks and its parents."""
    values: list[int] = []
    for s in batch.segments:
        values += [s.num_cached_tokens, s.num_logits, len(s.token_ids), len(s.block_table), len(s.parents)]
        values += [*s.token_ids, *s.block_table, *s.parents]
    return np.array(values, np.int64)


def decode(values: np.ndarray) -> PackedBatch:
    """What `encode` wrote."""
    rest, segments = iter(values.tolist()), []
    for num_cached_tokens in rest:
        num_logits, *lengths = itertools.islice(rest, 4)
        ids, blocks, parents = (list(itertools.islice(rest, length)) for length in lengths)
        segments.append(Segment(num_cached_tokens, ids, blocks, num_logits, tuple(parents)))
    return PackedBatch(tuple(segments))


def load_on_ranks(
    settings: TargetWorkerSettings, load: Callable[[], LoadedModel], on_lost: Callable[[str], None] | None = None
) -> LoadedModel:
    """`load` on this rank, and the same on all others, which are started here unless this is one of them."""
    check_settings(settings)
    if dist.is_initialized() and dist.get_rank() > 0:
        return load()
    ranks = Ranks(settings, on_lost)
    try:
        loaded = load()
        ranks.watch()
        return dataclasses.replace(loaded, model=TensorParallelModel(loaded.model, ranks))
    except BaseException as error:
        ended = ranks.ended()
        ranks.close()
        if isinstance(error, RuntimeError) and ended:
            raise Internal(f"{ended} while it loaded; what it said of it stands above") from error
        raise


def check_settings(settings: TargetWorkerSettings) -> None:
    """Raises InvalidArgument, naming the setting, on what a tensor-parallel model does not go with."""
    rank_device(settings.device, 0, settings.tensor_parallel)
    if settings.numerics == "exact":
        raise InvalidArgument("tensor_parallel: numerics=exact is proved for one rank only", field="numerics")


def serve_rank(rank: int, port: int, pipe: BinaryIO) -> None:
    """The life of ranks 1 and up: load, then make every call that rank 0 makes, until the pipe ends."""
    from outrider.lm.loading import load_model

    frame = _read_frame(pipe, item_bytes=1)
    if frame is None:
        return
    settings = TargetWorkerSettings.model_validate_json(frame[1])
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    num_ranks = settings.tensor_parallel
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=False, timeout=timeout, wait_for_workers=False)
    own = rank_device(settings.device, rank, num_ranks)
    own.use()
    dist.init_process_group(own.backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    model = load_model(settings).model
    while (frame := _read_frame(pipe, item_bytes=8)) is not None:
        operation, values = frame[0], np.frombuffer(frame[1], np.int64)
        if operation == FORWARD:
            model.forward(decode(values))
        elif operation == ALLOCATE:
            model.allocate_cache(*values.tolist())
        elif operation == MOVE_SLOTS:
            sources, destinations = np.split(values, 2)
            model.move_slots(sources.tolist(), destinations.tolist())
        else:
            model.copy_block(*values.tolist())


def _read_frame(pipe: BinaryIO, item_bytes: int) -> tuple[int, bytes] | None:
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    operation, length = _HEADER.unpack(header)
    body = pipe.read(length * item_bytes)
    return (operation, body) if len(body) == length * item_bytes else None


def _ended(rank: int, status: int) -> str:
    return f"rank {rank} of the tensor-parallel model ended with status {status}"


def _end_process(why: str) -> None:
    log.critical("%s: the worker ends", why)
    logging.shutdown()
    os._exit(1)


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the pipe tells when to end
    serve_rank(int(sys.argv[1]), int(sys.argv[2]), sys.stdin.buffer)
    os._exit(0)  # the process group may hold threads that wait for ranks already gone
