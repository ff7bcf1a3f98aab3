"""Measurements as values: bytes, seconds, tokens. A field that was not measured is None or empty,
and `missing` says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from forebay.bounds import RATE, SECONDS, Bound, Like, Made, OrNone, Real, Some, Whole, settle

_NAME = Like(r"[^\x00-\x1f]{1,400}", "a line of text")
_MANY = 1 << 40
_SIZE = Whole(1, _MANY)
_RATIO = Real(0.0, 1e6, included=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """What plain blocks of `block_bytes` reach in windows of `window_bytes`, with nothing beside.

    `both_bytes_per_s` is the sum of both ways at once.
    """

    block_bytes: int
    window_bytes: int
    load_bytes_per_s: float
    save_bytes_per_s: float
    both_bytes_per_s: float

    def __post_init__(self) -> None:
        settle(self, _LINK)


_LINK: dict[str, Bound] = {
    "block_bytes": _SIZE,
    "window_bytes": _SIZE,
    "load_bytes_per_s": RATE,
    "save_bytes_per_s": RATE,
    "both_bytes_per_s": RATE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentRate:
    """Loads whose device blocks lie scattered in `fragments` pieces of `fragment_bytes`."""

    fragment_bytes: int
    fragments: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        settle(self, _FRAGMENT)


_FRAGMENT: dict[str, Bound] = {"fragment_bytes": _SIZE, "fragments": _SIZE, "bytes_per_s": RATE}


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCost:
    """Loads in windows of `window_bytes`, and how long a small copy of somebody else waits for them
    meanwhile; None where nobody else has copies.
    """

    window_bytes: int
    bytes_per_s: float
    foreign_p50_s: float | None = None
    foreign_p99_s: float | None = None

    def __post_init__(self) -> None:
        settle(self, _WINDOW)


_WAIT = OrNone(SECONDS, "is not measured")
_WINDOW: dict[str, Bound] = {
    "window_bytes": _SIZE,
    "bytes_per_s": RATE,
    "foreign_p50_s": _WAIT,
    "foreign_p99_s": _WAIT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRates:
    """One model in one type of numbers, told by the `fingerprint` of its weights.

    `step_s` is a decode step of `requests` requests with `context_tokens` each, as the engine runs
    it; `inflation_load` and `inflation_both` are that step beside copies over the step alone.
    """

    name: str
    fingerprint: str
    dtype: str
    token_bytes: int
    prefill_tokens: int
    prefill_tokens_per_s: float
    requests: int
    context_tokens: int
    step_s: float
    inflation_load: float
    inflation_both: float

    def __post_init__(self) -> None:
        settle(self, _MODEL)

    @property
    def decode_tokens_per_s(self) -> float:
        """Of all `requests` together."""
        return self.requests / self.step_s


_MODEL: dict[str, Bound] = {
    "name": _NAME,
    "fingerprint": _NAME,
    "dtype": _NAME,
    "token_bytes": _SIZE,
    "prefill_tokens": _SIZE,
    "prefill_tokens_per_s": RATE,
    "requests": _SIZE,
    "context_tokens": _SIZE,
    "step_s": SECONDS,
    "inflation_load": _RATIO,
    "inflation_both": _RATIO,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What was not measured, and why."""

    what: str
    why: str

    def __post_init__(self) -> None:
        settle(self, {"what": _NAME, "why": _NAME})


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One machine with one device, and the models measured on it. `measured` is a time in UTC.

    `source` says where it was read from and is not written.
    """

    machine: str
    device: str
    measured: str
    version: str
    link: LinkRates
    fragments: tuple[FragmentRate, ...] = ()
    windows: tuple[WindowCost, ...] = ()
    models: tuple[ModelRates, ...] = ()
    missing: tuple[Missing, ...] = ()
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        settle(self, _CALIBRATION)

    def model(self, fingerprint: str) -> ModelRates | None:
        """The rates of the model with these weights."""
        return next((each for each in self.models if each.fingerprint == fingerprint), None)

    def with_models_of(self, earlier: Calibration) -> Calibration:
        """This one, with models that only `earlier` has."""
        mine = {each.fingerprint for each in self.models}
        kept = tuple(each for each in earlier.models if each.fingerprint not in mine)
        return replace(self, models=(*self.models, *kept))

    @property
    def told(self) -> str:
        """Which one it is, in a few words."""
        return f"calibration {self.source or self.machine} of {self.measured}"


_CALIBRATION: dict[str, Bound] = {
    "machine": _NAME,
    "device": _NAME,
    "measured": _NAME,
    "version": _NAME,
    "link": Made(LinkRates),
    "fragments": Some(FragmentRate),
    "windows": Some(WindowCost),
    "models": Some(ModelRates),
    "missing": Some(Missing),
    "source": Like(r"[^\x00]*", "text"),
}
