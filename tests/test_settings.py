"""Settings refuse what cannot be, by the name that the user gave, and say what would work."""

from __future__ import annotations

import warnings
from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from forebay.bounds import Bound, Like, Made, OneOf, OrNone, Real, Whole
from forebay.config import (
    BATCH_BOUNDS,
    CACHE_BOUNDS,
    BatchSettings,
    CacheSettings,
    SaveMode,
)
from forebay.core.modes import Mode, ModeOf, ModeSwitch
from forebay.engine.settings import ENGINE_BOUNDS, EngineSettings
from forebay.errors import SettingsError
from forebay.geometry import Geometry, LayerKV
from forebay.machine.cgroups import MemoryLimit
from forebay.machine.memory import Memory
from forebay.server.settings import SERVER_BOUNDS, ServerSettings

SIZES = {"block_tokens": 16, "block_bytes": 4096, "device_slots": 100, "host_slots": 5000}
CLASSES: list[tuple[type, dict[str, Any], dict[str, Bound]]] = [
    (CacheSettings, SIZES, CACHE_BOUNDS),
    (BatchSettings, {}, BATCH_BOUNDS),
    (EngineSettings, {}, ENGINE_BOUNDS),
    (ServerSettings, {}, SERVER_BOUNDS),
]
NO_NUMBERS: list[Any] = [True, "8", b"8", [8], 1j, object()]
NO_REALS: list[Any] = [float("nan"), float("inf"), float("-inf"), 10**400, -(10**400)]


def wrong_for(bound: Bound) -> list[Any]:
    """Values of every kind that `bound` must refuse."""
    match bound:
        case OrNone(inner, _):
            return [value for value in wrong_for(inner) if value is not None]
        case Whole(least, most):
            whole = [8.0, np.float64(8.0), Fraction(8), least - 1, -5, -(10**30), most + 1]
            return [None, *NO_NUMBERS, *NO_REALS, *whole, 10**5000]
        case Real(least, most, included):
            edge = np.nextafter(least, -1.0) if included else least
            return [None, *NO_NUMBERS, *NO_REALS, edge, -3, 2 * most]
        case OneOf() | ModeOf():
            choices = bound.choices if isinstance(bound, OneOf) else bound.usable
            return [None, "", "no such", next(iter(choices)).name, 0, True]
        case Like():
            return [None, *NO_NUMBERS, "", "gpu", "cuda:", "cuda:-1", "cuda:0x", "CPU", "cpu\n"]
        case Made(kind):
            values = [None, 0, 1, "", "yes", {}, 8.0, True]
            return [value for value in values if not isinstance(value, kind)]
    raise AssertionError(bound)


CASES = [
    pytest.param(settings, good, name, value, id=f"{settings.__name__}-{name}-{index}")
    for settings, good, bounds in CLASSES
    for name, bound in bounds.items()
    for index, value in enumerate(wrong_for(bound))
]


@pytest.mark.parametrize(("settings", "good", "name", "value"), CASES)
def test_what_a_setting_cannot_be(
    settings: type, good: dict[str, Any], name: str, value: Any
) -> None:
    with pytest.raises(SettingsError, match=rf"^{name} is .*, and must be ") as told:
        settings(**{**good, name: value})
    assert len(str(told.value)) < 300


@pytest.mark.parametrize(("settings", "good", "bounds"), CLASSES)
def test_every_field_has_its_bound(
    settings: type, good: dict[str, Any], bounds: dict[str, Bound]
) -> None:
    assert [field.name for field in fields(settings)] == list(bounds)
    settings(**good)


@pytest.mark.parametrize("text", ["b0", "b1", "b3", "b4"])
def test_an_enumeration_by_its_text(text: str) -> None:
    for settings in (EngineSettings(mode=text), CacheSettings(**SIZES, mode=text)):
        assert settings.mode is Mode(text)
    for save_mode in ("write_through", "on_evict"):
        for settings in (
            EngineSettings(save_mode=save_mode),
            CacheSettings(**SIZES, save_mode=save_mode),
        ):
            assert settings.save_mode is SaveMode(save_mode)
    switch = ModeSwitch(Mode.RECOMPUTE)
    switch.change(text, 10)
    assert switch.mode is Mode(text)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mode": "b9"}, r"one of b0 \(recompute\), b1 \(synchronous\), b3 .*, b4 \(look_ahead\)$"),
        ({"mode": "b5"}, r"not available: .*; use one of b0, b1, b3, b4"),
        ({"save_mode": "never"}, "one of write_through, on_evict"),
    ],
)
def test_what_an_enumeration_can_be_is_listed(wrong: dict[str, Any], said: str) -> None:
    for make in (EngineSettings, lambda **more: CacheSettings(**SIZES, **more)):
        with pytest.raises(SettingsError, match=said):
            make(**wrong)
    if "mode" in wrong:
        switch = ModeSwitch(Mode.RECOMPUTE)
        with pytest.raises(SettingsError, match=said):
            switch.change(wrong["mode"], 10)
        assert switch.mode is Mode.RECOMPUTE


