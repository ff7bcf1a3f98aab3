"""Where an engine's KV lies: a device pool, host memory under it, and a mover between them."""

from __future__ import annotations

import torch

from forebay.config import CacheSettings
from forebay.engine.models import LoadedModel
from forebay.engine.pool import KVPool
from forebay.engine.settings import EngineSettings
from forebay.engine.tracing import DeviceTrace, HostTrace
from forebay.errors import SettingsError
from forebay.geometry import Geometry
from forebay.transfer.host import HostMemory
from forebay.transfer.native import NativeMover
from forebay.transfer.pool import Pool


def device_free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a GPU; None for the CPU, whose memory is the machine's."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


class EngineMemory:
    """The pools of one engine on the device of its model, and their mover.

    On a CUDA device the host pool is pinned in the background; :meth:`host_ready` says how far.
    `timed` takes the times of steps and copies there, at a cost for each.
    Raises SettingsError for what cannot be had. Close it when no step is under way.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        geometry: Geometry,
        sizes: CacheSettings,
        settings: EngineSettings,
        *,
        timed: bool = False,
    ) -> None:
        self.device = torch.device(loaded.model.device)
        if self.device.type not in ("cpu", "cuda"):
            raise SettingsError(
                f"the model lies on {self.device}, which is not supported: load it on cpu or cuda"
            )
        on_gpu = self.device.type == "cuda"
        if on_gpu and settings.link_bytes_per_s:
            raise SettingsError(
                "link_bytes_per_s slows copies of the CPU only: leave it at 0 on a GPU"
            )
        self.pool = KVPool(
            geometry,
            sizes.device_slots,
            layout=settings.kv_layout,
            dtype=loaded.kv_dtype,
            device=self.device,
        )
        index = self.device.index or 0
        self._host = HostMemory(
            max(1, sizes.host_slots), geometry.block_bytes, index if on_gpu else None
        )
        self.mover = NativeMover(
            Pool.of(self.pool.parts),
            self._host.pool,
            backend=self.device.type,
            window_bytes=sizes.window_bytes,
            link_bytes_per_s=settings.link_bytes_per_s,
            window_timeout_s=settings.wait_timeout_s,
            device_index=index,
            timing=on_gpu and timed,
        )
        self.trace = DeviceTrace(self.mover, self.device) if on_gpu and timed else HostTrace()

    @property
    def stream(self) -> int:
        """The stream that steps are launched on, as a driver's handle; 0 is this thread."""
        if self.device.type == "cpu":
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    @property
    def runs_behind(self) -> bool:
        """Whether a launch returns before the step has run."""
        return self.device.type == "cuda"

    def host_ready(self) -> int:
        """Host slots, from the first, that can be used by now. Logs it once if no more will be."""
        return self._host.ready_slots()

    def close(self) -> None:
        """Wait for the device and give the host memory back. The mover is closed before.

        Raises what a device that broke raises; the memory is given back all the same.
        """
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        finally:
            self._host.close()
