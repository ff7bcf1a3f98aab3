"""Keys, tenants that never meet, and what only operators may see and do."""

from __future__ import annotations

import json

import openai
import pytest
import raw
from prometheus_client.parser import text_string_to_metric_families
from server_rig import serving, until

from forebay.core.modes import Mode
from forebay.engine.settings import EngineSettings
from forebay.errors import SettingsError
from forebay.server.access import Tenant
from forebay.server.settings import ApiKey, ServerSettings

PROMPT = "A prompt that two tenants have in common, word for word. " * 4
KEYS = (ApiKey("red", salt="red"), ApiKey("blue", salt="blue"), ApiKey("free"))
OPERATOR = "authorization: Bearer boss\r\n"


@pytest.fixture(scope="module")
def guarded(tiny):
    settings = ServerSettings(port=0, api_keys=KEYS, operator_key="boss", model_name="mine")
    engine = EngineSettings(device_tokens=4096, host_bytes=1 << 24, block_tokens=16)
    with serving(tiny, settings, engine) as served:
        yield served


def cached(served, key, salt=None, **extra):
    body = {"cache_salt": salt, **extra} if salt is not None else extra
    answer = served.client(key).completions.create(
        model="mine", prompt=PROMPT, max_tokens=2, extra_body=body
    )
    return answer.usage.prompt_tokens_details.cached_tokens


def test_tenants_never_share_a_block_and_each_finds_its_own(guarded):
    assert cached(guarded, "red") == 0
    assert cached(guarded, "blue") == 0
    assert cached(guarded, "free") == 0
    assert cached(guarded, "red") > 0
    assert cached(guarded, "blue") > 0
    # Naming another tenant's salt does not lead into its namespace.
    assert cached(guarded, "free", "red") == 0
    assert cached(guarded, "blue", "red") == 0
    assert cached(guarded, "red", "red") == 0
    assert cached(guarded, "red", "red") > 0


def test_salts_of_different_tenants_never_agree():
    salts = [
        Tenant(bound).salted(given)
        for bound in (None, "", "a", 'a", "b', "null")
        for given in (None, "a", "b", '"], "')
    ]
    assert len(set(salts)) == len(salts)


def test_no_cache_and_no_save(guarded):
    assert cached(guarded, "free", "once", no_save=True) == 0
    assert cached(guarded, "free", "once") == 0
    assert cached(guarded, "free", "once", no_cache=True) == 0
    assert cached(guarded, "free", "once") > 0


@pytest.mark.parametrize("key", ["wrong", "re", "redd", "boss", "none"])
def test_a_wrong_key_is_refused_before_the_body_is_read(guarded, key):
    with pytest.raises(openai.AuthenticationError) as caught:
        guarded.client(key).models.list()
    assert caught.value.code == "invalid_api_key"
    status, headers, _ = raw.ask(
        guarded.port, "/v1/completions", b"no json", headers=f"authorization: Bearer {key}\r\n"
    )
    assert (status, headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(
    "headers",
    [
        "",
        "authorization: red\r\n",
        "authorization: Basic red\r\n",
        "authorization: Bearer red\r\nauthorization: Bearer red\r\n",
        "authorization: Bearer \r\n",
    ],
)
def test_other_forms_of_keys_are_refused(guarded, headers):
    assert raw.ask(guarded.port, "/v1/models", b"", method="GET", headers=headers)[0] == 401


def test_health_and_version_need_no_key(guarded):
    assert raw.ask(guarded.port, "/health", b"", method="GET")[0] == 200
    status, _, body = raw.ask(guarded.port, "/version", b"", method="GET")
    assert status == 200
    assert json.loads(body)["version"]


def test_metrics_are_for_operators_and_name_no_tenant(guarded):
    tenant = "authorization: Bearer red\r\n"
    assert raw.ask(guarded.port, "/metrics", b"", method="GET", headers=tenant)[0] == 401
    status, _, body = raw.ask(guarded.port, "/metrics", b"", method="GET", headers=OPERATOR)
    assert status == 200
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    assert samples[("vllm:prefix_cache_hits_total", "mine")] > 0
    assert samples[("vllm:request_success_total", "length", "mine")] > 0
    assert samples[("vllm:num_requests_running", "mine")] == 0
    outcomes = ("used", "late", "wasted", "cancelled", "refused", "failed")
    assert all(("forebay:prefetch_bytes_total", *sorted((o, "mine"))) in samples for o in outcomes)
    assert samples[("forebay:blocks_total", "device", "mine")] > 0
    values = {value for _, *of_labels in samples for value in of_labels}
    assert not any("red" in value or "blue" in value for value in values)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("[::1", 403),
    ],
)
def test_a_page_from_elsewhere_is_no_operator(served, host, status):
    request = f"GET /metrics HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    assert raw.exchange(served.port, request.encode())[0] == status


def test_the_mode_is_for_operators_and_switches_the_cache_off_and_on(serve):
    served = serve(ServerSettings(port=0, operator_key="boss"))

    def switch(mode, headers=OPERATOR):
        body = {"mode": mode}
        return raw.ask(served.port, "/v1/forebay/mode", body, headers=headers)[0]

    assert switch("b0", headers="") == 401
    assert switch("b0") == 200
    assert served.server.front.stats.mode is Mode.RECOMPUTE
    assert switch("b2") == 400
    assert switch("x") == 400
    saved = served.server.front.stats.cache.saved_bytes
    client = served.client()
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2)
    served.until_idle()
    assert served.server.front.stats.cache.saved_bytes == saved
    assert switch("b4") == 200
    client.completions.create(model="tiny", prompt=PROMPT + PROMPT, max_tokens=2)
    served.until_idle()
    until(lambda: served.server.front.stats.cache.saved_bytes > saved)
    _, _, body = raw.ask(served.port, "/v1/forebay/mode", b"", method="GET", headers=OPERATOR)
    assert json.loads(body) == {"mode": "b4"}


def test_the_net_needs_an_operator_key_where_loopback_needs_none(served, serve):
    assert raw.ask(served.port, "/metrics", b"", method="GET")[0] == 200
    assert ServerSettings(host="localhost").on_loopback
    assert ServerSettings(host="::1").on_loopback
    assert not ServerSettings(host="10.0.0.1").on_loopback
    open_to_all = serve(ServerSettings(port=0, host="0.0.0.0"))
    assert raw.ask(open_to_all.port, "/metrics", b"", method="GET")[0] == 403


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(SettingsError):
        ServerSettings(api_keys=(ApiKey("a"), ApiKey("a", salt="b")))
    with pytest.raises(SettingsError):
        ApiKey("with space")
    assert "secret" not in repr(ServerSettings(api_keys=(ApiKey("secret"),)))
