"""record: one log line for each request, written when its response has ended, whatever the outcome.

A line has numbers and names of our own, never text of a prompt or of an answer. What a client chose (method, path,
request id) is cut to a length and has a grammar without spaces and control characters, so that no request can forge a
line or a field of one.
"""

import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.types import Scope

from kvcellar.events import Delta, Done, Event

log = logging.getLogger("kvcellar.serve")

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_KEY = "kvcellar.record"  # in the scope of a request
_LONGEST = 200  # characters of a path


@dataclass(slots=True)
class Record:
    """What the log says about one request. Counts are None as long as they are not known."""

    request_id: str
    method: str = "-"  # of a request that could not be read
    route: str = "-"
    status: int = 0  # that was sent; 0: none yet
    outcome: str | None = None  # None: what the status says
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    _written: dict[int, int] = field(default_factory=dict[int, int])  # tokens by run
    _began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, scope: Scope) -> "Record":
        """The record of a request, made at the first call. A plain `x-request-id` of the client is its id."""
        record = scope.get(_KEY)
        if record is None:
            named = [value for name, value in scope["headers"] if name == b"x-request-id"]
            text = named[0].decode("latin-1") if len(named) == 1 else ""
            route = quote(scope["path"][:_LONGEST], safe="/:@", errors="replace")
            record = cls(text if _ID.fullmatch(text) else new_id(), scope["method"][:20], route)
            scope[_KEY] = record
        return record

    def asked(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompt_tokens = sum(map(len, prompts))

    def tally(self, batch: Sequence[tuple[int, Event]]) -> None:
        """Count tokens as they come: an answer that is cut off has its true number too."""
        for run, event in batch:
            match event:
                case Delta():
                    self._written[run] = self._written.get(run, 0) + len(event.token_ids)
                case Done():
                    self._written[run] = event.usage.completion_tokens
                    self.cached_tokens = (self.cached_tokens or 0) + event.usage.cached_tokens
                case _:
                    pass

    def refused(self, status: int, code: str | None) -> None:
        """The first refusal counts: what comes after it follows from it."""
        if self.outcome is None:
            self.outcome = code or _code_of(status)
            self.status = self.status or status

    def write(self) -> None:
        """The line. `request` of the log record has its fields by name."""
        if not log.isEnabledFor(logging.INFO):
            return
        fields = self._fields()
        told = " ".join(f"{name}={'-' if value is None else value}" for name, value in list(fields.items())[5:])
        line = (self.request_id, self.method, self.route, self.status, fields["outcome"], told)
        log.info("%s: %s %s %d %s %s", *line, extra={"request": fields})

    def _fields(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "outcome": self.outcome or ("ok" if 200 <= self.status < 400 else _code_of(self.status)),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": sum(self._written.values()) if self.prompt_tokens is not None else None,
            "ms": round(1e3 * (time.monotonic() - self._began), 1),
        }


def new_id() -> str:
    return f"req-{secrets.token_hex(8)}"


def _code_of(status: int) -> str:
    """The phrase of a status, as a code."""
    try:
        return HTTPStatus(status).phrase.lower().replace(" ", "_")
    except ValueError:
        return "client_gone" if status == 499 else "no_response"
