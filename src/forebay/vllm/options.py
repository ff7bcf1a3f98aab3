"""What `kv_connector_extra_config` may hold, and the settings that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from forebay.bounds import SHARE, Bound, Made, Real, Whole, settle
from forebay.config import CACHE_BOUNDS, LINK_BYTES_PER_S, MIB, CacheSettings, SaveMode
from forebay.core.modes import Mode
from forebay.errors import SettingsError
from forebay.machine.sizes import parse_size
from forebay.vllm.scheduler.control import VLLM_MODE
from forebay.vllm.scheduler.hints import HintBounds

# A pool of fewer windows than this would hold back short copies behind long ones.
_LEAST_WINDOWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The connector's options. Raises SettingsError for values that cannot work.

    Those that `CacheSettings` has too mean the same here.
    """

    # Host memory for KV of this engine. No default: it is the machine's owner who knows.
    host_bytes: int
    mode: Mode = Mode.LOOK_AHEAD
    # The off switch: a file that names the mode while vLLM runs. Empty: there is none.
    mode_file: str = ""
    save_mode: SaveMode = SaveMode.WRITE_THROUGH
    look_ahead_requests: int = 64
    prefetch_share: float = 0.5
    reserve_share: float = 0.05
    min_load_tokens: int = 64
    min_save_tokens: int = 0
    # Hints that are open at once, the share of the device's blocks that they may bring and keep
    # together, and how long after its eta one keeps them at most.
    hints: int = 64
    hint_share: float = 0.4
    hint_expiry_s: float = 60.0
    window_bytes: int = 8 * MIB
    # Slows the copies of the CPU to a link's rate, to see what a slow link does; 0 does not.
    copy_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        settle(self, _BOUNDS)

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> Options:
        """The options in vLLM's `kv_connector_extra_config`; sizes may be text ("64GiB")."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(str(name) for name in extra if name not in known)
        if unknown:
            raise SettingsError(
                f"kv_connector_extra_config has {', '.join(unknown)}, which Forebay does not "
                f"know; it knows {', '.join(known)}"
            )
        if "host_bytes" not in extra:
            raise SettingsError(
                "kv_connector_extra_config needs host_bytes, the host memory for KV, for example "
                '{"host_bytes": "64GiB"}'
            )
        given = {name: _sized(name, value) for name, value in extra.items()}
        return cls(**given)  # pyright: ignore[reportArgumentType]

    def host_slots(self, block_bytes: int) -> int:
        """Blocks that fit the host memory, each of so many bytes in all workers together. Raises
        SettingsError if not even one does.
        """
        slots = self.host_bytes // block_bytes
        if slots < 1:
            raise SettingsError(
                f"host_bytes is {self.host_bytes}, and one block of this model takes "
                f"{block_bytes} bytes: give several times the device's KV memory"
            )
        return slots

    def window(self, block_bytes: int, slots: int) -> int:
        """Bytes of one window over so many host slots: as set, or less where they are few."""
        most = slots * block_bytes // _LEAST_WINDOWS
        return max(block_bytes, min(self.window_bytes, most))

    def hint_bounds(self, device_slots: int) -> HintBounds:
        """What hints may take of `device_slots` blocks."""
        return HintBounds(self.hints, int(device_slots * self.hint_share), self.hint_expiry_s)

    def settings(
        self, *, block_tokens: int, block_bytes: int, device_slots: int, links: int = 1
    ) -> CacheSettings:
        """The settings of a cache over `device_slots` blocks of vLLM's pool, each of which moves
        over so many links, a part of its `block_bytes` over each.
        """
        slots = self.host_slots(block_bytes)
        return CacheSettings(
            block_tokens=block_tokens,
            block_bytes=block_bytes,
            device_slots=device_slots,
            host_slots=slots,
            mode=self.mode,
            save_mode=self.save_mode,
            window_bytes=self.window(block_bytes, slots),
            look_ahead_requests=self.look_ahead_requests,
            prefetch_share=self.prefetch_share,
            reserve_share=self.reserve_share,
            min_load_tokens=self.min_load_tokens,
            min_save_tokens=self.min_save_tokens,
            link_bytes_per_s=links * LINK_BYTES_PER_S,
            # A request is matched by vLLM itself, which finds what has landed.
            waits_on_host=True,
        )


_SIZES = ("host_bytes", "window_bytes")
_SHARED = [field.name for field in fields(Options) if field.name in CACHE_BOUNDS]
_BOUNDS: dict[str, Bound] = {
    **{name: CACHE_BOUNDS[name] for name in _SHARED},
    "mode": VLLM_MODE,
    "host_bytes": Whole(1),
    "mode_file": Made(str),
    "hints": Whole(0),
    "hint_share": SHARE,
    "hint_expiry_s": Real(0.0, 86_400.0),
    "copy_bytes_per_s": Real(0.0, 1e18, note="0 does not slow copies"),
}


def _sized(name: str, value: object) -> object:
    if name not in _SIZES or not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except SettingsError as error:
        raise SettingsError(f"{name}: {error}") from None
