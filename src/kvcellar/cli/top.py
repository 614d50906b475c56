"""top: the subcommand that shows at a terminal what a running server does, and what its requests find in memory."""

import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from kvcellar.cli.client import AdminClient, ServerLoading, server_options
from kvcellar.cli.options import Command
from kvcellar.cli.top_view import view
from kvcellar.errors import KvcellarError

EVERY = 1.0  # seconds
WIDTH, HEIGHT = 100, 40  # characters and lines, where there is no terminal


@click.command("top", cls=Command, epilog="Example: kvcellar top --url http://127.0.0.1:8080")
@click.argument("model", required=False)
@click.option("--once", is_flag=True, help="Print once and exit (the default when output is not a terminal).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as `/inspector/api/snapshot` returns it.")
@server_options
def command(model: str | None, once: bool, as_json: bool, url: str, admin_key_file: Path | None) -> None:
    """Show what a running server does: requests, memory, the prefix tree, tiers and steps, once a second; q ends it.
    It waits for a server that loads its models.

    MODEL is the name of a loaded model; without it, the one that the server was started with."""
    path = "/inspector/api/snapshot" + (f"?model={quote(model, safe='')}" if model else "")
    client = AdminClient(url, admin_key_file)
    found = _first(client, path)
    if as_json:
        click.echo(json.dumps(found))
    elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        click.echo("\n".join(view(found, WIDTH, HEIGHT)))
    else:
        _watch(client, path, found)


def _first(client: AdminClient, path: str) -> dict[str, Any]:
    """The first state, once the server has loaded its models. How far that is is told when it changes."""
    told = ""
    while True:
        try:
            return client.get(path)
        except ServerLoading as error:
            if (now := str(error)) != told:
                click.echo(f"{now}; waiting", err=True)
            told = now
            time.sleep(EVERY)


class Watched:
    """The last state of a server, and why there is no newer one. Read on the thread that draws, written on another."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._state: tuple[dict[str, Any], str | None] = found, None

    def ask(self, client: AdminClient, path: str) -> None:
        """A server that was stopped may come back: its last state stays visible meanwhile."""
        try:
            self._state = client.get(path), None
        except KvcellarError as error:
            self._state = self._state[0], str(error)

    def text(self, width: int, height: int) -> str:
        found, error = self._state
        lines = list(view(found, width, height - 1))
        return "\n".join((*lines, f"not connected: {error}"[:width] if error is not None else "q ends"))


def _watch(client: AdminClient, path: str, found: dict[str, Any]) -> None:
    """A full screen until q or Ctrl-C."""
    from threading import Event, Thread

    from prompt_toolkit.application import Application, get_app
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.layout import Layout, Window
    from prompt_toolkit.layout.controls import FormattedTextControl

    watched, ended, keys = Watched(found), Event(), KeyBindings()

    @keys.add("q")
    @keys.add("c-c")
    def _(event: Any) -> None:
        event.app.exit()

    def text() -> str:
        size = get_app().output.get_size()
        return watched.text(size.columns, size.rows)

    app: Application[None] = Application(
        layout=Layout(Window(FormattedTextControl(text), wrap_lines=False)), key_bindings=keys, full_screen=True
    )

    def ask() -> None:
        while not ended.wait(EVERY):
            watched.ask(client, path)
            app.invalidate()

    asking = Thread(target=ask, name="kvcellar-top", daemon=True)  # a server that does not answer keeps nothing waiting
    asking.start()
    try:
        app.run()
    finally:
        ended.set()
