"""options: options that several subcommands share, and the types of their values."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvcellar.durations import seconds_of
from kvcellar.errors import BadRequest
from kvcellar.sampling_params import PARAMETERS, Parameter, names_in
from kvcellar.values import Flag, Items, Kind, Pair, Pairs, Real, Whole

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class Size(click.ParamType):
    """A number of bytes: 800000000, 800M, 1.5G, 512MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower()
        number = text.rstrip("bgikm")
        unit = text[len(number) :].removesuffix("b") if text[len(number) :] != "b" else "b"
        try:
            return int(float(number) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            self.fail(f"{value!r} is not a size like 800M, 1.5G or 512MiB", param, ctx)


class KeepAlive(click.ParamType):
    """A time: 30s, 1h30m, a number of seconds; negative: without end."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return seconds_of(value)
        except BadRequest as error:
            self.fail(error.message, param, ctx)


class Bias(click.ParamType):
    """A token id and what is added to its logit: 13=-100."""

    name = "id=bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        token, _, bias = value.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not a token id and a number, like 13=-100", param, ctx)


class Ids(click.ParamType):
    """Token ids separated by commas; with `biased`, also what is added to the logit of the last: 12,7=-5."""

    name = "ids"

    def __init__(self, *, biased: bool = False) -> None:
        self.biased = biased

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        ids, _, bias = value.partition("=")
        try:
            tokens = tuple(int(token) for token in ids.split(","))
            return (tokens, float(bias)) if self.biased else tokens
        except ValueError:
            self.fail(f"{value!r} is not token ids like {'12,7=-5' if self.biased else '12,7'}", param, ctx)


class NamedPath(click.ParamType):
    """A name and a path: style=./adapters/style."""

    name = "name=path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, _, path = value.partition("=")
        if not name or not path:
            self.fail(f"{value!r} is not a name and a path, like style=./adapters/style", param, ctx)
        return name, path


class Command(click.Command):
    """Reports a `BadRequest` that was raised for the value of an option as an error of that option."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BadRequest as error:
            for param in self.params:
                if isinstance(param, click.Option) and param.name == error.param:
                    raise click.BadParameter(str(error), ctx, param) from error
            raise


def _with(function: F, *options: Callable[[F], F]) -> F:
    for option in reversed(options):
        function = option(function)
    return function


def adapter_option(function: F) -> F:
    """Adds --adapter. The first one is that of requests which name none."""

    def by_name(ctx: click.Context, param: click.Parameter, pairs: tuple[tuple[str, str], ...]) -> Any:
        if not pairs:
            return None
        ctx.params["adapter"] = pairs[0][0]
        paths: dict[str, list[str]] = {}
        for name, path in pairs:
            paths.setdefault(name, []).append(path)
        return paths

    return click.option(
        "--adapter",
        "adapters",
        type=NamedPath(),
        multiple=True,
        callback=by_name,
        help="A LoRA adapter (a directory as peft saves it) and its name: style=./style. May be repeated; paths of one "
        "name are added up. What is run has the first; served, each is a model of its name, beside the one without.",
    )(function)


def quiet_option(function: F) -> F:
    """Adds --quiet. Without a terminal, progress and timings are never printed."""
    return click.option("--quiet", is_flag=True, help="At a terminal, print neither progress nor timings.")(function)


def model_options(function: F) -> F:
    """Adds the options for loading and running a model, named like the settings of the engine."""
    return _with(
        function,
        click.option(
            "--dtype",
            default="auto",
            show_default=True,
            help="Type of computation: auto, float32, bfloat16 or float16.",
        ),
        click.option(
            "--weights",
            default="auto",
            show_default=True,
            help="How linear layers multiply: auto (as the files are), int8, int4, mixed (quantised at load) or dense.",
        ),
        click.option(
            "--record",
            default="auto",
            show_default=True,
            help="Whether steps run as a recording of the model's forward: auto (where its bits are the same; on CUDA "
            "devices decoding steps, as graphs) or off.",
        ),
        click.option("--device", default="auto", show_default=True, help="Device: auto, cpu, cuda or cuda:N."),
        click.option("--attention", help="Attention backend. Default: the first that supports the model."),
        click.option(
            "--threads",
            type=int,
            help="CPU threads, at most 4 for each CPU. Default: torch's, within the CPU quota.",
        ),
    )


def engine_options(function: F) -> F:
    """Adds the options of an engine, named like its settings."""
    return _with(
        function,
        model_options,
        click.option(
            "--cache-bytes", type=Size(), help="Bytes of K/V and steps, like 2G. Default: a share of free memory."
        ),
        click.option("--kv-dtype", help="Storage of K/V: int8, or k=int8+hadamard,v=int4. Default: as computed."),
        click.option("--context", type=int, help="Most tokens of one sequence. Default: from the config of the model."),
        click.option(
            "--max-sequences", type=int, default=64, show_default=True, help="Most completions that run at once."
        ),
        click.option(
            "--step-tokens", type=int, help="Most new tokens in one step. Default: 512 on CPUs, 4096 on CUDA devices."
        ),
        click.option(
            "--draft",
            help="Drafts of the next tokens: ngram, mtp, or a directory or name of a smaller model, or embedded.",
        ),
        click.option(
            "--draft-depth", type=int, help="Most drafts of a completion in a step. Default: what the drafter allows."
        ),
        click.option(
            "--draft-bytes",
            type=Size(),
            help="Bytes of the cache for a draft model or MTP layers. Default: a share by the bytes of a token.",
        ),
    )


MAX_TOKENS = 512  # of a completion at the command line, which models seldom limit
_EXAMPLES = {"logit_bias": "13=-100", "sequence_bias": "12,7=-5", "bad_words_ids": "12,7"}


def sampling_options(function: F) -> F:
    """Adds the sampling parameters as options. Their defaults are those of the model."""
    return _with(function, *map(_sampling_option, names_in("option").values()))


def _sampling_option(one: Parameter) -> Callable[[F], F]:
    how = _option_of(one.kind)
    about = re.sub(r"`(\w+)`", lambda name: flag(PARAMETERS[name[1]]), one.about)
    if one.name in _EXAMPLES:
        about += f", like {_EXAMPLES[one.name]}"
    again = " May be repeated." if "multiple" in how else ""
    if one.name == "max_tokens":
        how |= {"default": MAX_TOKENS, "show_default": True}
    return click.option(flag(one), one.name, **how, help=f"{about[0].upper()}{about[1:]}.{again}")


def _option_of(kind: Kind) -> dict[str, Any]:
    """The type of an option that has a value of this kind, as click takes it."""
    match kind:
        case Whole():
            return {"type": int}
        case Real():
            return {"type": float}
        case Flag():
            return {"is_flag": True, "default": None}
        case Pair():
            return {"type": (int, float)}
        case Pairs(pair=Pair(first=Whole())):
            return {"type": Bias(), "multiple": True}
        case Pairs():
            return {"type": Ids(biased=True), "multiple": True}
        case Items(item=Items()):
            return {"type": Ids(), "multiple": True}
        case Items(item=Whole()):
            return {"type": int, "multiple": True}
        case _:
            return {"multiple": True}


def flag(one: Parameter) -> str:
    """How a parameter is written at the command line."""
    return f"--{(one.option or one.name).replace('_', '-')}"


def given(**options: Any) -> dict[str, Any]:
    """The options that the user has set."""
    return {name: value for name, value in options.items() if value not in (None, ())}
