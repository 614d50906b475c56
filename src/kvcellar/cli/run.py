"""run: the subcommand that completes one prompt, or starts a chat at the terminal. Options say what an
answer has to match.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from kvcellar.cli.chat import Chat, PromptFormat
from kvcellar.cli.completion import loadable_models
from kvcellar.cli.options import (
    FILE,
    Command,
    Decorator,
    adapter_option,
    given,
    quiet_option,
    sampling_options,
    together,
)
from kvcellar.cli.picture import draws, show
from kvcellar.cli.printing import cost_line
from kvcellar.cli.progress_line import show_progress
from kvcellar.cli.pull import download_missing, pull_option
from kvcellar.cli.setting_options import engine_options
from kvcellar.cli.store_options import store_options, stored
from kvcellar.constraint import MAX_SOURCE_BYTES, Constraint
from kvcellar.errors import BadRequest
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.result import Result
from kvcellar.sampling_params import SamplingParams


def _read(path: Path, param: str) -> str:
    with path.open("rb") as file:
        read = file.read(MAX_SOURCE_BYTES + 1)
    try:
        return read.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{param}: the file is not UTF-8 text: byte {error.start}", param) from None


def _constraint(flag: str, make: Callable[[Any], Constraint], help: str, **how: Any) -> Decorator:
    """An option that sets the sampling parameter `constraint`."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is None or value == ():
            return
        if "constraint" in ctx.params:
            raise click.UsageError("give one of --json-schema, --regex, --choice and --grammar")
        try:
            ctx.params["constraint"] = make(value)
        except BadRequest as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return click.option(flag, callback=callback, expose_value=False, help=help, **how)


constraint_options = together(
    _constraint(
        "--json-schema",
        lambda path: Constraint.json_schema(_read(path, "json_schema"), param="json_schema"),
        "A file with a JSON Schema that the answer has to match.",
        type=FILE,
    ),
    _constraint(
        "--regex",
        lambda pattern: Constraint("regex", pattern, param="regex"),
        "A regular expression that the whole answer has to match.",
    ),
    _constraint(
        "--choice",
        lambda texts: Constraint.choice(texts, param="choice"),
        "A text that the answer may be. May be repeated; the answer is one of them.",
        multiple=True,
    ),
    _constraint(
        "--grammar",
        lambda path: Constraint("grammar", _read(path, "grammar"), param="grammar"),
        "A file with a grammar that the answer has to match, in Lark's notation or in GBNF.",
        type=FILE,
    ),
)


