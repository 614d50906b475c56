"""ps: the subcommand that lists the models that a running server has loaded."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from kvcellar.cli.client import AdminClient, server_options
from kvcellar.cli.options import Command

COLUMNS = ("NAME", "ID", "SIZE", "SHARED", "PROCESSOR", "CONTEXT", "UNTIL")
SHORT_ID = 12  # characters of a digest
FOREVER = timedelta(days=36500)


@click.command("ps", cls=Command, epilog="Example: kvcellar ps --url http://127.0.0.1:8080")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@server_options
def command(as_json: bool, url: str, admin_key_file: Path | None) -> None:
    """List the models that a running server has loaded, with the bytes that they take and when they are unloaded.

    SHARED are the bytes that other models use, too: models of the library that have the same weights."""
    found = AdminClient(url, admin_key_file).get("/api/ps")
    click.echo(json.dumps(found) if as_json else "\n".join(lines(found["models"], datetime.now(UTC))))


def lines(models: list[dict[str, Any]], now: datetime) -> Iterator[str]:
    """A table, with as much room for each column as it needs."""
    rows = [COLUMNS, *(_row(one, now) for one in models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _row(one: dict[str, Any], now: datetime) -> tuple[str, ...]:
    processor = "100% GPU" if one["size_vram"] else "100% CPU"
    until = _until(datetime.fromisoformat(one["expires_at"]) - now)
    shared = _bytes(one["shared_size"]) if one.get("shared_size") else "-"  # an Ollama server sends none
    name, digest = one["name"], one["digest"][:SHORT_ID] or "-"
    return name, digest, _bytes(one["size"]), shared, processor, str(one["context_length"]), until


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _until(left: timedelta) -> str:
    if left > FOREVER:
        return "forever"
    minutes, seconds = divmod(max(0, round(left.total_seconds())), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{count} {unit}" for count, unit in ((hours, "h"), (minutes, "min"), (seconds, "s")) if count]
    return " ".join(parts[:2]) or "now"
