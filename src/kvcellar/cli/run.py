"""run: talk to a model. One prompt (as an argument or from a pipe), or a conversation at the terminal."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click

from kvcellar.cli.loading import loading
from kvcellar.cli.options import Verb, engine_options, given, quiet_option, sampling_options
from kvcellar.engine.engine import Engine
from kvcellar.engine.result import Result
from kvcellar.engine.session import Session
from kvcellar.errors import BadRequest, EngineFailed, KvcellarError
from kvcellar.events import Delta, Timings, Usage
from kvcellar.places import NoPlace, state
from kvcellar.sample.params import SamplingParams

_HELP = """\
  /help            this
  /set NAME VALUE  a sampling parameter, like /set temperature 0.2
  /show            the model, its memory, and the sampling parameters
  /rewind [N]      forget the last N turns (1)
  /clear           forget the conversation
  /bye             leave (so do Ctrl-D and /exit)
  \"\"\"              begins and ends a message of several lines"""


@click.command("run", cls=Verb, epilog="Example: echo 'def main():' | kvcellar run --max-tokens 40")
@click.argument("model", required=False)
@click.argument("prompt", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with text, ids, usage and timings.")
@click.option("--logprobs", type=int, help="With --json: of each token, and of so many of the most likely.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without a chat template.")
@click.option("--ids", is_flag=True, help="Prompt and answer are token ids, like 12 7 99. Needs no tokenizer.")
@sampling_options
@engine_options
@quiet_option
def command(
    model: str | None, prompt: str | None, as_json: bool, raw: bool, ids: bool, quiet: bool, **options: Any
) -> None:
    """Talk to MODEL: a directory, a name in the local Hugging Face cache, or (by default) the embedded model.

    With PROMPT, or text from a pipe, it answers that and ends; the prompt is continued as it is unless the model has a
    chat template. To give the embedded model a prompt, call it by its name: `kvcellar run embedded 'import os'`.
    """
    sampling = _sampling(options)
    if "logprobs" in sampling and not as_json:
        raise click.UsageError("--logprobs are told in JSON: add --json")
    interactive = prompt is None and sys.stdin.isatty() and sys.stdout.isatty()
    if prompt is None and not interactive:
        prompt = _piped()
    if prompt == "":
        raise click.UsageError("there is no prompt: give one as an argument, pipe one in, or use a terminal")
    words = _Words(ids)
    asked = None if prompt is None else words.read(prompt)  # refused, if it must be, before a model is loaded
    with loading(quiet=quiet):
        engine = Engine(model, **given(**options))
    with engine:
        if not ids:
            _check_text(engine)  # before anything is typed
        if asked is not None:
            _once(engine, asked, words, sampling, as_json=as_json, raw=raw, quiet=quiet)
        else:
            _Conversation(engine, words, sampling, raw=raw, quiet=quiet).hold()


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    """The sampling among the options, which it is taken from. Refused, if it must be, before a model is loaded."""
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name in options]
    sampling = given(**{name: options.pop(name) for name in names})
    if "logit_bias" in sampling:
        sampling["logit_bias"] = dict(sampling["logit_bias"])
    SamplingParams(**sampling)
    return sampling


@dataclasses.dataclass(frozen=True, slots=True)
class _Words:
    """How prompts and answers are written: as text, or as token ids."""

    ids: bool

    def read(self, prompt: str) -> str | list[int]:
        if not self.ids:
            return prompt
        try:
            return [int(word) for word in prompt.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()]
        except ValueError:
            raise BadRequest(f"with --ids a prompt is token ids, like 12 7 99, not {prompt[:40]!r}", "prompt") from None

    def told(self, pieces: Iterable[Delta]) -> Iterator[str]:
        """What to write of an answer, as it comes."""
        if not self.ids:
            yield from (piece.text for piece in pieces)
            return
        gap = ""
        for piece in pieces:
            for token in piece.token_ids:
                yield f"{gap}{token}"
                gap = " "


def _check_text(engine: Engine) -> None:
    """Raise `BadRequest`, which says why, for a model that has no tokenizer."""
    try:
        engine.decode(())
    except BadRequest as error:
        raise BadRequest(f"{error} With --ids, prompt and answer are token ids.", error.param) from error


def _piped() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the prompt from the pipe is not UTF-8: byte {error.start}", "prompt") from None