@click.command("run", cls=Command, epilog="Example: echo 'def main():' | kvcellar run --max-tokens 40")
@click.argument("model", required=False, shell_complete=loadable_models)
@click.argument("prompt", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with text, ids, usage and timings.")
@click.option("--logprobs", type=int, help="With --json: log-probabilities, also of this many most likely tokens.")
@click.option("--system", help="The system prompt, where the model has a chat template.")
@click.option("--raw", is_flag=True, help="Complete the text as it is, without the chat template.")
@click.option("--ids", is_flag=True, help="Read and print token ids, like 12 7 99. Needs no tokenizer.")
@click.option("--image", "images", type=FILE, multiple=True, help="An image in front of the prompt. May be repeated.")
@sampling_options
@constraint_options
@store_options
@engine_options
@adapter_option
@pull_option
@quiet_option
def command(
    model: str | None,
    prompt: str | None,
    as_json: bool,
    system: str | None,
    raw: bool,
    ids: bool,
    images: tuple[Path, ...],
    pull: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Chat with MODEL: a directory, a name of the library or of the local Hugging Face cache, or (by default) the
    embedded model.

    With PROMPT, or text from a pipe, it completes that and ends. The chat template of the model is used if it has one.
    To pass a prompt to the embedded model, name it: `kvcellar run embedded 'import os'`. A chat has a store unless
    --no-store is given; a single prompt has one only with --store.
    """
    sampling = _sampling(options)
    if "logprobs" in sampling and not as_json:
        raise click.UsageError("--logprobs needs --json")
    for option, is_given in {"--image": bool(images), "--system": system is not None}.items():
        if is_given and (raw or ids):
            raise click.UsageError(f"{option} needs the chat template: leave --raw and --ids out")
    interactive = prompt is None and sys.stdin.isatty() and sys.stdout.isatty()
    if prompt is None and not interactive:
        prompt = _read_pipe()
    if prompt == "":
        taken = "" if model is None else f"{model!r} was taken as MODEL, and "
        after = "give one behind MODEL (`embedded` is the embedded model)"
        raise click.UsageError(f"{taken}there is no prompt: {after}, pipe one in, or use a terminal")
    options["no_store"] |= not interactive and options["store"] is None
    stored(options)
    form = PromptFormat(ids)
    parsed = _parsed(form, prompt)  # before the model is loaded, because it may raise
    download_missing(model, options["draft"], pull=pull, quiet=quiet)
    with show_progress(quiet=quiet):
        engine = Engine(model, **given(**options))
    with engine:
        if not ids:
            _check_tokenizer(engine)
        if images and not engine.model.has_chat:
            raise BadRequest("--image is for models with a chat template, and this one has none", "image")
        if parsed is not None:
            parsed = _with_images(engine, images, parsed, shown=not as_json)
            _complete(engine, parsed, form, sampling, system=system, as_json=as_json, raw=raw, quiet=quiet)
        else:
            Chat(engine, form, sampling, images=images, system=system, raw=raw, quiet=quiet).run()


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the sampling parameters from `options` and returns those that are set. Raises `BadRequest`."""
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name in options]
    sampling = given(**{name: options.pop(name) for name in names})
    if "logit_bias" in sampling:
        sampling["logit_bias"] = dict(sampling["logit_bias"])
    SamplingParams(**sampling)
    return sampling


def _parsed(form: PromptFormat, prompt: str | None) -> str | Sequence[Any] | None:
    return None if prompt is None else form.parse(prompt)


def _with_images(
    engine: Engine, images: Sequence[Path], prompt: str | Sequence[Any], *, shown: bool
) -> str | Sequence[Any]:
    if not images:
        return prompt
    for image in images if shown and draws(os.environ, terminal=sys.stdout.isatty()) else ():
        show(engine.image(image))
    return [*images, prompt]


def _check_tokenizer(engine: Engine) -> None:
    """Raises `BadRequest` with the reason if the model has no tokenizer."""
    try:
        engine.decode(())
    except BadRequest as error:
        raise BadRequest(f"{error} With --ids, prompt and completion are token ids.", error.param) from error


def _read_pipe() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the prompt from the pipe is not UTF-8: byte {error.start}", "prompt") from None


def _complete(
    engine: Engine,
    prompt: str | Sequence[Any],
    form: PromptFormat,
    sampling: dict[str, Any],
    *,
    system: str | None,
    as_json: bool,
    raw: bool,
    quiet: bool,
) -> None:
    """Complete one prompt. The text is streamed to stdout; the cost goes to stderr if that is a terminal."""
    session = engine.session(chat=not raw and not form.ids, system=system)
    if as_json:
        click.echo(json.dumps(_as_json(session.send(prompt, **sampling))))
        return
    for text in form.texts(session.stream(prompt, **sampling)):
        click.echo(text, nl=False)
    click.echo()
    if not quiet and sys.stderr.isatty() and session.last is not None:
        click.echo(cost_line(session.last), err=True)


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "logprobs": None if result.logprobs is None else [dataclasses.asdict(entry) for entry in result.logprobs],
        "usage": dataclasses.asdict(result.usage),
        "timings": dataclasses.asdict(result.timings),
        "speculation": dataclasses.asdict(result.speculation) if result.speculation is not None else None,
    }