def test_numbers_of_other_libraries_are_numbers() -> None:
    settings = EngineSettings(
        device_tokens=np.int64(4096), prefetch_share=np.float32(0.25), wait_timeout_s=3
    )
    assert type(settings.device_tokens) is int
    assert type(settings.prefetch_share) is float
    assert type(settings.wait_timeout_s) is float
    assert settings == EngineSettings(device_tokens=4096, prefetch_share=0.25, wait_timeout_s=3.0)


def test_slots_have_32_bit_names() -> None:
    with pytest.raises(SettingsError, match=r"device_slots .* and host_slots .* together"):
        CacheSettings(**{**SIZES, "device_slots": 2**30, "host_slots": 2**30})


# -- with a model ----------------------------------------------------------------------------------

GEOMETRY = Geometry((LayerKV(2, 16, 2, 16),) * 4, 4, 8)
GIB = 1 << 30


def sizes(memory_bytes: int | None = GIB, **settings: Any) -> CacheSettings:
    return EngineSettings(**settings).cache_settings(GEOMETRY, memory_of(memory_bytes))


def memory_of(size_bytes: int | None, room_bytes: int | None = None) -> Memory:
    return Memory(
        total_bytes=size_bytes,
        available_bytes=room_bytes,
        swap_bytes=0,
        commit_room_bytes=None,
        limits=[],
    )


def test_a_block_is_what_the_cases_below_say() -> None:
    assert (GEOMETRY.token_bytes, GEOMETRY.block_bytes) == (1024, 8192)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device_tokens": 15}, r"device_tokens 15 .* a device_tokens of 16 or more would work$"),
        ({"device_tokens": 15, "block_tokens": 8}, "or a block_tokens of 7$"),
        ({"host_bytes": 8191}, "host_bytes 8191 is less than one block of 8192 bytes"),
        ({"host_bytes": GIB + 1}, r"^a host pool of 1 GiB \(host_bytes\) leaves .* like 512 MiB"),
        ({"device_tokens": GIB}, r"^device_tokens 1073741824 take 1 TiB, .* 524288 tokens"),
        ({"window_bytes": GIB}, "a window_bytes of 134217728 would work"),
        ({"link_bytes_per_s": 1}, "^at link_bytes_per_s 1 .* 34953 would work"),
        ({"prefetch_share": 0.96}, r"^prefetch_share 0\.96 .* of 0\.95 would work"),
    ],
    ids=str,
)
def test_what_does_not_go_together(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        sizes(**{"host_bytes": GIB // 2, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"device_tokens": 16},
        {"host_bytes": GIB // 2, "device_tokens": 524288},
        {"window_bytes": 134217728},
        {"link_bytes_per_s": 34953},
        {"prefetch_share": 0.95},
        {"host_bytes": 0},
        {"host_bytes": 100, "mode": "b0"},
    ],
    ids=str,
)
def test_what_was_said_to_work_works(settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sizes(**{"host_bytes": GIB // 2, **settings})


def test_a_memory_that_is_not_known_bounds_nothing() -> None:
    assert sizes(None, device_tokens=GIB, mode="b0").device_slots == GIB // 8


def test_one_warning_for_a_small_host_tier() -> None:
    with pytest.warns(UserWarning, match="smaller than the device pool") as warned:
        sizes(host_bytes=8192)
    assert len(warned) == 1


# -- on a GPU --------------------------------------------------------------------------------------


def test_a_pinned_pool_has_to_fit_what_is_free_and_says_what_bounds_it() -> None:
    settings = EngineSettings(host_bytes=GIB // 2, device_tokens=16)
    with pytest.raises(SettingsError, match=r"512 MiB is pinned, .* 256 MiB .*of 1 GiB in the"):
        settings.cache_settings(GEOMETRY, memory_of(GIB, GIB // 4), 1 << 30)
    group = Memory(GIB, GIB, 0, None, [MemoryLimit("/sys/fs/cgroup/a", GIB // 4, GIB // 8, 0)])
    with pytest.raises(SettingsError, match=r"128 MiB .*control group /sys/fs/cgroup/a: limit"):
        settings.cache_settings(GEOMETRY, group, 1 << 30)
    said = int(0.8 * GIB / 8)
    EngineSettings(host_bytes=said, device_tokens=16).cache_settings(GEOMETRY, group, 1 << 30)
    whole = EngineSettings(host_bytes=GIB // 8, device_tokens=16)
    with pytest.raises(SettingsError, match="128 MiB is pinned"):
        whole.cache_settings(GEOMETRY, group, 1 << 30)
    # The same pool is not pinned where there is no GPU: pages come as they are written.
    settings.cache_settings(GEOMETRY, memory_of(GIB, GIB // 4))


def test_a_device_pool_has_to_fit_the_gpu_and_not_host_memory() -> None:
    settings = EngineSettings(host_bytes=GIB // 2, device_tokens=1 << 20)
    with pytest.warns(UserWarning, match="smaller than the device pool"):
        sizes = settings.cache_settings(GEOMETRY, memory_of(GIB, GIB), 1 << 30)
    assert sizes.device_slots * sizes.block_bytes == 1 << 30
    assert not sizes.waits_on_host
    with pytest.raises(SettingsError, match=r"the GPU has 512 MiB left .*; 471859 tokens"):
        settings.cache_settings(GEOMETRY, memory_of(GIB, GIB), 1 << 29)
