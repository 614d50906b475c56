"""modelfile: reads and writes Modelfiles, in the language that Ollama reads.

    # a comment, if it is at the beginning of a line
    FROM ./my-model
    PARAMETER temperature 0.7
    SYSTEM \"\"\"several
    lines\"\"\"

A keyword in any case, blanks, and a value until the end of the line. A value that begins with quotes (" or \"\"\") ends
at the same quotes at the end of a line, and may have several lines; there are no escapes, so "\\n" is a backslash and
an n. FROM has the name "model", a parameter its own name, MESSAGE the value "role: text".
"""

import codecs
import re
from dataclasses import dataclass, field

from kvcellar.errors import BadRequest, shown

MOST_BYTES = 16 << 20
KEYWORDS = (
    "from", "license", "template", "system", "adapter", "draft", "renderer", "parser", "parameter", "message",
    "requires",
)  # fmt: skip
ROLES = ("system", "user", "assistant")
_NAMES = {"model", *KEYWORDS} - {"from", "parameter"}  # of commands that are no parameters
_BLANKS = re.compile(r"[ \t]*")
_SKIPPED = re.compile(r"(?:[ \t\r\n]++|#[^\r\n]*+)*+")  # blanks, empty lines and comments
_WORD = re.compile(r"[^ \t\r\n]*")
_NEWLINE = re.compile(r"\r\n|\r|\n")
_NAME = re.compile(r"[A-Za-z0-9_]+")
_END = r"[^\S\r\n]*(?=[\r\n]|\Z)"  # blanks up to the end of a line
_CLOSING = {quotes: re.compile(re.escape(quotes) + _END) for quotes in ('"', '"""')}
_REST = re.compile(r"[^\r\n]*")
_BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class ModelfileError(BadRequest):
    """A Modelfile is not as it should be. `line` is where, from 1 on; None if that is no single line."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message if line is None else f"(line {line}): {message}", "modelfile")
        self.line = line


@dataclass(frozen=True, slots=True)
class Command:
    """One command: `name` is "model" for FROM, the name of a parameter, or the keyword in lower case."""

    name: str
    args: str
    line: int | None = field(default=None, compare=False)

    @property
    def is_parameter(self) -> bool:
        return self.name not in _NAMES

    @property
    def keyword(self) -> str:
        if self.is_parameter:
            return f"PARAMETER {self.name}"
        return "FROM" if self.name == "model" else self.name.upper()

    def error(self, message: str) -> ModelfileError:
        """With the line of this command."""
        return ModelfileError(message, self.line)

    def __str__(self) -> str:
        if self.name == "message":
            role, _, text = self.args.partition(": ")
            return f"MESSAGE {role} {_quoted(text)}"
        return f"{self.keyword} {_quoted(self.args)}"


@dataclass(frozen=True, slots=True)
class Modelfile:
    """The commands of a Modelfile, in order; `str()` is a Modelfile with the same commands."""

    commands: tuple[Command, ...]

    def all(self, name: str) -> tuple[Command, ...]:
        return tuple(command for command in self.commands if command.name == name)

    def last(self, name: str) -> Command | None:
        return next((command for command in reversed(self.commands) if command.name == name), None)

    @property
    def parameters(self) -> tuple[Command, ...]:
        return tuple(command for command in self.commands if command.is_parameter)

    def __str__(self) -> str:
        return "".join(f"{command}\n" for command in self.commands)


def parse(source: str | bytes) -> Modelfile:
    """The commands of a Modelfile: text, or bytes in UTF-8 or, with a byte order mark, UTF-16. Raises
    `ModelfileError`."""
    text = _decoded(source) if isinstance(source, bytes) else source.removeprefix("\ufeff")
    if len(text) > MOST_BYTES:
        raise ModelfileError(f"the Modelfile has {len(text)} characters; {MOST_BYTES} are allowed")
    reader = _Reader(text)
    commands: list[Command] = []
    while (command := reader.command()) is not None:
        commands.append(command)
    if not any(command.name == "model" for command in commands):
        raise ModelfileError("no FROM line")
    return Modelfile(tuple(commands))


def _decoded(source: bytes) -> str:
    bom, encoding = next(((bom, name) for bom, name in _BOMS.items() if source.startswith(bom)), (b"", "utf-8"))
    if len(source) > 2 * MOST_BYTES:
        raise ModelfileError(f"the Modelfile has {len(source)} bytes; {MOST_BYTES} are allowed")
    try:
        return source[len(bom) :].decode(encoding)
    except UnicodeDecodeError as error:
        raise ModelfileError(f"the Modelfile is not {encoding.upper()}: byte {error.start + len(bom)}") from None


class _Reader:
    """Reads commands from a text, in time proportional to its length."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._line, self._counted = text, 0, 1, 0

    def command(self) -> Command | None:
        """The next one; None at the end."""
        self._read(_SKIPPED)
        if self._at == len(self._text):
            return None
        line = self._line_here()
        keyword = self._read(_WORD)
        name = keyword.lower()
        if name not in KEYWORDS or self._peek() in "\r\n":
            if name in KEYWORDS and not self._peek():
                raise ModelfileError(f"unexpected EOF: {keyword} has no value", line)
            listed = ", ".join(f'"{one}"' for one in KEYWORDS[:-1])
            raise ModelfileError(f'command must be one of {listed}, or "{KEYWORDS[-1]}"', line)
        self._read(_BLANKS)
        if name == "parameter":
            return Command(self._parameter(line), self._value(line), line)
        if name == "message":
            role = self._read(_WORD)
            if not role or not self._peek().strip("\r\n"):
                raise ModelfileError("unexpected EOF: MESSAGE needs a role and a text", line)
            if role not in ROLES:
                raise ModelfileError('message role must be one of "system", "user", or "assistant"', line)
            return Command(name, f"{role}: {self._value(line)}", line)
        return Command("model" if name == "from" else name, self._value(line), line)

    def _parameter(self, line: int) -> str:
        name = self._read(_WORD)
        if not _NAME.fullmatch(name) or not self._peek().strip("\r\n"):
            raise ModelfileError("unexpected EOF: PARAMETER needs a name and a value", line)
        if name in _NAMES:
            raise ModelfileError(f"there is no parameter {shown(name)}: that is a command", line)
        return name

    def _value(self, line: int) -> str:
        self._read(_BLANKS)
        text, at = self._text, self._at
        quotes = next((q for q in ('"""', '"') if text.startswith(q, at)), "")
        if not quotes:
            return self._read(_REST).strip()
        closing = _CLOSING[quotes].search(text, at + len(quotes))
        if closing is None:
            raise ModelfileError(f"unexpected EOF: the value that begins with {quotes} here does not end with it", line)
        self._at = closing.end()
        return text[at + len(quotes) : closing.start()]

    def _read(self, pattern: re.Pattern[str]) -> str:
        """What matches here, which may be nothing."""
        found = pattern.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return found.group()

    def _peek(self) -> str:
        """The next character; empty at the end."""
        return self._text[self._at : self._at + 1]

    def _line_here(self) -> int:
        self._line += len(_NEWLINE.findall(self._text, self._counted, self._at))
        self._counted = self._at
        return self._line


def _quoted(value: str) -> str:
    """The value as a Modelfile has it. Raises `BadRequest` if none can: one of its lines ends in three quotes."""
    for written in (value, f'"{value}"', f'"""{value}"""'):
        try:
            read = parse(f"FROM x\nSYSTEM {written}\n").commands[1:]
        except ModelfileError:
            continue
        if written and read == (Command("system", value),):
            return written
    raise BadRequest('no Modelfile can have this value: one of its lines ends in """', "modelfile")
