"""chat: the interactive chat of `kvcellar run`, with its commands and its history."""

import json
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click

from kvcellar.cli.picture import show
from kvcellar.cli.printing import cost_line, counted, reason_of, recall_lines
from kvcellar.errors import BadRequest, EngineFailed, KvcellarError
from kvcellar.events import Delta
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.session import Session
from kvcellar.library.names import EMBEDDED, SEEING
from kvcellar.places import NoPlace, state
from kvcellar.sampling_params import SamplingParams

LAST = 60  # characters that are shown of a conversation

_DEMOS = {
    EMBEDDED: "It is a demo model trained on Python's standard library, not an assistant. Try: def read_file(path):",
    SEEING: "It is a demo model that sees shapes and digits, not an assistant. Try: /image FILE, then: What is this?",
}
_HELP = """\
  /help            show this help
  /set             show the sampling parameters
  /set NAME VALUE  set a sampling parameter, like /set temperature 0.2
  /system          show the system prompt
  /system TEXT     start a new conversation with this system prompt
  /image FILE      send an image with the next message
  /show            show the model, the conversation and the memory in use
  /why             show what of the last turn came from memory, and why it was not more
  /rewind [N]      remove the last N turns (1)
  /fork NAME       keep the conversation as it is now under a new name, and go on in a copy
  /clear           start a new conversation
  /save NAME       keep the conversation under a name, also for later chats
  /load NAME       continue the conversation of that name
  /list            show what was saved
  /delete NAME     delete what was saved
  /bye             end the chat (also /exit and Ctrl-D)
  Ctrl-C           end an answer, and keep what has come of it
  \"\"\"              begin and end a message of several lines"""


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """`ids`: prompts and completions are token ids instead of text."""

    ids: bool

    def parse(self, prompt: str) -> str | list[int]:
        if not self.ids:
            return prompt
        try:
            return [int(word) for word in prompt.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()]
        except ValueError:
            raise BadRequest(f"with --ids a prompt is token ids, like 12 7 99, not {prompt[:40]!r}", "prompt") from None

    def texts(self, deltas: Iterable[Delta]) -> Iterator[str]:
        """What to print for each delta."""
        if not self.ids:
            yield from (delta.text for delta in deltas)
            return
        separator = ""
        for delta in deltas:
            for token in delta.token_ids:
                yield f"{separator}{token}"
                separator = " "


