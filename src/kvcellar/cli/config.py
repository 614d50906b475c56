"""config: the file with values of options that the command line does not give.

    [client]                      # commands that ask a running server
    url = "http://10.0.0.5:8080"

    [engine]                      # commands that load models
    threads = 8

    [serve]                       # one command; [cluster.serve] is one of a group
    port = 9000
    allow-pull = true

Keys are names of options. A flag is true or false, an option that may be repeated is an array, and every other value is
read as on the command line. The command line comes first, then environment variables, the section of the command, and
the sections of several. Nothing is ignored: an unknown section, an unknown key of a section that is used, or a value
that the option does not take ends the command. What is removed is named on the command line only. A key of this file is
sent to no server that the command line or the environment names.
"""

import os
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from kvcellar.places import NoPlace, config

OF_ENGINE = frozenset(
    {
        "attention", "cache_bytes", "context", "device", "draft", "draft_bytes", "draft_depth", "dtype",
        "kv_dtype", "max_models", "max_sequences", "memory", "record", "step_tokens", "threads", "weights",
    }
)  # fmt: skip
# Sections of several commands: those that have the first option. Which options these have, where the command has them.
SHARED: Mapping[str, tuple[str, frozenset[str]]] = {
    "client": ("url", frozenset({"url", "admin-key-file"})),
    "engine": ("dtype", frozenset(name.replace("_", "-") for name in OF_ENGINE)),
}
REMOVALS = ("cache.rm", "cache.clear", "rm")  # commands


def gives_way(variable: str, url: str = "") -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback of an option that names a key file: one of the file of options is not used where the environment has a
    key, or where the option `url` is not of that file."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        source = ctx.get_parameter_source(str(param.name))
        nearer = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
        elsewhere = variable in os.environ or (url != "" and ctx.get_parameter_source(url) in nearer)
        return None if source is click.core.ParameterSource.DEFAULT_MAP and elsewhere else value

    return callback


def defaults(ctx: click.Context, file: Path | None) -> dict[str, Any]:
    """The values of the options of a command in `file`, or in the one of the user, by the names of its parameters.
    Raises `UsageError`."""
    if file is None:
        with suppress(NoPlace):
            file = config(os.environ) / "config.toml"
        if file is None or not os.path.lexists(file):  # False where the home is another user's, as with `sudo`
            return {}
    return dict(_Reader(file, ctx).values())


class _Reader:
    def __init__(self, file: Path, ctx: click.Context) -> None:
        self._file, self._ctx = file, ctx
        self._options = {
            name.removeprefix("--"): one
            for one in ctx.command.params
            if isinstance(one, click.Option) and (not one.is_flag or one.is_bool_flag)
            for name in one.opts
            if name.startswith("--")
        }

    def values(self) -> Iterator[tuple[str, Any]]:
        """In the order of their precedence, the strongest last."""
        try:
            found = tomllib.loads(self._file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{self._file} cannot be read: {error}", self._ctx) from error
        own, section = self._own(found)
        for name, (sign, keys) in SHARED.items():
            if sign in self._options:
                yield from self._of(name, self._table(name, found.get(name, {})), keys)
        if section and own in REMOVALS:
            self._fail(own, "what this command removes is named on the command line only")
        yield from self._of(own, section, self._options)

    def _own(self, found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The name and the section of the command. Checks the names of the sections beside it, and above."""
        path, section = list[str](), found
        for ctx in [*_above(self._ctx)[1:], self._ctx]:  # the first one is `kvcellar` itself
            assert ctx.parent is not None
            group = ctx.parent.command
            assert isinstance(group, click.Group)
            known = [*group.list_commands(ctx.parent), *(() if path else SHARED)]
            for key in section.keys() - {*known}:
                what = "section" if isinstance(section[key], dict) else "option here: it needs a section"
                self._fail(".".join([*path, key]), f"there is no such {what}{_close(key, known)}")
            path.append(str(ctx.command.name))
            section = self._table(".".join(path), section.get(path[-1], {}))
        return ".".join(path), section

    def _of(self, name: str, section: Mapping[str, Any], known: Collection[str]) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            if key not in known:
                self._fail(f"{name}.{key}", f"there is no such option{_close(key, known)}")
            if (option := self._options.get(key)) is not None and option.name is not None:
                yield option.name, self._value(f"{name}.{key}", option, value)

    def _value(self, key: str, option: click.Option, value: Any) -> Any:
        if option.is_flag:
            if not isinstance(value, bool):
                self._fail(key, f"it is {_shown(value)}; true or false is needed")
            return value
        several = option.multiple or option.nargs != 1
        if several != isinstance(value, list):
            self._fail(key, "an array is needed, as [1, 2]" if several else "an array is not possible: give one value")
        for one in value if several else [value]:
            if isinstance(one, bool) or not isinstance(one, str | int | float):
                self._fail(key, f"it is {_shown(one)}; text or a number is needed, as at the command line")
        given = [os.path.expanduser(str(one)) for one in (value if several else [value])]
        try:
            return option.type_cast_value(self._ctx, given if several else given[0])
        except click.BadParameter as error:
            self._fail(key, error.message)

    def _table(self, name: str, found: Any) -> dict[str, Any]:
        if not isinstance(found, dict):
            self._fail(name, f"it is {_shown(found)}; a section [{name}] is needed")
        return found

    def _fail(self, key: str, why: str) -> Any:
        raise click.UsageError(f"{self._file}: {key}: {why}", self._ctx)


def _shown(value: Any) -> str:
    """A value that is not a number or a flag may be a secret."""
    return repr(value) if isinstance(value, bool | int | float) else f"of type {type(value).__name__}"


def _above(ctx: click.Context) -> list[click.Context]:
    """The contexts that lead to this one, the outermost first."""
    return [] if ctx.parent is None else [*_above(ctx.parent), ctx.parent]


def _close(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"
