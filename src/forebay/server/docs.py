"""The page at /docs: Swagger UI over our description, from this server alone.

A browser fetches nothing from elsewhere, and runs no script but these files.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

# The package keeps Swagger UI's files up to date; of it nothing else is used.
_FILES = Path(str(resources.files("fastapi_offline"))) / "static"

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Forebay: its API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="api"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""

_START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis, SwaggerUIBundle.SwaggerUIStandalonePreset],
});
"""

_HEADERS = {
    # Swagger UI sets styles on elements.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def docs_routes() -> APIRouter:
    """The page, its two scripts and its styles."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def page() -> Response:
        return Response(_PAGE, media_type="text/html", headers=_HEADERS)

    @router.get("/docs/start.js")
    async def start() -> Response:
        return Response(_START, media_type="text/javascript", headers=_HEADERS)

    @router.get("/docs/swagger-ui-bundle.js")
    async def script() -> Response:
        file = _FILES / "swagger-ui-bundle.js"
        return FileResponse(file, media_type="text/javascript", headers=_HEADERS)

    @router.get("/docs/swagger-ui.css")
    async def styles() -> Response:
        return FileResponse(_FILES / "swagger-ui.css", media_type="text/css", headers=_HEADERS)

    return router
