"""setting_options: options of subcommands that are made of the settings of engines and servers."""

from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin

import click

from kvcellar.cli.completion import drafts, values
from kvcellar.cli.options import SIZE, Decorator, together
from kvcellar.comments import Comments
from kvcellar.engine.load.settings import Settings
from kvcellar.memory.shapes import Kind
from kvcellar.progress import rounded

COMMENTS = Comments()
VALUES = {"device": ("auto", "cpu", "cuda"), "kv_dtype": get_args(Kind)}  # which shells complete


def setting_options(of: type[Any], *names: str, **spelt: str) -> Decorator:
    """Options of settings, of which the class declares types and defaults, and says in comments what they are. `spelt`:
    more settings, with options of other names."""
    declared, comments = {one.name: one for one in fields(of)}, COMMENTS.of(of)
    flags = {name: f"--{name.replace('_', '-')}" for name in names} | spelt
    return together(*(_setting_option(declared[name], flag, comments[name]) for name, flag in flags.items()))


def _setting_option(one: Field[Any], flag: str, comment: str) -> Decorator:
    how: dict[str, Any] = {"type": next((kind for kind in (int, float) if one.type in (kind, kind | None)), str)}
    default: Any = one.default
    shown: bool | str = default not in (None, "", ())
    if one.name.endswith("_bytes"):
        how, shown = {"type": SIZE}, shown and rounded(default)
    elif one.type in (bool, bool | None):
        how, shown = {"is_flag": True}, False
    elif one.type == tuple[str, ...]:
        how, comment = {"multiple": True}, f"{comment}. May be repeated"
    literals = [kind for kind in (one.type, *get_args(one.type)) if get_origin(kind) is Literal]
    if known := VALUES.get(one.name) or next(map(get_args, literals), ()):
        how["shell_complete"] = values(*known)
    about = comment.replace("; None: ", ". Default: ").replace("`", "")
    text = f"{about[0].upper()}{about[1:]}."
    return click.option(flag, one.name, **how, default=default, show_default=shown, help=text)


# For loading and running a model.
model_options = setting_options(Settings, "dtype", "weights", "record", "device", "attention", "threads")
# Of a server.
image_options = setting_options(Settings, image_hosts="--allow-image-host")
# Of an engine.
engine_options = together(
    model_options,
    setting_options(Settings, "cache_bytes", "kv_dtype", "context", "max_sequences", "step_tokens"),
    click.option(
        "--draft",
        shell_complete=drafts,
        help="Drafts of the next tokens: ngram, mtp, or a directory or name of a smaller model, or embedded.",
    ),
    setting_options(Settings, "draft_depth", "draft_bytes"),
)
