"""store_options: where a server keeps what has left the device, as options of subcommands."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvcellar.cli.config import gives_way
from kvcellar.cli.options import FILE, STORE_KEY, overruled, together
from kvcellar.cli.setting_options import setting_options
from kvcellar.engine.load.settings import KEY_BYTES, Settings, key_in, store_directory
from kvcellar.places import NoPlace

log = logging.getLogger("kvcellar.serve")

REMOTE = "KVCELLAR_STORE_REMOTE"  # an environment variable, too
# Of the tiers; `stored` makes settings of an engine of them.
store_options = together(
    click.option(
        "--store",
        help="Directory where a later server finds what this one has computed. Default: ~/.local/state/kvcellar/store.",
    ),
    click.option("--no-store", is_flag=True, help="Store nothing on disk."),
    setting_options(Settings, "store_bytes"),
    click.option(
        "--store-key-file",
        type=FILE,
        callback=gives_way(STORE_KEY),
        help=f"Encrypt what is stored with the key in this file, {2 * KEY_BYTES} hexadecimal digits. "
        f"Or set ${STORE_KEY}.",
    ),
    click.option(
        "--store-remote",
        envvar=REMOTE,
        help=f"Store elsewhere, too: redis://HOST:PORT, or a URL of fsspec like s3://BUCKET/PATH. Or set ${REMOTE}.",
    ),
    setting_options(Settings, "store_remote_bytes", "host_bytes", "tenant_share"),
)
events_options = setting_options(Settings, "kv_events", "kv_events_replay", "kv_events_topic", "kv_events_block")


def stored(options: dict[str, Any]) -> None:
    """Put settings of an engine in the place of options. Raises `BadRequest`."""
    placed(options)
    options["store_key"] = store_key(options.pop("store_key_file"), os.environ)


def placed(options: dict[str, Any]) -> None:
    """Put the directory of the store in the place of its options."""
    no_store = options.pop("no_store") and not overruled("no_store", by="store")
    options["store"] = None if no_store else options["store"] or _directory()


def store_key(file: Path | None, environment: Mapping[str, str]) -> bytes | None:
    """The key in a file, or in the environment, or None. Raises `BadRequest`, without any of the key."""
    if file is None:
        return key_in(environment[STORE_KEY], f"${STORE_KEY}") if STORE_KEY in environment else None
    from kvcellar.serve.http.keys import permission_warning, text_of  # imports the server, which takes time

    text = text_of(file, 1024, "store_key_file")
    if (warning := permission_warning(file)) is not None:
        log.warning("%s", warning)
    return key_in(text, str(file))


def _directory() -> str | None:
    """None, with a warning, if there is no place for it."""
    try:
        return str(store_directory(os.environ))
    except NoPlace as error:
        log.warning("running without a store: %s", error)
        return None