def _once(
    engine: Engine,
    prompt: str | list[int],
    words: _Words,
    sampling: dict[str, Any],
    *,
    as_json: bool,
    raw: bool,
    quiet: bool,
) -> None:
    """Answer one prompt; the text goes to stdout as it comes, what it cost goes to stderr if that is a terminal."""
    session = engine.session(chat=not raw and not words.ids)
    if as_json:
        click.echo(json.dumps(_as_json(session.send(prompt, **sampling))))
        return
    for text in words.told(session.stream(prompt, **sampling)):
        click.echo(text, nl=False)
    click.echo()
    if not quiet and sys.stderr.isatty() and session.last is not None:
        click.echo(_cost(session.last.usage, session.last.timings), err=True)


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "logprobs": None if result.logprobs is None else [dataclasses.asdict(entry) for entry in result.logprobs],
        "usage": dataclasses.asdict(result.usage),
        "timings": dataclasses.asdict(result.timings),
    }


def _cost(usage: Usage, timings: Timings) -> str:
    """One line: speed, time to the first token, and what came from memory."""
    speed = timings.tokens_per_second(usage.completion_tokens)
    return (
        f"[{usage.completion_tokens} tokens, {speed:.1f} tokens/s, first after {timings.first_token * 1e3:.0f} ms; "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from memory]"
    )


class _Conversation:
    """The terminal session: lines in, answers out, commands behind a slash."""

    def __init__(self, engine: Engine, words: _Words, sampling: dict[str, Any], *, raw: bool, quiet: bool) -> None:
        self._engine, self._words, self._sampling, self._quiet = engine, words, sampling, quiet
        self._chat = engine.model.has_chat and not raw and not words.ids
        self._session: Session = engine.session(chat=self._chat)

    def hold(self) -> None:
        """Until the user leaves."""
        from prompt_toolkit import PromptSession

        card = self._engine.model
        kind = "answers" if self._chat else "continues what you write" + (", in token ids" if self._words.ids else "")
        click.echo(f"{card.name} ({card.architecture}, {card.dtype} on {card.device}) {kind}. /help says what else.")
        if card.name == "embedded" and not self._words.ids:
            click.echo(
                "It is a demo model trained on Python's standard library, not an assistant. Try: def read_file(path):"
            )
        asking: PromptSession[str] = PromptSession(history=_history())
        while self._engine.healthy:
            try:
                line = self._message(asking)
                if line.strip() in ("/bye", "/exit"):
                    return
                self._react(line)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
        raise EngineFailed("the engine has ended, and with it the conversation")

    def _message(self, asking: Any) -> str:
        line: str = asking.prompt(">>> ")
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        while not lines[-1].endswith('"""') or (len(lines) == 1 and not lines[0]):
            lines.append(asking.prompt("... "))
        return "\n".join(lines).removesuffix('"""')

    def _react(self, line: str) -> None:
        """One message or command. What goes wrong is told, and the conversation goes on."""
        try:
            if line.startswith("/"):
                self._command(*line[1:].split(maxsplit=2))
            elif line:
                self._answer(line)
        except KvcellarError as error:
            click.echo(f"{error}", err=True)

    def _answer(self, text: str) -> None:
        pieces = self._session.stream(self._words.read(text), **self._sampling)
        try:
            for told in self._words.told(pieces):
                click.echo(told, nl=False)
        except KeyboardInterrupt:
            pieces.close()
            click.echo("\n[interrupted; this turn is forgotten]")
            return
        click.echo()
        if self._session.last is not None and not self._quiet:
            click.secho(_cost(self._session.last.usage, self._session.last.timings), dim=True)

    def _command(self, verb: str = "", *words: str) -> None:
        if verb == "set" and len(words) == 2:
            changed = {**self._sampling, words[0]: _value(words[1])}
            self._engine.params(**changed)
            self._sampling = changed
        elif verb == "show":
            self._show()
        elif verb == "rewind":
            self._session.rewind(_value(words[0]) if words else 1)
        elif verb == "clear":
            self._session.close()
            self._session = self._engine.session(chat=self._chat)
        else:
            click.echo(_HELP)

    def _show(self) -> None:
        stats = self._engine.stats()
        click.echo(f"  {self._engine.capacity()}")
        for group in stats.groups:
            attends = group.backend or "the model itself"
            click.echo(f"  {group.name}: {group.used} of {group.cells} cells in use, attention by {attends}")
        click.echo(f"  {self._engine.params(**self._sampling)}")


def _value(text: str) -> Any:
    """A number if it is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _history() -> Any:
    """What was typed, kept for the next conversation where that is possible; readable by the user alone."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = state(os.environ) / "history"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.chmod(0o600)
    except (NoPlace, OSError) as error:
        click.echo(f"What you type is not kept for the next conversation: {error}", err=True)
        return InMemoryHistory()

    class History(FileHistory):
        """A full disk ends the record, not the conversation."""

        full = False

        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError as error:
                if not self.full:
                    self.full = True
                    click.echo(f"What you type is not kept in {path} any more: {error.strerror}", err=True)

    return History(str(path))
