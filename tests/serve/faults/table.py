"""All faults, in order, and the page that is written from them: `python -m tests.serve.faults.table`."""

from pathlib import Path

from tests.serve.every_api import APIS
from tests.serve.faults.case import EVERY_ROUTE, Fault
from tests.serve.faults.contents import CONTENTS
from tests.serve.faults.http import HTTP
from tests.serve.faults.parameters import PARAMETERS

FAULTS: tuple[Fault, ...] = (*HTTP, *PARAMETERS, *CONTENTS)
PAGE = Path(__file__).parents[3] / "docs" / "faults.md"
HEAD = """# Faults that a server survives

What clients send by mistake or to do harm, and what a server answers. Each row is sent to a server with a real engine,
on every route that has such a field, by `tests/serve/test_faults.py`; this page is written from the same table
(`make docs`). After each of them the next request is served, and the engine holds no memory for it.

An error has the format of the API that its route belongs to, and names the field. No error of a client is a 5xx. 503
has Retry-After, and means that the same request can be sent again.

| | what is sent | what is answered | to |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The text of docs/faults.md."""
    return HEAD + "".join(f"| {f.number} | {f.sent} | {f.answered} | {_where(f)} |\n" for f in FAULTS)


def _where(fault: Fault) -> str:
    """The routes that a fault is sent to."""
    if told := fault.to or fault.why_not:
        return told
    known = [api.path for api in APIS.values() if api.path in fault.paths]
    if len(known) == len(APIS):
        return "every route with a body" if len(fault.paths) < len(EVERY_ROUTE) / 2 else "every route"
    return ", ".join(f"`{path}`" for path in known) or "every route"


if __name__ == "__main__":
    PAGE.write_text(page())