class Chat:
    """A chat at the terminal: reads messages and commands, prints completions."""

    def __init__(
        self,
        engine: Engine,
        form: PromptFormat,
        sampling: dict[str, Any],
        *,
        images: Sequence[Path] = (),
        system: str | None = None,
        raw: bool,
        quiet: bool,
    ) -> None:
        """`images` are sent with the first message. Raises `BadRequest` for `system` where it is no chat."""
        self._engine, self._form, self._sampling, self._quiet = engine, form, sampling, quiet
        self._given, self._images = images, list[Path]()  # those of the next message
        self._chat = engine.model.has_chat and not raw and not form.ids
        self._system = system  # of new conversations
        self._session: Session = engine.session(chat=self._chat, system=system)

    def run(self) -> None:
        """Returns when the user ends the chat."""
        from prompt_toolkit import PromptSession

        self._introduce()
        for image in self._given:
            self._image(image)
        reader: PromptSession[str] = PromptSession(history=history())
        while self._engine.healthy:
            try:
                line = self._read(reader)
                if line.strip() in ("/bye", "/exit"):
                    return
                self._handle(line)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
        raise EngineFailed("the engine has ended, and so has the chat")

    def _introduce(self) -> None:
        model = self._engine.model
        kind = "a chat model" if self._chat else "a completion model" + (", in token ids" if self._form.ids else "")
        click.echo(
            f"{model.name} ({model.architecture}, {model.dtype} on {model.device}): {kind}. /help lists commands."
        )
        if (hint := _DEMOS.get(model.name)) is not None and not self._form.ids:
            click.echo(hint)

    def _read(self, reader: Any) -> str:
        """One line, or a message of several lines between triple quotes."""
        line: str = reader.prompt(">>> ")
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        while not lines[-1].endswith('"""') or (len(lines) == 1 and not lines[0]):
            lines.append(reader.prompt("... "))
        return "\n".join(lines).removesuffix('"""')

    def _handle(self, line: str) -> None:
        """One message or command. Errors are printed, and the chat continues."""
        try:
            if line.startswith("/"):
                self._command(*line[1:].split(maxsplit=2))
            elif line:
                self._complete(line)
        except KvcellarError as error:
            click.echo(f"{error}", err=True)

    def _complete(self, text: str) -> None:
        asked = [*self._images, text] if self._images else self._form.parse(text)
        self._images.clear()
        before = self._session.last
        try:
            with _interrupting(self._session.stop) as interrupted:
                for part in self._form.texts(self._session.stream(asked, **self._sampling)):
                    click.echo(part, nl=False)
        except KeyboardInterrupt:
            click.echo("\n[interrupted; this turn was removed]")
            return
        last = self._session.last
        if interrupted and last is not None and last is not before and not last.token_ids:
            self._session.rewind()
            click.echo("\n[interrupted before the answer began; this turn was removed]")
            return
        click.echo("\n[interrupted; what has come of the answer is kept]" if interrupted else "")
        if last is not None and not self._quiet:
            click.secho(cost_line(last), dim=True)
            if last.recall is not None:
                click.secho(f"  {reason_of(asdict(last.recall))}", dim=True)

    def _command(self, verb: str = "", *words: str) -> None:
        """`words` are those behind the verb: the second one may have blanks."""
        commands: Mapping[str, tuple[Collection[int], Callable[..., None]]] = {  # with how many words
            "set": ((0, 2), self._set),
            "system": ((0, 1, 2), self._change_system),
            "image": ((1, 2), self._image),
            "show": ((0,), self._show),
            "rewind": ((0, 1), self._rewind),
            "clear": ((0,), lambda: self._begin(self._system)),
            "why": ((0,), self._why),
            "save": ((1,), self._save),
            "fork": ((1,), self._fork),
            "load": ((1,), self._load),
            "delete": ((1,), self._delete),
            "list": ((0,), self._list),
            "help": ((0, 1, 2), lambda *_: click.echo(_HELP)),
        }
        counts, run = commands.get(verb, ((), None))
        if run is None:
            click.echo(f"there is no command /{verb}; /help lists them", err=True)
        elif len(words) in counts:
            run(*words)
        else:
            click.echo(f"that is not how the command is used:\n{_usage(verb)}", err=True)

    def _set(self, name: str = "", value: str = "") -> None:
        if not name:
            self._show_sampling()
            return
        changed = {**self._sampling, name: _value(value)}
        self._engine.params(**changed)
        self._sampling = changed
        click.echo(f"  {name} is {json.dumps(changed[name])} from now on")

    def _rewind(self, turns: str = "1") -> None:
        self._session.rewind(count := _value(turns))
        click.echo(f"  removed {counted(count, 'turn')}; {counted(self._session.turns, 'turn')} left")

    def _change_system(self, *words: str) -> None:
        if words:
            self._begin(" ".join(words))
        else:
            click.echo(
                f"  {self._system}" if self._system else "  this chat has none of its own; /system TEXT gives one"
            )

    def _image(self, *words: str | Path) -> None:
        path = Path(" ".join(map(str, words))).expanduser()
        if not self._chat:
            raise BadRequest("images are for models with a chat template", "image")
        if not path.is_file():
            raise BadRequest(f"{path} is no file", "image")
        image = self._engine.image(path)
        show(image)
        self._images.append(path)
        size = f"{image.width} x {image.height} pixels, {counted(image.input.rows, 'token')}"
        click.echo(f"  {size}; the next message has {counted(len(self._images), 'image')}")

    def _begin(self, system: str | None) -> None:
        begun = self._engine.session(chat=self._chat, system=system)
        self._session.close()
        self._session, self._system = begun, system
        click.echo("  a new conversation begins" + (f", with the system prompt: {system}" if system else ""))

    def _stands(self) -> str:
        """Where the conversation is."""
        session = self._session
        text = session.messages[-1]["content"] if session.chat and session.messages else ""
        last = f"; it ends: {' '.join(text.split())[-LAST:]}" if isinstance(text, str) and text else ""
        return f"{counted(session.turns, 'turn')}, {counted(len(session.tokens), 'token')}{last}"

    def _save(self, name: str) -> None:
        self._session.save(name)
        click.echo(f"  saved as {name}: {self._stands()}")

    def _fork(self, name: str) -> None:
        self._session.save(name, new=True)
        click.echo(f"  /load {name} returns to this point")

    def _load(self, name: str) -> None:
        loaded = self._engine.load(name)
        if loaded.chat != self._chat:
            raise BadRequest(f"{name} is {'a chat' if loaded.chat else 'a text'}, and this is not", "conversation")
        self._session.close()
        self._session, first = loaded, loaded.messages[:1]
        self._system = first[0]["content"] if first and first[0]["role"] == "system" else None
        click.echo(f"  loaded {name}: {self._stands()}")

    def _delete(self, name: str) -> None:
        self._engine.conversations.delete(name)
        click.echo(f"  deleted {name}")

    def _list(self) -> None:
        for info in self._engine.conversations.list():
            click.echo(f"  {info.name}: {counted(info.turns, 'turn')}, {counted(info.tokens, 'token')}")

    def _why(self) -> None:
        """The record of the last turn."""
        if (last := self._session.last) is None:
            click.echo("  no turn of this chat has ended yet")
            return
        recall = asdict(last.recall) if last.recall is not None else None
        for line in recall_lines(last.usage.prompt_tokens, recall):
            click.echo(f"  {line}")

    def _show(self) -> None:
        model, stats = self._engine.model, self._engine.stats()
        click.echo(f"  model         {model.name}, {model.architecture}, {model.dtype} on {model.device}")
        click.echo(f"  context       {counted(model.context, 'token')}")
        click.echo(f"  conversation  {self._stands()}")
        click.echo(f"  memory        {self._engine.capacity().splitlines()[0]}")
        for group in stats.groups:
            backend = group.backend or "the model itself"
            click.echo(f"  {group.name:13} {group.used} of {group.cells} cells in use, attention by {backend}")
        self._show_sampling()

    def _show_sampling(self) -> None:
        """What is not its default; `/set` and the field names of `SamplingParams` are the same."""
        params, plain = self._engine.params(**self._sampling), SamplingParams()
        shown = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
        names = [one.name for one in fields(SamplingParams) if getattr(params, one.name) != getattr(plain, one.name)]
        shown |= {name: getattr(params, name) for name in names}
        click.echo(f"  sampling      {', '.join(f'{name} {value}' for name, value in shown.items())}")


