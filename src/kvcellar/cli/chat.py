"""chat: the interactive chat of `kvcellar run`, with its commands and its history."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kvcellar.cli.picture import show
from kvcellar.cli.printing import cost_line, counted, recall_lines
from kvcellar.errors import BadRequest, EngineFailed, KvcellarError
from kvcellar.events import Delta
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.session import Session
from kvcellar.library.names import EMBEDDED, SEEING
from kvcellar.places import NoPlace, state

_DEMOS = {
    EMBEDDED: "It is a demo model trained on Python's standard library, not an assistant. Try: def read_file(path):",
    SEEING: "It is a demo model that sees shapes and digits, not an assistant. Try: /image FILE, then: What is this?",
}
_HELP = """\
  /help            show this help
  /set NAME VALUE  set a sampling parameter, like /set temperature 0.2
  /image FILE      send an image with the next message
  /show            show memory in use and the sampling parameters
  /why             show what of the last turn came from memory, and why it was not more
  /rewind [N]      remove the last N turns (1)
  /fork NAME       keep the conversation as it is now under a new name, and go on in a copy
  /clear           start a new conversation
  /save NAME       keep the conversation under a name, also for later chats
  /load NAME       continue the conversation of that name
  /list            show what was saved
  /delete NAME     delete what was saved
  /bye             end the chat (also /exit and Ctrl-D)
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
        raw: bool,
        quiet: bool,
    ) -> None:
        """`images` are sent with the first message."""
        self._engine, self._form, self._sampling, self._quiet = engine, form, sampling, quiet
        self._given, self._images = images, list[Path]()  # those of the next message
        self._chat = engine.model.has_chat and not raw and not form.ids
        self._session: Session = engine.session(chat=self._chat)

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
        deltas = self._session.stream(asked, **self._sampling)
        try:
            for part in self._form.texts(deltas):
                click.echo(part, nl=False)
        except KeyboardInterrupt:
            deltas.close()
            click.echo("\n[interrupted; this turn was removed]")
            return
        click.echo()
        if self._session.last is not None and not self._quiet:
            click.secho(cost_line(self._session.last), dim=True)

    def _command(self, verb: str = "", *words: str) -> None:
        if verb == "set" and len(words) == 2:
            changed = {**self._sampling, words[0]: _value(words[1])}
            self._engine.params(**changed)
            self._sampling = changed
            click.echo(f"  {words[0]} is {json.dumps(changed[words[0]])} from now on")
        elif verb == "image" and words:
            self._image(Path(" ".join(words)).expanduser())
        elif verb == "show" and not words:
            self._show()
        elif verb == "rewind" and len(words) < 2:
            self._session.rewind(turns := _value(words[0]) if words else 1)
            click.echo(f"  removed {counted(turns, 'turn')}; {counted(self._session.turns, 'turn')} left")
        elif verb == "clear" and not words:
            self._session.close()
            self._session = self._engine.session(chat=self._chat)
            click.echo("  a new conversation begins")
        elif verb == "why" and not words:
            self._why()
        elif (verb in ("save", "fork", "load", "delete") and len(words) == 1) or (verb == "list" and not words):
            self._named(verb, *words)
        elif verb == "help":
            click.echo(_HELP)
        elif (usage := _usage(verb)) is not None:
            click.echo(f"that is not how the command is used:\n{usage}", err=True)
        else:
            click.echo(f"there is no command /{verb}; /help lists them", err=True)

    def _image(self, path: Path) -> None:
        if not self._chat:
            raise BadRequest("images are for models with a chat template", "image")
        if not path.is_file():
            raise BadRequest(f"{path} is no file", "image")
        image = self._engine.image(path)
        show(image)
        self._images.append(path)
        size = f"{image.width} x {image.height} pixels, {counted(image.input.rows, 'token')}"
        click.echo(f"  {size}; the next message has {counted(len(self._images), 'image')}")

    def _named(self, verb: str, name: str = "") -> None:
        """A command on conversations that are kept by name."""
        if verb == "save":
            self._session.save(name)
            click.echo(f"  saved as {name}: {counted(self._session.turns, 'turn')}")
        elif verb == "fork":
            self._session.save(name, new=True)
            click.echo(f"  /load {name} returns to this point")
        elif verb == "load":
            loaded = self._engine.load(name)
            if loaded.chat != self._chat:
                raise BadRequest(f"{name} is {'a chat' if loaded.chat else 'a text'}, and this is not", "conversation")
            self._session.close()
            self._session = loaded
            click.echo(f"  loaded {name}: {counted(loaded.turns, 'turn')}")
        elif verb == "delete":
            self._engine.conversations.delete(name)
            click.echo(f"  deleted {name}")
        else:
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
        stats = self._engine.stats()
        click.echo(f"  {self._engine.capacity()}")
        for group in stats.groups:
            backend = group.backend or "the model itself"
            click.echo(f"  {group.name}: {group.used} of {group.cells} cells in use, attention by {backend}")
        click.echo(f"  {self._engine.params(**self._sampling)}")


def _usage(verb: str) -> str | None:
    """The line of the help on a command."""
    return next((line for line in _HELP.splitlines() if line.split()[0] == f"/{verb}"), None)


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
