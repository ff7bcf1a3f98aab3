"""The live page in a browser: what it shows, asks for and does, and where it may not reach."""

from __future__ import annotations

import json

import pytest
from page_rig import browser, load
from server_rig import serving, until

from forebay.config import BatchSettings
from forebay.core.modes import Mode
from forebay.engine.settings import EngineSettings
from forebay.server.settings import ApiKey, ServerSettings

ENGINE = EngineSettings(
    device_tokens=1024,
    host_bytes=1 << 22,
    block_tokens=16,
    batch=BatchSettings(max_running=2, step_tokens=64),
)
WAIT_S = 40.0


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chrome")) as driver:
        yield driver


@pytest.fixture(scope="module")
def open_server(tiny, chrome):
    with serving(tiny, ServerSettings(port=0), ENGINE) as served:
        yield served


@pytest.fixture
def page(chrome, open_server):
    """The page of a server without keys, with a load on it."""
    with load(open_server):
        yield opened(chrome, open_server)


def opened(chrome, served, path="/"):
    for kind in ("browser", "performance"):
        chrome.get_log(kind)
    chrome.get(served.url + path)
    chrome.execute_script("sessionStorage.clear()")
    chrome.get(served.url + path)
    return chrome


def text(chrome, css):
    return chrome.execute_script(
        "return document.querySelector(arguments[0])?.textContent ?? ''", css
    )


def shown(chrome, css):
    return chrome.execute_script(
        "const e = document.querySelector(arguments[0]); return !!e && e.offsetParent !== null", css
    )


def wait(holds):
    until(holds, WAIT_S)


def choose(chrome, mode):
    chrome.execute_script(
        "const e = document.getElementById('mode'); e.value = arguments[0];"
        "e.dispatchEvent(new Event('change'))",
        mode,
    )


