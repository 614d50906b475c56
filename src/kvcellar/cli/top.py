"""top: the subcommand that shows at a terminal what a running server does, and what its requests find in memory.

It prints the state of a server, as the inspector describes it, in lines of text.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from kvcellar.cli.client import AdminClient, ServerLoading, server_options
from kvcellar.cli.options import Command
from kvcellar.cli.printing import picture, replica_lines, share
from kvcellar.errors import KvcellarError
from kvcellar.progress import rounded

Snapshot = Mapping[str, Any]

BAR = 24  # characters
STEPS = 60  # the last ones
# Cells of a request, of several requests, of the prefix tree, and those held by something else.
KINDS: Mapping[str, str] = {"request": "█", "shared": "█", "kept": "▓", "other": "▒"}
FREE = "·"
LEVELS = " ▁▂▃▄▅▆▇█"


def view(found: Snapshot, width: int, height: int) -> list[str]:
    """At most `height` lines of at most `width` characters. What does not fit is left out from the end of each list of
    requests first."""
    fixed = [*_head(found), *_groups(found["groups"], width), *_tiers(found["tiers"]), *_steps(found["steps"])]
    live, ended = _live(found["requests"]), _ended(found["requests"])
    free = max(0, height - len(fixed) - 2)  # a line that says what the columns are, for each list
    lives = live[: max(1, free // 2)]
    shown = [*fixed, LIVE, *lives, ENDED, *ended[: max(0, free - len(lives))]]
    return [line[:width] for line in shown[:height]]


LIVE = "REQUEST  STATUS      PROMPT COMPUTED  WRITTEN  TOKENS/S  FROM MEMORY"
ENDED = f"ENDED    OUTCOME     PROMPT  WRITTEN  TOKENS/S  {'FROM MEMORY':<{BAR}}  WHY NOT MORE"


def _head(found: Snapshot) -> Iterator[str]:
    engine, rates, model = found["engine"], found["rates"], found["model"]
    if found["replicas"]:
        yield from (*replica_lines(found["replicas"]), "")
    of = f" at {found['replica']}" if found["replica"] else ""
    yield f"{model['name']}{of}: {engine['running']} running, {engine['waiting']} waiting, {engine['steps']} steps"
    recording = engine["recording"]
    steps = recording["steps"]
    by = f"recorded {steps}" if recording["refused"] is None else f"by modules: {recording['refused']}"
    yield f"{rates['decode']:.1f} tokens/s written, {rates['prefill']:.0f} tokens/s read; {by}"


def _groups(groups: Sequence[Snapshot], width: int) -> Iterator[str]:
    for one in groups:
        used = sum(cells for kind, cells in one["counts"].items() if kind != "free")
        head = f"{one['name'][:20]:<20} {_share(used, one['cells'])} of {one['cells']} cells  "
        yield head + _map(one["runs"], max(8, width - len(head)))


def _map(runs: Sequence[Sequence[Any]], width: int) -> str:
    """A map of cells: a character stands for the kind that most of its cells have which are not free."""
    total = sum(run[0] for run in runs) or 1
    cells: list[dict[str, float]] = [{} for _ in range(width)]
    start = 0
    for length, kind, _ in runs:
        first, last = start * width / total, (start + length) * width / total
        for at in range(int(first), min(width, int(last) + 1)):
            covered = min(last, at + 1) - max(first, at)
            cells[at][kind] = cells[at].get(kind, 0.0) + covered
        start += length
    used = ({kind: covered for kind, covered in one.items() if kind in KINDS and covered} for one in cells)
    return "".join(KINDS[max(one, key=one.__getitem__)] if one else FREE for one in used)


def _tiers(tiers: Snapshot) -> Iterator[str]:
    for one in tiers["all"]:
        down = ", not available" if one["down"] else ""
        limit = f" of {rounded(one['limit_bytes'])}" if one["limit_bytes"] else ""
        traffic = ""
        if one["read_bytes"] is not None:
            traffic = f", {rounded(one['read_bytes'])} read, {rounded(one['written_bytes'])} written"
        yield f"{one['name']:<20} {rounded(one['bytes'])}{limit}{traffic}{down}"


def _steps(steps: Snapshot) -> Iterator[str]:
    if not steps["seconds"]:
        yield f"{'steps':<20} none yet"
        return
    seconds = steps["seconds"][-STEPS:]
    most = max(seconds) or 1.0
    bars = "".join(LEVELS[round((len(LEVELS) - 1) * one / most)] for one in seconds)
    last = f"{1e3 * seconds[-1]:.1f} ms: " + ", ".join(
        f"{steps[kind][-1]} {word}"
        for kind, word in (("prefill", "of prompts"), ("decode", "written"), ("drafts", "drafts"))
        if steps[kind][-1]
    )
    yield f"{'last step':<20} {last}"
    yield f"{'steps':<20} {bars} up to {1e3 * most:.1f} ms"


def _live(requests: Snapshot) -> list[str]:
    lines = [
        f"{one['number']:<8} {one['status'][:10]:<10} {one['prompt']:>7} {one['computed']:>8} {one['produced']:>8} "
        f"{one['tokens_per_second']:>9.1f}  {_restored(one)}"
        for one in requests["live"]
    ]
    if more := requests["more_live"]:
        lines.append(f"{more} more")
    return lines or ["none"]


def _restored(one: Snapshot) -> str:
    if one["restored"] is None:
        return "-"
    return f"{picture(one['prompt'], one['restored'], one['restored'], BAR)} {one['restored']}"


def _ended(requests: Snapshot) -> list[str]:
    return [_ended_line(one) for one in requests["ended"]] or ["none"]


def _ended_line(one: Snapshot) -> str:
    recall, why, line = one["recall"], "it ended before it began to run", "-" * BAR
    if recall is not None:
        line = picture(one["prompt"], recall["restored"], recall["matched"], BAR)
        why = f"{share(recall['restored'], one['prompt'])}; {recall['reason']}"
    numbers = f"{one['prompt']:>7} {one['produced']:>8} {one['tokens_per_second']:>9.1f}"
    return f"{one['number']:<8} {one['outcome'][:10]:<10} {numbers}  {line}  {why}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:5.1f} %" if whole else "    - %"


EVERY = 1.0  # seconds
WIDTH, HEIGHT = 100, 40  # characters and lines, where there is no terminal


@click.command("top", cls=Command, epilog="Example: kvcellar top --url http://127.0.0.1:8080")
@click.argument("model", required=False)
@click.option("--replica", help="Of a cluster, the replica whose memory is shown. Default: one that is connected.")
@click.option("--once", is_flag=True, help="Print once and exit (the default when output is not a terminal).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as `/inspector/api/snapshot` returns it.")
@server_options
def command(
    model: str | None, replica: str | None, once: bool, as_json: bool, url: str, admin_key_file: Path | None
) -> None:
    """Show what a running server does: requests, memory, the prefix tree, tiers and steps, once a second; q ends it.
    Of a cluster, all replicas, and the memory of one. It waits for a server that loads its models.

    MODEL is the name of a loaded model; without it, the one that the server was started with."""
    given = {"model": model, "replica": replica}
    path = f"/inspector/api/snapshot?{urlencode({name: value for name, value in given.items() if value})}"
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
