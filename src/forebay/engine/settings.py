"""What a user may set of the reference engine, and the sizes that follow."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.config import MIB, BatchSettings, CacheSettings, SaveMode
from forebay.core.modes import Mode, policy_of
from forebay.errors import SettingsError
from forebay.geometry import Geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes are of KV. None of `window_bytes` takes two blocks, at least 256 KiB, at most 8 MiB."""

    device_tokens: int = 8192
    host_bytes: int = 1024 * MIB
    # None: by the model's block size in bytes, see `geometry.default_block_tokens`.
    block_tokens: int | None = None
    mode: Mode = Mode.LOOK_AHEAD
    save_mode: SaveMode = SaveMode.WRITE_THROUGH
    window_bytes: int | None = None
    # Slow each direction of the link down to this; 0 does not.
    link_bytes_per_s: float = 0.0
    batch: BatchSettings = field(default_factory=BatchSettings)
    min_load_tokens: int = 64
    prefetch_share: float = 0.5
    # Compare a checksum of every block read from the cache with that taken when it was written.
    check_blocks: bool = False
    # Bound of every wait for the link.
    wait_timeout_s: float = 30.0

    def cache_settings(self, geometry: Geometry, link_bytes_per_s: float) -> CacheSettings:
        """The cache's settings for a model of this geometry, on a link of this measured rate."""
        block_bytes = geometry.block_bytes
        device_slots = self.device_tokens // geometry.block_tokens
        if device_slots < 2:
            raise SettingsError(
                f"device_tokens {self.device_tokens} is less than two blocks of "
                f"{geometry.block_tokens} tokens; raise it"
            )
        host_slots = self.host_bytes // block_bytes if policy_of(self.mode).host_tier else 0
        window = self.window_bytes
        if window is None:
            window = min(8 * MIB, max(MIB // 4, 2 * block_bytes))
            window = min(window, max(1, host_slots) * block_bytes)
        return CacheSettings(
            block_tokens=geometry.block_tokens,
            block_bytes=block_bytes,
            device_slots=device_slots,
            host_slots=host_slots,
            mode=self.mode,
            save_mode=self.save_mode,
            window_bytes=window,
            min_load_tokens=self.min_load_tokens,
            prefetch_share=self.prefetch_share,
            link_bytes_per_s=link_bytes_per_s,
        )
