"""The calibration for people: what was measured, what was not, and what to set."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from forebay.calibration.advice import Advice
from forebay.calibration.record import Calibration, ModelRates
from forebay.machine.sizes import show_size


def table(calibration: Calibration) -> Table:
    """All that was measured; of models the first, which is the one just measured."""
    shown = Table(
        title=f"{calibration.device}, {calibration.machine}",
        title_justify="left",
        show_header=False,
    )
    shown.add_column("")
    shown.add_column("")
    shown.add_column("", justify="right")
    for title, rows in {
        "link": _link(calibration),
        "loads, by window": _windows(calibration),
        "loads, by fragment": _fragments(calibration),
        calibration.models[0].name: _model(calibration.models[0]),
    }.items():
        for at, (name, value) in enumerate(rows):
            shown.add_row("" if at else title, name, value)
        shown.add_section()
    return shown


def lines(calibration: Calibration, advice: Sequence[Advice]) -> list[str]:
    """The advice, and what was not measured."""
    told = [f"{each.setting} {each.value or '(not known)'}: {each.why}" for each in advice]
    return told + [f"not measured: {each.what}: {each.why}" for each in calibration.missing]


def _link(calibration: Calibration) -> list[tuple[str, str]]:
    link = calibration.link
    return [
        (f"loads, blocks of {show_size(link.block_bytes)}", _rate(link.load_bytes_per_s)),
        ("saves", _rate(link.save_bytes_per_s)),
        ("both ways", _rate(link.both_bytes_per_s)),
    ]


def _windows(calibration: Calibration) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for each in calibration.windows:
        value = _rate(each.bytes_per_s)
        if each.foreign_p50_s is not None and each.foreign_p99_s is not None:
            p50, p99 = 1e6 * each.foreign_p50_s, 1e6 * each.foreign_p99_s
            value += f"; others wait {p50:,.0f} us (p50), {p99:,.0f} (p99)"
        rows.append((show_size(each.window_bytes), value))
    return rows


def _fragments(calibration: Calibration) -> list[tuple[str, str]]:
    return [
        (f"{show_size(each.fragment_bytes)} x {each.fragments:,}", _rate(each.bytes_per_s))
        for each in calibration.fragments
    ]


def _model(model: ModelRates) -> list[tuple[str, str]]:
    of = f"{model.requests} x {model.context_tokens:,} tokens"
    return [
        (
            f"prefill, {model.prefill_tokens:,} tokens",
            f"{model.prefill_tokens_per_s:,.0f} tokens/s",
        ),
        (f"decode, {of}", f"{model.decode_tokens_per_s:,.0f} tokens/s"),
        (f"step of them, {model.dtype}", f"{1e3 * model.step_s:,.2f} ms"),
        ("step beside loads", f"x {model.inflation_load:.3f}"),
        ("step beside loads and saves", f"x {model.inflation_both:.3f}"),
    ]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.2f} GB/s"