@contextmanager
def _interrupting(stop: Callable[[], bool]) -> Iterator[list[int]]:
    """Ctrl-C calls `stop` meanwhile; it is in the list then. Where that stops nothing, and the second time, it raises
    `KeyboardInterrupt` as ever."""
    pressed = list[int]()

    def press(number: int, _: object) -> None:
        pressed.append(number)
        if len(pressed) > 1 or not stop():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _usage(verb: str) -> str:
    """The lines of the help on a command."""
    return "\n".join(line for line in _HELP.splitlines() if line.split()[0] == f"/{verb}")


def _value(text: str) -> Any:
    """The value of a JSON text; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def history() -> Any:
    """The lines typed in this chat and earlier ones, in a file that only the user can read, if one can be written."""
    from prompt_toolkit.history import InMemoryHistory

    try:
        path = state(os.environ) / "history"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.chmod(0o600)
    except (NoPlace, OSError) as error:
        click.echo(f"Your input is not saved for the next chat: {error}", err=True)
        return InMemoryHistory()
    return _history_file(path)


def _history_file(path: Path) -> Any:
    from prompt_toolkit.history import FileHistory

    class History(FileHistory):
        """Continues without saving when the disk is full."""

        failed = False

        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError as error:
                if not self.failed:
                    self.failed = True
                    click.echo(f"Your input is no longer saved in {path}: {error.strerror}", err=True)

    return History(str(path))
