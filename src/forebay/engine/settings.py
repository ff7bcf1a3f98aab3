"""What a user may set of the reference engine, and the sizes that follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from forebay.bounds import (
    RATE,
    SECONDS,
    SHARE,
    Bound,
    Like,
    Made,
    OneOf,
    OrNone,
    Real,
    Whole,
    settle,
)
from forebay.calibration.advice import best_window
from forebay.calibration.record import Calibration
from forebay.config import MIB, BatchSettings, CacheSettings, KVLayout, SaveMode
from forebay.core.modes import MODE, Mode, policy_of
from forebay.errors import SettingsError
from forebay.geometry import Geometry, default_window_bytes
from forebay.machine.memory import Memory
from forebay.machine.sizes import show_size

# Of the memory to be had. The driver's own tables of pinned pages and whoever asks next need some.
_MOST_PINNED = 0.95


class DType(StrEnum):
    """The numbers of weights and KV. AUTO: 32 bit on a CPU; on a GPU the model's own type if that
    has 16 bit, else bfloat16, or float16 where the GPU has no bfloat16.
    """

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes are of KV. None of `window_bytes` takes what the calibration advises, without one two
    blocks, at least 256 KiB, at most 8 MiB.

    An enumeration may be given by its text, like "b4". Raises SettingsError for what cannot work.
    """

    # Where weights and device pool lie: cpu, cuda or cuda:N; auto takes a GPU that can be used.
    device: str = "auto"
    dtype: DType = DType.AUTO
    device_tokens: int = 8192
    host_bytes: int = 1024 * MIB
    # None: by the model's block size in bytes, see `geometry.default_block_tokens`.
    block_tokens: int | None = None
    mode: Mode = Mode.LOOK_AHEAD
    save_mode: SaveMode = SaveMode.WRITE_THROUGH
    kv_layout: KVLayout = KVLayout.BLOCK_FIRST
    window_bytes: int | None = None
    # What `forebay tune` measured here; None measures a little of it at every start.
    calibration: Calibration | None = None
    # Slow each direction of the link down to this; 0 does not.
    link_bytes_per_s: float = 0.0
    batch: BatchSettings = field(default_factory=BatchSettings)
    min_load_tokens: int = 64
    min_save_tokens: int = 0
    prefetch_share: float = 0.5
    # Bytes of a block that a band of layers has at least, where a request starts by layer; 0: none
    # does, and each waits until its loads are there.
    band_bytes: int = MIB // 2
    # Compare a checksum of every block read from the cache with that taken when it was written.
    check_blocks: bool = False
    # Bound of every wait for the link; most are much shorter, by its measured rate.
    wait_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        settle(self, ENGINE_BOUNDS)

    def cache_settings(
        self,
        geometry: Geometry,
        memory: Memory,
        device_bytes: int | None = None,
    ) -> CacheSettings:
        """The cache's settings for a model of this geometry, in this machine's memory, its device
        pool in `device_bytes` of a GPU or (None) in that memory too.

        Raises SettingsError for sizes that do not go with the model, the memory or each other.
        """
        tokens, block_bytes = geometry.block_tokens, geometry.block_bytes
        device_slots = self.device_tokens // tokens
        if device_slots < 2:
            raise SettingsError(
                f"device_tokens {self.device_tokens} is less than two blocks of {tokens} tokens; "
                f"a device_tokens of {2 * tokens} or more would work{self._smaller_block}"
            )
        host_slots = self._host_slots(block_bytes)
        if device_bytes is not None:
            self._check_device(geometry, device_bytes)
            self._check_pinned(host_slots * block_bytes, memory)
        elif memory.most_bytes is not None:
            self._check_memory(geometry, host_slots, memory.most_bytes)
        window = self.window_bytes or min(
            self._calibrated_window() or default_window_bytes(block_bytes),
            max(1, host_slots) * block_bytes,
        )
        self._check_rate(window)
        return CacheSettings(
            block_tokens=tokens,
            block_bytes=block_bytes,
            device_slots=device_slots,
            host_slots=host_slots,
            mode=self.mode,
            save_mode=self.save_mode,
            window_bytes=window,
            min_load_tokens=self.min_load_tokens,
            min_save_tokens=self.min_save_tokens,
            prefetch_share=self.prefetch_share,
            band_bytes=self.band_bytes,
            waits_on_host=device_bytes is None,
        )

    def _calibrated_window(self) -> int | None:
        best = best_window(self.calibration.windows) if self.calibration is not None else None
        return None if best is None else best.window_bytes

    @property
    def _smaller_block(self) -> str:
        """Where the size of a block was set, what it could be."""
        if self.block_tokens is None or self.device_tokens < 2:
            return ""
        return f", or a block_tokens of {self.device_tokens // 2}"

    def _host_slots(self, block_bytes: int) -> int:
        if not policy_of(self.mode).host_tier or not self.host_bytes:
            return 0
        if self.host_bytes < block_bytes:
            raise SettingsError(
                f"host_bytes {self.host_bytes} is less than one block of {block_bytes} bytes; give "
                "several times the device pool, or 0 for no host tier"
            )
        return self.host_bytes // block_bytes

    def _check_memory(self, geometry: Geometry, host_slots: int, memory_bytes: int) -> None:
        """Both pools lie in this machine's memory, beside the weights."""
        host_bytes = host_slots * geometry.block_bytes
        device_bytes = self.device_tokens * geometry.token_bytes
        if host_bytes >= memory_bytes:
            raise SettingsError(
                f"a host pool of {show_size(self.host_bytes)} (host_bytes) leaves nothing of the "
                f"{show_size(memory_bytes)} of memory that there are; use a smaller pool, like "
                f"{show_size(memory_bytes // 2)}"
            )
        if device_bytes + host_bytes > memory_bytes:
            fits = (memory_bytes - host_bytes) // geometry.token_bytes
            raise SettingsError(
                f"device_tokens {self.device_tokens} take {show_size(device_bytes)}, more than the "
                f"{show_size(memory_bytes - host_bytes)} of memory that a host pool of "
                f"{show_size(host_bytes)} leaves; {fits} tokens would fill that, so use fewer"
            )

    def _check_device(self, geometry: Geometry, gpu_bytes: int) -> None:
        device_bytes = self.device_tokens * geometry.token_bytes
        if device_bytes > gpu_bytes:
            raise SettingsError(
                f"device_tokens {self.device_tokens} take {show_size(device_bytes)}, and the GPU "
                f"has {show_size(gpu_bytes)} left beside the model; "
                f"{int(0.9 * gpu_bytes) // geometry.token_bytes} tokens would leave it a tenth"
            )

    def _check_pinned(self, host_bytes: int, memory: Memory) -> None:
        """Pinned memory is taken whole, and the kernel cannot swap or reclaim it: with none left it
        ends this process, some time later and without a word.
        """
        room = memory.room_bytes
        if room is not None and host_bytes > _MOST_PINNED * room:
            raise SettingsError(
                f"a host pool of {show_size(host_bytes)} is pinned, and there are "
                f"{show_size(room)} to be had ({memory.bound}); a host_bytes of {int(0.8 * room)} "
                "would leave others a fifth of that, or raise the limit"
            )

    def _check_rate(self, window_bytes: int) -> None:
        if self.link_bytes_per_s and window_bytes > self.link_bytes_per_s * self.wait_timeout_s:
            raise SettingsError(
                f"at link_bytes_per_s {self.link_bytes_per_s:g} a window of {window_bytes} bytes "
                f"takes longer than wait_timeout_s {self.wait_timeout_s:g} and would count as "
                f"lost; {4 * window_bytes / self.wait_timeout_s:.0f} would work, or 0 for no limit"
            )


DEVICE = Like(r"auto|cpu|cuda(:\d{1,3})?", "auto, cpu, cuda or cuda:N")

ENGINE_BOUNDS: dict[str, Bound] = {
    "device": DEVICE,
    "dtype": OneOf(DType),
    "device_tokens": Whole(1),
    "host_bytes": Whole(0, note="0 means no host tier"),
    "block_tokens": OrNone(Whole(1), "takes 16 or 32, by the model"),
    "mode": MODE,
    "save_mode": OneOf(SaveMode),
    "kv_layout": OneOf(KVLayout),
    "window_bytes": OrNone(Whole(1), "takes that of the calibration, or two blocks"),
    "calibration": OrNone(Made(Calibration), "measures at start"),
    "link_bytes_per_s": Real(0.0, RATE.most, note="0 means no limit"),
    "batch": Made(BatchSettings),
    "min_load_tokens": Whole(0),
    "min_save_tokens": Whole(0, note="0 saves all"),
    "prefetch_share": SHARE,
    "band_bytes": Whole(0, note="0: no start by layer"),
    "check_blocks": Made(bool),
    "wait_timeout_s": SECONDS,
}
"""What each field of `EngineSettings` may be."""