def errors(chrome):
    return [entry["message"] for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"]


def requested(chrome):
    messages = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    urls = [params["request"]["url"] for params in sent]
    # The browser's own start page asks for parts of the browser and for pictures in its text.
    return [
        url for url in urls if not url.startswith(("chrome://", "chrome-untrusted://", "data:"))
    ]


def test_it_shows_what_runs_and_asks_no_other_host(page, open_server):
    wait(lambda: text(page, "#link") == "live")
    wait(
        lambda: page.execute_script("return document.querySelectorAll('#requests tbody tr').length")
    )
    seen = set()
    wait(lambda: seen.add(text(page, "#requests tbody")) or len(seen) > 3)
    wait(lambda: text(page, "#steps")[:1] in set("123456789"))
    wait(lambda: "leased" in text(page, "#device-legend") and "saved" in text(page, "#host-legend"))
    wait(
        lambda: (
            page.execute_script("return document.querySelectorAll('#tree g.node rect').length") > 2
        )
    )
    outcomes = ("used", "late", "wasted", "cancelled", "refused", "failed")
    assert all(outcome in text(page, "#prefetch") for outcome in outcomes)
    assert text(page, "#lanes-summary").startswith("Of the last minute: steps")
    assert "penstock" not in page.page_source
    assert "chat-" in text(page, "#requests")
    assert errors(page) == []
    assert {url for url in requested(page) if not url.startswith(open_server.url)} == set()


def test_both_charts_are_drawn(page):
    def painted(canvas):
        return page.execute_script(
            "const c = document.getElementById(arguments[0]);"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "const seen = new Set(); for (let i = 0; i < d.length; i += 4)"
            "  if (d[i + 3] === 255) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);"
            "return seen.size",
            canvas,
        )

    wait(lambda: painted("lanes") > 3)
    wait(lambda: painted("rates") > 2)


def test_a_node_of_the_tree_tells_where_it_lies(page):
    wait(lambda: page.execute_script("return document.querySelectorAll('#tree g.node').length") > 2)
    page.execute_script(
        "document.querySelector('#tree g.node').dispatchEvent("
        "new MouseEvent('click', {bubbles: true}))"
    )
    assert "blocks" in text(page, "#tree-node")
    page.execute_script(
        "document.activeElement.dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}))"
    )
    chosen = page.execute_script("return Number(document.activeElement.dataset.node)")
    assert chosen > 0, "the arrow keys lead from node to node"


@pytest.mark.parametrize("width", [320, 360, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(page, width, scheme):
    metrics = {"width": width, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    try:
        wait(lambda: shown(page, "#requests tbody tr"))
        wide = page.execute_script(
            "return [...document.querySelectorAll('body *')]"
            ".filter(e => !e.closest('.rows'))"
            ".filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)"
            ".map(e => e.tagName + '#' + e.id)"
        )
        assert wide == []
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        ground, ink = page.execute_script(
            "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        )
        assert (luminance(ground) > luminance(ink)) == (scheme == "light")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(page, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    try:
        wait(lambda: shown(page, "#requests tbody tr"))
        pairs = page.execute_script(
            "const ground = e => { for (; e; e = e.parentElement) {"
            "  const c = getComputedStyle(e).backgroundColor;"
            "  if (c !== 'rgba(0, 0, 0, 0)') return c; } return 'rgb(255, 255, 255)'; };"
            "return [...document.querySelectorAll('h1,h2,h3,p,dt,dd,th,td,li,button,label,select')]"
            ".filter(e => e.offsetParent && e.textContent.trim())"
            ".map(e => [e.tagName, getComputedStyle(e).color, ground(e)])"
        )
        weak = {tuple(pair) for pair in pairs if contrast(pair[1], pair[2]) < 4.5}
        assert pairs
        assert not weak
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def channels(colour):
    return [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]


def luminance(colour):
    linear = [
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_everything_to_use_has_a_name(page):
    wait(lambda: shown(page, "#requests tbody tr"))
    unnamed = page.execute_script(
        "return [...document.querySelectorAll('button,select,input,canvas,svg,[role=img]')]"
        ".filter(e => e.offsetParent || e.tagName === 'svg')"
        ".filter(e => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label')"
        "  || e.getAttribute('aria-labelledby'))).map(e => e.id || e.tagName)"
    )
    assert unnamed == []


def test_the_button_downloads_the_last_minute_as_a_chrome_trace(page, tmp_path):
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.execute_cdp_cmd("Page.setDownloadBehavior", behaviour)
    wait(lambda: text(page, "#steps")[:1] in set("123456789"))
    page.find_element("id", "trace").click()
    wait(lambda: list(tmp_path.glob("forebay-*.json")))
    events = json.loads(next(tmp_path.glob("forebay-*.json")).read_text())["traceEvents"]
    assert {"compute", "requests"} <= {
        event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert any(event["ph"] == "X" and event["cat"] == "step" for event in events)


def test_the_mode_is_switched_and_shown(page, open_server):
    wait(lambda: page.execute_script("return document.getElementById('mode').value") == "b4")
    choose(page, "b3")
    wait(lambda: open_server.server.front.stats.mode is Mode.ASYNCHRONOUS)
    choose(page, "b4")
    wait(lambda: open_server.server.front.stats.mode is Mode.LOOK_AHEAD)
    wait(lambda: page.execute_script("return document.getElementById('mode').value") == "b4")


def test_names_from_outside_are_text_and_nothing_else(tiny, chrome):
    name = "<img src=x onerror=window.broken=1><script>window.broken=1</script>"
    with serving(tiny, ServerSettings(port=0, model_name=name), ENGINE) as served:
        with load(served, session="<svg/onload=window.broken=1>"):
            opened(chrome, served)
            wait(lambda: name in text(chrome, "#model"))
            wait(lambda: "<svg/onload" in text(chrome, "#requests"))
            assert chrome.execute_script("return window.broken ?? null") is None
            assert chrome.execute_script("return document.querySelectorAll('main img').length") == 0
        assert errors(chrome) == []


@pytest.fixture
def guarded(tiny, chrome):
    keys = (ApiKey("red-key", salt="red"), ApiKey("blue-key", salt="blue"), ApiKey("free-key"))
    settings = ServerSettings(port=0, api_keys=keys, operator_key="boss", model_name="mine")
    with serving(tiny, settings, ENGINE) as served:
        yield served


def give(chrome, key):
    chrome.find_element("id", "key").send_keys(key)
    chrome.find_element("css selector", "#ask button").click()


def test_it_asks_for_a_key_and_shows_a_tenant_its_own_part_only(chrome, guarded):
    with (
        load(guarded, users=2, key="red-key", session="red"),
        load(guarded, users=2, key="blue-key", session="blue"),
    ):
        opened(chrome, guarded)
        wait(lambda: shown(chrome, "#ask"))
        give(chrome, "nobody's")
        wait(lambda: shown(chrome, "#ask") and "valid key" in text(chrome, "#why"))
        give(chrome, "free-key")
        wait(lambda: "bound to no tenant" in text(chrome, "#why"))
        give(chrome, "red-key")
        wait(lambda: "red-" in text(chrome, "#requests"))
        wait(lambda: shown(chrome, "#tree") and "blocks" in text(chrome, "#tree-summary"))
        assert "blue" not in chrome.page_source
        for hidden in ("#lanes", "#rates", "#device-use", "#mode", "#trace", "#prefetch"):
            assert not shown(chrome, hidden), hidden
        chrome.refresh()
        wait(lambda: "red-" in text(chrome, "#requests"))
        assert chrome.execute_script("return localStorage.length") == 0
        chrome.find_element("id", "forget").click()
        wait(lambda: shown(chrome, "#ask"))
        give(chrome, "boss")
        wait(
            lambda: (
                {"red-", "blue-"}
                <= {w for w in ("red-", "blue-") if w in text(chrome, "#requests")}
            )
        )
        assert shown(chrome, "#lanes")


def test_it_says_that_the_server_is_gone_and_comes_back(tiny, chrome):
    with serving(tiny, ServerSettings(port=0), ENGINE) as served:
        opened(chrome, served)
        wait(lambda: text(chrome, "#link") == "live")
        port = served.port
    wait(lambda: "trying again" in text(chrome, "#link"))
    with serving(tiny, ServerSettings(port=port), ENGINE):
        wait(lambda: text(chrome, "#link") == "live")
