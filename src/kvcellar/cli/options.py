"""options: options that several subcommands share, and the types of their values."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvcellar.cli.config import OF_ENGINE, defaults
from kvcellar.errors import BadRequest, KvcellarError, ModelNotFound
from kvcellar.sampling_params import PARAMETERS, Parameter, names_in
from kvcellar.values import Flag, Items, Kind, Pair, Pairs, Real, Whole

Decorator = Callable[[Any], Any]

STORE_KEY = "KVCELLAR_STORE_KEY"  # the environment variable
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class Written(click.ParamType):
    """What `read` makes of a text; it raises `ValueError` or `LookupError` where that is not `what`."""

    def __init__(self, name: str, read: Callable[[str], Any], what: str) -> None:
        self.name, self._read, self._what = name, read, what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # it was converted before
            return value
        try:
            return self._read(value)
        except (ValueError, LookupError, OverflowError):
            self.fail(f"{value!r} is not {self._what}", param, ctx)


def _bytes(text: str) -> int:
    number = text.strip().lower().rstrip("bgikm")
    return int(float(number) * _UNITS[text.strip().lower()[len(number) :].removesuffix("b")])


def _ids(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _biased(text: str) -> tuple[tuple[int, ...], float]:
    ids, _, bias = text.partition("=")
    return _ids(ids), float(bias)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def _named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise ValueError("one of them is missing")
    return name, path


SIZE = Written("size", _bytes, "a size like 800M, 1.5G or 512MiB")
IDS = Written("ids", _ids, "token ids like 12,7,5")


MANY = 24  # options of a command, above which --help shows those that are used every day
EVERYDAY = frozenset(
    {
        "as_json", "system", "images", "max_tokens", "temperature", "top_p", "seed", "stop", "json_schema",
        "store", "no_store", "store_remote", "cache_bytes", "context", "device", "weights", "threads", "draft",
        "adapters", "pull", "quiet", "_click_default_help", "help_all", "config", "host", "port", "api_key_file",
        "admin_key_file", "allow_open", "inspector", "memory", "max_models", "log_format", "replicas",
        "gateways",
    }
)  # fmt: skip
OF_OTHERS = {  # what to use in place of options that other servers have
    "--served-model-name": "A model has the name of its directory; `kvcellar create NAME` gives it one in the library",
    **dict.fromkeys(("--model", "-m", "--model-path", "--hf-repo"), "MODEL needs no option: `kvcellar serve MODEL`"),
    **dict.fromkeys(("--max-model-len", "--ctx-size", "-c", "--context-length"), "Use --context"),
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), "Use --memory or --cache-bytes"),
    **dict.fromkeys(("--max-num-seqs", "--parallel", "--max-running-requests"), "Use --max-sequences"),
    **dict.fromkeys(("--max-num-batched-tokens", "--batch-size", "--chunked-prefill-size"), "Use --step-tokens"),
    **dict.fromkeys(("--kv-cache-dtype", "--cache-type-k", "--cache-type-v"), "Use --kv-dtype"),
    **dict.fromkeys(("--model-draft", "--speculative-config"), "Use --draft"),
    **dict.fromkeys(("--lora", "--lora-modules", "--lora-paths"), "Use --adapter NAME=PATH"),
    "--quantization": "Use --weights",
    "--api-key": "Other users can read command lines: use --api-key-file, or $KVCELLAR_API_KEY",
}
_NAME = re.compile(r"(?<![\w/.'\"@-])[a-z]+_[a-z_]+(?![\w/'\"@-]|\.\w)")  # of a setting in a message, no path
ALL = "kvcellar.help_all"  # in the context of a command: whether all options are shown


def _show_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _read_config(ctx: click.Context, _: click.Parameter, file: Path | None) -> None:
    if not ctx.resilient_parsing:
        ctx.default_map = defaults(ctx, file)


config_option = click.Option(
    ["--config"],
    type=FILE,
    is_eager=True,  # before the options that it has values of
    expose_value=False,
    callback=_read_config,
    help="TOML file with values of options. Default: ~/.config/kvcellar/config.toml, if it is there.",
)
help_all = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Show all options."
)


class Command(click.Command):
    """Reports a `BadRequest` that was raised for the value of an option as an error of that option; messages have names
    of options in place of those of settings. Shows options in groups: where there are many, those that are used every
    day, and with `--help-all` the others, too. Options that the command line does not have are read from a file."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        return [*params[:-1], config_option, *([help_all] if len(params) > MANY else []), params[-1]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if (ours := OF_OTHERS.get(error.option_name)) is None:
                raise
            raise click.UsageError(f"No such option '{error.option_name}'. {ours}.", ctx) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = self.get_params(ctx)
        all_shown = help_all not in params or bool(ctx.meta.get(ALL))
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        left = 0
        for param in params:
            if not isinstance(param, click.Option) or (record := param.get_help_record(ctx)) is None:
                continue
            if all_shown or param.name in EVERYDAY:
                groups.setdefault(_group_of(param.name or ""), []).append(record)
            else:
                left += 1
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if left:
            formatter.write_paragraph()
            formatter.write_text(f"{left} more options: {ctx.command_path} --help-all")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvcellarError as error:
            options = {str(one.name): one for one in self.params if isinstance(one, click.Option)}
            param = options.pop(str(error.param), None) if isinstance(error, BadRequest) else None
            message = _NAME.sub(lambda name: options[name[0]].opts[0] if name[0] in options else name[0], str(error))
            if isinstance(error, ModelNotFound):
                message += _taken_as_model(ctx, str(error))
            if param is None:
                error.args = (message,)
                raise
            if ctx.get_parameter_source(str(param.name)) is click.ParameterSource.DEFAULT_MAP:
                message += " (from the config file)"
            raise click.BadParameter(message, ctx, param) from error


