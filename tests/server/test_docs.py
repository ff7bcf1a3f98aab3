"""The page at /docs: all of it from this server, also to a browser's eye."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import raw
from server_rig import until


def get(served, path):
    return raw.ask(served.port, path, b"", method="GET")


def test_the_page_and_what_it_names_come_from_here(served):
    status, headers, page = get(served, "/docs")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert b"//" not in page
    named = re.findall(rb'(?:src|href)="([^"]+)"', page)
    assert b"docs/swagger-ui-bundle.js" in named
    for name in named:
        if not name.startswith(b"data:"):
            status, headers, body = get(served, f"/{name.decode()}")
            assert status == 200
            assert body
            assert "content-security-policy" in headers
    assert b'"openapi.json"' in get(served, "/docs/start.js")[2]
    assert get(served, "/redoc")[0] == get(served, "/docs/../favicon.png")[0] == 404


def test_a_browser_shows_every_endpoint_and_asks_nobody_else(served):
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        chrome.get(f"{served.url}/docs")
        described = json.loads(get(served, "/openapi.json")[2])["paths"]
        count = sum(len(operations) for operations in described.values())
        until(lambda: len(chrome.find_elements("css selector", ".opblock")) == count, 30)
        complaints = chrome.get_log("browser")
        asked = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    finally:
        chrome.quit()
    assert complaints == []
    urls = {
        entry["params"]["request"]["url"]
        for entry in asked
        if entry["method"] == "Network.requestWillBeSent"
    }
    assert all(url.startswith((served.url, "data:")) for url in urls), urls
