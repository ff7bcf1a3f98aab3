"""The ways of loading that are compared: ours, and three that others use.

Each gets what favours it: arguments are built before the time runs, and ours alone builds its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.errors import SettingsError
from forebay.measure.link import MIB, Carrier, Link

_BLOCK_BYTES = 2 * MIB
_PREPARED = 4
_BATCH_12, _BATCH_13 = 12080, 13000
_ORDER_STREAM = 1
GATHER_BLOCKS = 8

Addresses = NDArray[np.int64]


class Loader(Protocol):
    """One way of loading."""

    @property
    def about(self) -> str:
        """What it does, in a line."""
        ...

    def load(self) -> None:
        """Bring one load to the device; returns when its last byte is there."""
        ...


@contextmanager
def loaders(link: Link, fragment_bytes: int, load_bytes: int) -> Iterator[Mapping[str, Loader]]:
    """Each way by its name, ours first; the gather kernel only where Triton is installed."""
    blocks = load_bytes // _BLOCK_BYTES
    with link.carrier(_BLOCK_BYTES, fragment_bytes) as carrier:
        jobs = [Job(link, carrier, fragment_bytes, blocks) for _ in range(_PREPARED)]
        ways: dict[str, Loader] = {
            "forebay": _Ours(carrier, blocks),
            "copy_loop": _CopyLoop(link, jobs),
            "fifo_batch": _FifoBatch(jobs),
        }
        if importlib.util.find_spec("triton") is not None:
            ways["gather_kernel"] = _GatherKernel(jobs)
        yield ways


class Job:
    """Where the fragments of one load lie and go: offsets in the pools, and addresses."""

    def __init__(self, link: Link, carrier: Carrier, fragment_bytes: int, blocks: int) -> None:
        load = carrier.transfer(blocks)
        parts = _BLOCK_BYTES // fragment_bytes
        layer = np.repeat(np.arange(parts, dtype=np.int64), blocks)
        # Layer by layer, as a model would need them.
        self.reads = np.tile(load.sources.astype(np.int64), parts) * _BLOCK_BYTES
        self.reads += layer * fragment_bytes
        self.writes = layer * (carrier.slots * fragment_bytes)
        self.writes += np.tile(load.destinations.astype(np.int64), parts) * fragment_bytes
        self.fragment_bytes = fragment_bytes
        device, host = link.pools(_BLOCK_BYTES)
        self.sources: Addresses = self.reads + host.base_address
        self.destinations: Addresses = self.writes + device.base_address


class _Ours:
    about = "the mover, two lanes with one window of 8 MiB each"

    def __init__(self, carrier: Carrier, blocks: int) -> None:
        self._carrier, self._blocks = carrier, blocks

    def load(self) -> None:
        self._carrier.wait([self._carrier.submit(self._blocks)])


class _CopyLoop:
    about = "PyTorch copy_, non-blocking, one fragment at a time, layer after layer"

    def __init__(self, link: Link, jobs: list[Job]) -> None:
        host = torch.from_numpy(link.host.bytes)
        self._stream = torch.cuda.Stream()
        self._jobs = cycle([list(self._pairs(host, link.device, job)) for job in jobs])

    @staticmethod
    def _pairs(
        host: torch.Tensor, device: torch.Tensor, job: Job
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size = job.fragment_bytes
        for read, write in zip(job.reads.tolist(), job.writes.tolist(), strict=True):
            yield device[write : write + size], host[read : read + size]

    def load(self) -> None:
        with torch.cuda.stream(self._stream):
            for to, at in next(self._jobs):
                to.copy_(at, non_blocking=True)
        self._stream.synchronize()


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    ]


class _FifoBatch:
    about = "everything in one cuMemcpyBatchAsync on one stream"

    def __init__(self, jobs: list[Job]) -> None:
        self._call, self._version = _batch_call()
        self._stream = torch.cuda.Stream()
        self._jobs = cycle(jobs)
        self._attributes = _Attributes(order=_ORDER_STREAM)
        self._first = ctypes.c_size_t(0)
        count = len(jobs[0].sources)
        self._sizes = np.full(count, jobs[0].fragment_bytes, np.uint64)

    def load(self) -> None:
        job = next(self._jobs)
        failed = ctypes.c_size_t(0)
        arguments: list[Any] = [
            job.destinations.ctypes.data_as(ctypes.c_void_p),
            job.sources.ctypes.data_as(ctypes.c_void_p),
            self._sizes.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(len(job.sources)),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
        ]
        if self._version < _BATCH_13:
            arguments.append(ctypes.byref(failed))
        torch.cuda.set_device(self._stream.device)  # this thread may not have called it before
        status = self._call(*arguments, ctypes.c_void_p(self._stream.cuda_stream))
        if status:
            raise SettingsError(f"cuMemcpyBatchAsync failed with error {status} of the driver")
        self._stream.synchronize()


def _batch_call() -> tuple[Any, int]:
    """The driver's batch copy, and the version of its signature. Raises SettingsError."""
    driver = ctypes.CDLL("libcuda.so.1")
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < _BATCH_12:
        raise SettingsError(
            "the driver has no cuMemcpyBatchAsync: it is older than CUDA 12.8; leave the rivals out"
        )
    wanted = _BATCH_13 if version.value >= _BATCH_13 else _BATCH_12
    found, state = ctypes.c_void_p(), ctypes.c_int()
    driver.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync", ctypes.byref(found), wanted, ctypes.c_uint64(0), ctypes.byref(state)
    )
    if not found.value:
        raise SettingsError("the driver does not give cuMemcpyBatchAsync: leave the rivals out")
    pointers = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] + [ctypes.c_void_p] * 2 + [ctypes.c_size_t]
    rest = [ctypes.c_void_p] if wanted == _BATCH_13 else [ctypes.c_void_p] * 2
    return ctypes.CFUNCTYPE(ctypes.c_int, *pointers, *rest)(found.value), wanted


class _GatherKernel:
    about = f"a Triton kernel of {GATHER_BLOCKS} thread blocks that reads pinned memory"

    def __init__(self, jobs: list[Job]) -> None:
        from forebay.bench.gather import gather  # noqa: PLC0415

        self._gather = gather
        self._stream = torch.cuda.Stream()
        self._size_bytes = jobs[0].fragment_bytes
        self._jobs = cycle(
            [
                (torch.from_numpy(job.sources).cuda(), torch.from_numpy(job.destinations).cuda())
                for job in jobs
            ]
        )

    def load(self) -> None:
        sources, destinations = next(self._jobs)
        with torch.cuda.stream(self._stream):
            self._gather(sources, destinations, self._size_bytes, GATHER_BLOCKS)
        self._stream.synchronize()
