"""why: the subcommand that prints what a request read from memory, and why it was not more; and what its drafts did."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from kvcellar.cli.client import AdminClient, server_options
from kvcellar.cli.options import Command
from kvcellar.cli.printing import recall_lines, share


@click.command("why", cls=Command, epilog="Example: kvcellar why chatcmpl-5f0c2b --admin-key-file admin.txt")
@click.argument("request", required=False)
@click.option("--limit", default=20, show_default=True, help="Without REQUEST: how many of the last requests to list.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@server_options
def command(request: str | None, limit: int, as_json: bool, url: str, admin_key_file: Path | None) -> None:
    """Print what the prompt of REQUEST read from memory, and why it was not more; and what its drafts did.

    REQUEST is the id of a response, or its header x-request-id; a running server has the last 1000, in its memory only.
    Without REQUEST, list the last ones.
    """
    client = AdminClient(url, admin_key_file, advice="Records of requests are in its memory only, and end with it.")
    if request is None:
        found = client.get(f"/admin/requests?limit={limit}")
        lines = map(_listed, found["requests"])
    else:
        found = client.get(f"/admin/requests/{quote(request, safe='')}")
        lines = _lines(found)
    click.echo(json.dumps(found) if as_json else "\n".join(lines))


def _listed(one: dict[str, Any]) -> str:
    tokens = f"{share(one['cached_tokens'] or 0, one['prompt_tokens'])} prompt tokens from memory"
    return f"{_time(one)} {one['id'] or one['request_id']}: {tokens}; {one['recall'] or one['outcome']}"


def _time(one: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["created"]))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    name = found["id"] or found["request_id"]
    yield f"{name}: {found['route']}, {found['outcome']}, {_time(found)}, {found['ms']} ms"
    yield f"  x-request-id {found['request_id']}, namespace {found['namespace'] or '(none)'}"
    if not found["prompts"]:
        yield f"  no prompt was computed to its end: {found['outcome']}"
    for one in found["prompts"]:
        if len(found["prompts"]) > 1:
            yield f"  prompt {one['prompt']}:"
        yield from (f"  {line}" for line in recall_lines(one["prompt_tokens"], one["recall"]))
        if one["recall"] is not None:
            yield from _sides(one["recall"])
        if one["speculation"] is not None:
            yield from _drafts(one["speculation"])


def _sides(recall: dict[str, Any]) -> Iterator[str]:
    for title, side in (("the prompt", recall["ours"]), (f"entry {recall['entry']}", recall["theirs"])):
        if side is not None:
            shown = side["tokens"] if side["text"] is None else json.dumps(side["text"], ensure_ascii=False)
            yield f"    {title} goes on with {shown}"
    if recall["salted"]:
        yield f"  at least {recall['salted']} of its tokens are there for the same API key with another salt or user"


def _drafts(speculation: dict[str, Any]) -> Iterator[str]:
    drafted, accepted, seconds = (speculation[name] for name in ("drafted", "accepted", "seconds_saved"))
    if not drafted:
        yield f"  no drafts in {speculation['rounds']} steps"
        return
    saved = f"{seconds:.3f} s saved" if seconds >= 0 else f"{-seconds:.3f} s lost"
    yield f"  {accepted} of {drafted} drafts became tokens, in {speculation['rounds']} steps; about {saved}"
    yield f"    accepted by position: {' '.join(f'{rate:.0%}' for rate in speculation['acceptance_at'])}"
    yield f"    drafts of a step over time: {' '.join(f'{mean:.1f}' for mean, _ in speculation['depths'])}"
