"""`forebay serve`: see `forebay.server`."""

from __future__ import annotations

import logging
from pathlib import Path

from forebay.cli.garbage import keep_out
from forebay.cli.told import tell_loading
from forebay.cli.values import parse_device, parse_dtype, parse_mode
from forebay.config import BatchSettings
from forebay.engine.calibrated import find_calibration
from forebay.engine.engine import Engine
from forebay.engine.placement import choose_device
from forebay.engine.settings import EngineSettings
from forebay.errors import SettingsError
from forebay.machine.sizes import parse_size
from forebay.server.run import Server, reserved
from forebay.server.settings import ApiKey, ServerSettings


def run_serve(
    model: str,
    mode: str,
    *,
    device: str,
    dtype: str,
    host: str,
    port: int,
    served_model_name: str,
    api_keys: list[str],
    api_key_file: Path | None,
    operator_key: str | None,
    device_tokens: int,
    host_bytes: str,
    block_tokens: int | None,
    window_bytes: str,
    calibration: str,
    min_load_tokens: int,
    min_save_tokens: int,
    max_running: int,
    max_waiting: int,
    step_tokens: int,
    drain_s: float,
    log_level: str,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises what `told` tells."""
    if log_level.upper() not in logging.getLevelNamesMapping():
        raise SettingsError(f"{log_level!r} is no log level: debug, info, warning or error")
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    keys = [ApiKey(key) for key in api_keys]
    if api_key_file is not None:
        keys += _read_keys(api_key_file)
    settings = ServerSettings(
        host=host,
        port=port,
        model_name=served_model_name,
        api_keys=tuple(keys),
        operator_key=operator_key,
        drain_s=drain_s,
    )
    batch = BatchSettings(max_running=max_running, max_waiting=max_waiting, step_tokens=step_tokens)
    place = choose_device(parse_device(device))
    engine_settings = EngineSettings(
        device=str(place),
        block_tokens=block_tokens,
        window_bytes=parse_size(window_bytes) if window_bytes else None,
        calibration=find_calibration(calibration, place),
        dtype=parse_dtype(dtype),
        device_tokens=device_tokens,
        host_bytes=parse_size(host_bytes),
        mode=parse_mode(mode),
        min_load_tokens=min_load_tokens,
        min_save_tokens=min_save_tokens,
        batch=batch,
    )
    with reserved(settings) as listener:
        tell_loading(model)
        engine = Engine(model, engine_settings)
        try:
            server = Server(engine, settings, listener)
        except SettingsError:
            engine.close()
            raise
        _serve(server, settings, engine.startup_line)


def _serve(server: Server, settings: ServerSettings, startup_line: str) -> None:
    print(startup_line)
    if not settings.api_keys and not settings.on_loopback:
        logging.getLogger("forebay.server").warning(
            "no API key is set and the network can reach this server: everybody may use it"
        )
    print(
        f"serving on {server.url}/v1, described at {server.url}/docs, watched at {server.url}/",
        flush=True,
    )
    keep_out()
    server.run()


def _read_keys(file: Path) -> list[ApiKey]:
    """One key a line, then, after a space, the salt of the tenant that it belongs to."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the keys in {file} cannot be read: {error}") from error
    keys: list[ApiKey] = []
    for line in lines:
        key, _, salt = line.strip().partition(" ")
        if key and not key.startswith("#"):
            keys.append(ApiKey(key, salt.strip() or None))
    if not keys:
        raise SettingsError(f"{file} has no key; write one a line, or leave the option out")
    return keys
