"""The OpenAPI description names what is there."""

from __future__ import annotations

import json

import raw


def test_the_description_resolves_and_names_every_endpoint(served):
    status, _, body = raw.ask(served.port, "/openapi.json", b"", method="GET")
    assert status == 200
    described = json.loads(body)
    assert {
        "/health",
        "/metrics",
        "/version",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/forebay/mode",
        "/v1/forebay/trace",
        "/v1/models",
        "/v1/models/{model}",
    } == set(described["paths"])
    schemas = described["components"]["schemas"]

    def references(value):
        if isinstance(value, dict):
            if "$ref" in value:
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    for reference in references(described):
        assert reference.removeprefix("#/components/schemas/") in schemas
    for operations in described["paths"].values():
        assert all("422" not in operation["responses"] for operation in operations.values())
