"""cache: the subcommands for the operator of a cache: of a running server, or of a store on disk without one."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from heapq import nlargest
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import click

from kvcellar.cli.client import PART, AdminClient, server_options
from kvcellar.cli.config import gives_way
from kvcellar.cli.options import FILE, IDS, SIZE, STORE_KEY, Command, Decorator, json_option, overruled, together
from kvcellar.cli.progress_line import working
from kvcellar.errors import BadRequest
from kvcellar.memory.kv.record import positions
from kvcellar.memory.tiers import upkeep
from kvcellar.memory.tiers.codec import AesGcm
from kvcellar.memory.tiers.disk import DiskTier
from kvcellar.memory.tiers.upkeep import opened
from kvcellar.progress import rounded

TIERS = ("device", "disk")
Json = dict[str, Any]


@click.group("cache")
def command() -> None:
    """List, remove, verify, export and import what is cached: by a running server (its address is --url; it needs an
    admin key), or in the store of a directory (--store), which servers may use meanwhile.
    """


class Target:
    """A running server, or a store."""

    def __init__(self, store: Path | None, store_key_file: Path | None, url: str, admin_key_file: Path | None) -> None:
        if overruled("store", by="url"):
            store = None
        self.store, self.cipher = store, _cipher(store_key_file) if store is not None else None
        self.client = AdminClient(url, admin_key_file) if store is None else None

    def ask(self, method: str, path: str, of_store: Callable[[DiskTier], Any], **fields: Any) -> Any:
        """What the server answers, or `of_store` returns."""
        if self.client is not None:
            with working("waiting for the server"):
                return self.client.get(path) if method == "GET" else self.client.post(path, fields)
        assert self.store is not None
        with working("reading the store"), closing(opened(self.store, self.cipher)) as disk:
            return of_store(disk)


def _cipher(key_file: Path | None) -> AesGcm | None:
    from kvcellar.cli.store_options import store_key  # imports settings of engines

    key = store_key(key_file, os.environ)
    return AesGcm(key) if key is not None else None


target_options = together(
    click.option(
        "--store",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Directory of a store, in place of a server.",
    ),
    click.option(
        "--store-key-file",
        type=FILE,
        callback=gives_way(STORE_KEY),
        help=f"With --store: the key that it is encrypted with. Default: ${STORE_KEY}.",
    ),
    server_options,
    json_option,
)


def _verb(name: str) -> Decorator:
    return together(command.command(name, cls=Command), target_options)


def _print(found: Json, as_json: bool, lines: Iterator[str]) -> None:
    click.echo(json.dumps(found) if as_json else "\n".join(lines))


# -- listing ------------------------------------------------------------------------------------------------------


@_verb("ls")
def ls(as_json: bool, **target: Any) -> None:
    """List the namespaces, with their entries, tokens and bytes."""

    def of_store(disk: DiskTier) -> Json:
        about = {"directory": str(disk.directory), "bytes": disk.size(), "limit_bytes": None}
        return {"device": None, "store": about | {"namespaces": upkeep.totals(upkeep.entries(disk))}}

    found = Target(**target).ask("GET", "/admin/cache", of_store)
    _print(found, as_json, _totals(found))


def _totals(found: Json) -> Iterator[str]:
    if (device := found["device"]) is not None:
        yield f"in memory: {len(device['namespaces'])} namespaces"
        for one in device["namespaces"]:
            counts = f"{one['entries']} entries, {one['tokens']} tokens, {one['checkpoints']} checkpoints"
            yield f"  {_namespace(one)}: {counts}, {rounded(one['bytes'])}; {one['in_use']} tokens in use"
    if (store := found["store"]) is not None:
        limit = "" if store["limit_bytes"] is None else f" of {rounded(store['limit_bytes'])}"
        yield f"in the store {store['directory']}: {rounded(store['bytes'])}{limit}"
        for one in store["namespaces"]:
            counts = f"{one['entries']} entries, {one['tokens']} tokens, {rounded(one['bytes'])}"
            yield f"  {_namespace(one)} of model {one['identity']}: {counts}"


def _namespace(one: Json) -> str:
    return "(sealed with another key)" if one["namespace"] is None else one["namespace"] or "(no namespace)"


list_options = together(
    click.option("--tier", type=click.Choice(TIERS), help="Default: device; disk with --store."),
    click.option("--limit", default=200, show_default=True, help="Most entries."),
)


@_verb("tree")
@list_options
@click.option("--namespace", help="Only this one.")
def tree(tier: str | None, limit: int, namespace: str | None, as_json: bool, **target: Any) -> None:
    """List the entries as a tree: their tokens, uses and checkpoints, and how their texts begin."""

    def of_store(disk: DiskTier) -> Json:
        found = [one for one in map(upkeep.fields, upkeep.entries(disk)) if namespace in (None, one["namespace"])]
        return _first(found, limit)

    only = "" if namespace is None else f"&namespace={quote(namespace, safe='')}"
    path = f"/admin/cache/tree?tier={tier or TIERS[0]}&limit={limit}{only}"
    found = Target(**target).ask("GET", path, of_store)
    _print(found, as_json, _tree(found))


def _first(found: list[Json], limit: int) -> Json:
    return {"entries": found[:limit], "more": len(found) > limit}


def _tree(found: Json) -> Iterator[str]:
    after: dict[tuple[str, str], list[Json]] = {}
    names = {(one["namespace"], one["name"]) for one in found["entries"]}
    for one in found["entries"]:
        parent = one["parent"] if (one["namespace"], one["parent"]) in names else ""
        after.setdefault((one["namespace"], parent), []).append(one)
    for namespace in dict.fromkeys(one["namespace"] for one in found["entries"]):
        yield _namespace({"namespace": namespace})
        rest = [(1, one) for one in reversed(after.get((namespace, ""), []))]
        while rest:
            depth, one = rest.pop()
            yield "  " * min(depth, 20) + _entry(one)
            rest += ((depth + 1, child) for child in reversed(after.get((namespace, one["name"]), [])))
    if found["more"]:
        yield "there are more entries: see --limit"


def _entry(one: Json) -> str:
    span = "" if one["start"] is None else f" {one['end'] - one['start']} tokens [{one['start']},{one['end']})"
    shown = one.get("text")
    text = json.dumps(shown, ensure_ascii=False) if shown is not None else one["tokens"] or ""
    if one["tier"] == "device":
        about = (
            f"{one['users']} users, used {'again' if one['reused'] else 'once'}, {len(one['checkpoints'])} checkpoints"
        )
    else:
        about = f"{one['uses']} uses, {rounded(one['bytes'])}" + (", pinned" if one["pinned"] else "")
        about += ", features of an image" if one["image"] else ""
    return f"{one['name']}{span}, {about}: {text}"


@_verb("hot")
@list_options
def hot(tier: str | None, limit: int, as_json: bool, **target: Any) -> None:
    """List the entries that are kept longest, the most valuable first."""

    def of_store(disk: DiskTier) -> Json:
        stored = map(upkeep.fields, upkeep.entries(disk))
        return _first(nlargest(limit + 1, stored, key=lambda one: float(str(one["value"]))), limit)

    found = Target(**target).ask("GET", f"/admin/cache/hot?tier={tier or TIERS[0]}&limit={limit}", of_store)
    _print(found, as_json, (f"{_namespace(one)}: {_entry(one)}" for one in found["entries"]))


# -- removal ------------------------------------------------------------------------------------------------------


@_verb("rm")
@click.argument("entry", required=False)
@click.option("--namespace", help="Only in this one; without ENTRY and --prefix, all that it has.")
@click.option("--prefix", help="What begins with this text (with a server).")
@click.option("--prefix-ids", "ids", type=IDS, help="What begins with these token ids: 12,7,5.")
def rm(
    entry: str | None,
    namespace: str | None,
    prefix: str | None,
    ids: tuple[int, ...] | None,
    as_json: bool,
    **target: Any,
) -> None:
    """Remove ENTRY, as `tree` names it, and all that continue it; or what begins with a prefix; or a namespace. What
    running requests use stays.
    """
    upkeep.check_named(namespace, entry, prefix if prefix is not None else ids)

    def of_store(disk: DiskTier) -> Json:
        from kvcellar.memory.prefix.node import key_of

        if prefix is not None:
            raise BadRequest("a store has no tokenizer; use --prefix-ids, or a server", "prefix")
        stored = upkeep.entries(disk)
        keys = upkeep.selected(stored, namespace=namespace, entry=entry, prefix=key_of(ids or ()))
        disk.remove(keys)
        return {"tokens": 0, "stored": len(keys)}

    fields = {"namespace": namespace, "entry": entry, "prefix": prefix if prefix is not None else ids}
    found = Target(**target).ask("POST", "/admin/cache/remove", of_store, **fields)
    _print(found, as_json, _removed(found))


def _removed(found: Json) -> Iterator[str]:
    yield f"removed {found['tokens']} tokens from memory and {found['stored']} entries from the store"


@_verb("clear")
@click.option("--all-models", is_flag=True, help="Also what other models have stored in the same directory.")
def clear(all_models: bool, as_json: bool, **target: Any) -> None:
    """Remove everything that no running request uses, from memory and from the store: of the server's model, or of the
    only one that has entries in the store.
    """

    def of_store(disk: DiskTier) -> Json:
        rows = disk.rows()
        models = sorted({row.identity.hex()[: upkeep.NAME] for row in rows})
        if len(models) > 1 and not all_models:
            raise BadRequest(f"the store has entries of {len(models)} models, {models}: clear all with --all-models")
        disk.remove([row.key for row in rows])
        return {"tokens": 0, "stored": len(rows)}

    found = Target(**target).ask("POST", "/admin/cache/clear", of_store, all_models=all_models)
    of = "all models" if all_models else "this model; those of others stay (--all-models)"
    _print(found, as_json, (f"{line}, of {of}" for line in _removed(found)))


# -- the store ----------------------------------------------------------------------------------------------------


@_verb("gc")
def gc(as_json: bool, **target: Any) -> None:
    """Remove entries of the store that have expired or continue one that is not there, and what processes left."""
    path = "/admin/cache/collect"
    found = Target(**target).ask("POST", path, lambda disk: {"removed": upkeep.collected(disk)})
    _print(found, as_json, iter([f"removed {found['removed']} entries that were of no use"]))


@_verb("verify")
def verify(as_json: bool, **target: Any) -> None:
    """Read every entry of the store. What is damaged is removed. Exit code 1 if anything was."""
    found = Target(**target).ask("POST", "/admin/cache/verify", lambda disk: asdict(upkeep.verified(disk)))
    lines = [f"{found['read']} entries of {rounded(found['bytes'])} are as they were written"]
    if found["damaged"]:
        lines.append(f"{found['damaged']} were damaged, and are removed")
    if found["unreadable"]:
        lines.append(f"{found['unreadable']} could not be read, or are sealed with another key")
    _print(found, as_json, iter(lines))
    if found["damaged"]:
        sys.exit(1)


@_verb("export")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
def export(file: Path, as_json: bool, **target: Any) -> None:
    """Write the entries of the store to FILE, a tar archive that only its owner can read; -: to stdout. It has the
    tokens of prompts. FILE is replaced once the archive is whole.
    """
    chosen, to_stdout = Target(**target), str(file) == "-"

    def write(parts: Iterator[bytes]) -> Json:
        with nullcontext(sys.stdout.buffer) if to_stdout else _replacing(file) as into:
            return {"bytes": sum(into.write(part) for part in parts)}

    if chosen.client is not None:
        with working("reading the store of the server"):
            found = write(chosen.client.download("/admin/cache/export"))
    else:
        found = chosen.ask("POST", "", lambda disk: write(upkeep.exported(disk)))
    if not to_stdout:
        _print(found, as_json, iter([f"wrote {rounded(found['bytes'])} to {file}"]))


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end; if the block raises, `path` stays as it was."""
    part = path.with_name(f"{path.name}.part")
    try:
        file = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except FileExistsError:
        raise BadRequest(f"{part} exists: another export writes it, or one was killed; remove it") from None
    except OSError as error:
        raise BadRequest(f"{part} cannot be written: {error.strerror}") from error
    try:
        with file:
            yield file
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@_verb("import")
@click.argument("file", type=click.File("rb"))
@click.option(
    "--store-bytes",
    type=SIZE,
    default="10G",
    show_default=True,
    help="With --store: most bytes of the store, and no more than a tenth of what is free.",
)
def import_from(file: BinaryIO, store_bytes: int, as_json: bool, **target: Any) -> None:
    """Store the entries of an archive that `export` has made. A server refuses those of other models. Without a store
    key, nothing shows that the K/V in FILE were computed from its tokens: import only what you trust. Exit code 1 if
    entries were refused.
    """
    chosen = Target(**target)
    with working("storing entries"):
        if chosen.client is not None:
            found = chosen.client.upload("/admin/cache/import", iter(lambda: file.read(PART), b""))
        else:
            found = asdict(_imported(chosen, file, store_bytes))
    lines = [f"stored {found['stored']} entries"]
    lines += [f"refused {count}: {reason}" for reason, count in found["refused"].items()]
    _print(found, as_json, iter(lines))
    if found["refused"]:
        sys.exit(1)


def _imported(target: Target, file: BinaryIO, most: int) -> upkeep.Imported:
    """A store takes entries of all models."""
    store, cipher = target.store, target.cipher
    assert store is not None

    disks: dict[bytes, DiskTier] = {}

    def of(identity: bytes) -> DiskTier:
        if identity not in disks:
            disks[identity] = opened(store, cipher, identity=identity, max_bytes=most, share_of_free=0.1)
        return disks[identity]

    try:
        return upkeep.imported(file, of, cipher, lambda snapshot: positions(snapshot.record))
    finally:
        for disk in disks.values():
            disk.close()