def _taken_as_model(ctx: click.Context, message: str) -> str:
    """More of a message on a model that is not there, if the command line names it."""
    for model in ctx.params.get("models") or [ctx.params.get("model")]:
        if model is not None and repr(model) in message:
            return f" {model!r} was taken as MODEL of `{ctx.get_usage().removeprefix('Usage: ')}`."
    return ""


def overruled(name: str, by: str) -> bool:
    """Whether option `by` of the current command was given, and so that it has precedence over option `name`: what is
    at the command line, over an environment variable, over a file."""
    source = click.get_current_context().get_parameter_source
    mine, other = source(name), source(by)
    return mine is not None and other is not None and other < mine


def _group_of(name: str) -> str:
    """The title below which --help has an option."""
    if name in names_in("option") or name in ("json_schema", "regex", "choice", "grammar"):
        return "What is drawn"
    if name.startswith(("store", "no_store", "host_bytes", "tenant_share", "kv_events")):
        return "What is kept outside of the device"
    return "Model and memory" if name in {*OF_ENGINE, "adapters"} else "Options"


def together(*options: Decorator) -> Decorator:
    """One decorator that adds these options, in this order."""

    def added(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return added


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
# Without a terminal, timings are never printed.
quiet_option = click.option("--quiet", is_flag=True, help="Print neither progress nor timings.")


def _by_name(ctx: click.Context, _: click.Parameter, pairs: tuple[tuple[str, str], ...]) -> Any:
    """The paths of each adapter. The first one is that of requests which name none."""
    if not pairs:
        return None
    ctx.params["adapter"] = pairs[0][0]
    paths: dict[str, list[str]] = {}
    for name, path in pairs:
        paths.setdefault(name, []).append(path)
    return paths


adapter_option = click.option(
    "--adapter",
    "adapters",
    type=Written("name=path", _named_path, "a name and a path, like style=./adapters/style"),
    multiple=True,
    callback=_by_name,
    help="A LoRA adapter (a directory as peft saves it) and its name: style=./style. May be repeated; paths of one "
    "name are added up. What is run has the first; served, each is a model of its name, beside the one without.",
)


MOST_TEXT = 1 << 20  # characters that are read of a text: far more than are used
kv_quality_option = click.option(
    "--kv-quality/--no-kv-quality",
    default=None,
    help="Measure how quantised K/V would change the predictions. Default: for small models.",
)


MAX_TOKENS = 512  # of a completion at the command line, which models seldom limit
_EXAMPLES = {"logit_bias": "13=-100", "sequence_bias": "12,7=-5", "bad_words_ids": "12,7"}


def _sampling_option(one: Parameter) -> Decorator:
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
            return {"type": Written("id=bias", _bias, "a token id and a number, like 13=-100"), "multiple": True}
        case Pairs():
            return {"type": Written("ids", _biased, "token ids like 12,7=-5"), "multiple": True}
        case Items(item=Items()):
            return {"type": IDS, "multiple": True}
        case Items(item=Whole()):
            return {"type": int, "multiple": True}
        case _:
            return {"multiple": True}


def flag(one: Parameter) -> str:
    """How a parameter is written at the command line."""
    return f"--{(one.option or one.name).replace('_', '-')}"


# The sampling parameters. Their defaults are those of the model.
sampling_options = together(*map(_sampling_option, names_in("option").values()))


def given(**options: Any) -> dict[str, Any]:
    """The options that the user has set."""
    return {name: value for name, value in options.items() if value not in (None, ())}
