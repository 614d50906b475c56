"""page: the files of the page, from a table of names; everything else is not found.

Nothing is loaded from elsewhere. Files of others are as their packages have them (`static/NOTICE` has their versions,
licences and digests).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

PAGE, ICON = "/inspector", "/favicon.ico"  # paths
SCRIPTS = ("app.js", "data.js", "replicas.js", "requests.js", "tree.js", "memory.js", "steps.js")
NAMES = ("index.html", *SCRIPTS, "page.css", "icon.svg")
VENDOR = ("vendor/preact-htm.js", "vendor/d3-hierarchy.js", "vendor/uplot.js", "vendor/uplot.css")
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}  # by suffix
FILES: Mapping[str, str] = {  # media types by name
    name: TYPES.get(name.rpartition(".")[2], "text/plain") for name in (*NAMES, "NOTICE", *VENDOR)
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """304 for a browser that has it."""
        headers = {**HEADERS, "etag": self.etag, "cache-control": "no-cache"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def read_files() -> Mapping[str, File]:
    """All files of the page, by name."""
    found: dict[str, File] = {}
    for name, media_type in FILES.items():
        content = files("kvcellar.inspector").joinpath("static", name).read_bytes()
        found[name] = File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
