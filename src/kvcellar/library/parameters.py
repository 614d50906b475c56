"""parameters: what PARAMETER sets, by the names of Ollama and by those of kvcellar.

A name of Ollama is stored as ours: fields of `SamplingParams`, `context` and `draft_depth`. What is not known or out of
bounds is refused by name. What Ollama knows and kvcellar has no use for is refused if it would change what is
generated, unless its value means "off"; if it only says how hardware is used, it is accepted with a note, and not
stored.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from kvcellar.errors import BadRequest, shown
from kvcellar.library.modelfile import Command, ModelfileError
from kvcellar.sampling_params import PARAMETERS, SamplingParams, names_in, renamed
from kvcellar.values import MOST_DEPTH, Flag, Items, Kind, Real, Whole

_OWN = {"context": Whole(1, 1 << 30), "draft_depth": Whole(0, MOST_DEPTH)}
_SAMPLING = names_in("modelfile")
_OLLAMAS = {"context": "num_ctx", "draft_depth": "draft_num_predict", **renamed("modelfile")}
OWN = {name: ours for ours, name in _OLLAMAS.items()}  # names of Ollama, and ours
_UNUSED = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "use_mmap", "use_mlock", "num_thread",
    "vocab_only", "logits_all", "embedding_only", "num_gqa",
)  # fmt: skip
_OFF: dict[str, tuple[str, ...]] = {  # what would change the text, and the values with which it does not
    "mirostat": ("0",),
    "mirostat_tau": (),
    "mirostat_eta": (),
    "tfs_z": ("1", "1.0"),
    "penalize_newline": ("true",),
    "rope_frequency_base": (),
    "rope_frequency_scale": (),
}
_WHOLE = re.compile(r"[+-]?\d{1,20}", re.ASCII)
_REAL = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf)", re.ASCII | re.IGNORECASE)
_ESCAPE = re.compile(r"\\[nrt]")
_TRUE, _FALSE = ("1", "t", "true"), ("0", "f", "false")


def _whole(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ValueError("a whole number")
    return int(text)


def _real(text: str) -> float:
    if not _REAL.fullmatch(text):
        raise ValueError("a number")
    return float(text)


def _flag(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("true or false")
    return text.lower() in _TRUE


_KINDS: Mapping[type[Kind], Callable[[str], Any]] = {Whole: _whole, Real: _real, Flag: _flag, Items: str}
_READ: Mapping[str, Callable[[str], Any]] = {
    "context": _whole,
    "draft_depth": _whole,
    **{one.name: _KINDS[type(one.kind)] for one in _SAMPLING.values()},
}
NAMES = (*_READ, *OWN)  # that PARAMETER takes


def parameters(commands: Iterable[Command]) -> tuple[dict[str, Any], list[str]]:
    """The values by our names, and notes on what is not used. Of the same name the last counts; `stop` adds one. None
    lifts an inherited limit, and a `draft_depth` of 0 is without drafts. Raises `ModelfileError`."""
    found: dict[str, Any] = {}
    notes: list[str] = []
    for command in commands:
        if _is_unused(command):
            notes.append(f"PARAMETER {command.name} is not used: kvcellar has no such setting of a model")
            continue
        name = OWN.get(command.name, command.name)
        if name not in _READ:
            raise command.error(f"there is no parameter {shown(command.name)}; there are {', '.join(sorted(NAMES))}")
        value = _value(command, name)
        if name == "stop" and _ESCAPE.search(value):
            notes.append(
                f"PARAMETER stop {value} has a backslash, which is kept as it is: a Modelfile has no escapes. "
                f"Write a new line as one, between quotes"
            )
        if name == "draft_depth":
            value = max(value, 0)
        if name == "max_tokens" and value in (-1, -2):
            found[name] = None
        else:
            found[name] = [*found.get(name, []), value] if name == "stop" else value
            _check(found, name, command)
    return found, notes


def merged(old: Mapping[str, Any], new: Mapping[str, Any], given: Sequence[Command]) -> dict[str, Any]:
    """Inherited values with `new` ones, which the commands `given` set, in their place. Raises `BadRequest` if they do
    not fit together, with the line of the last command that is a part of it."""
    found = {name: value for name, value in {**old, **new}.items() if value is not None}
    try:
        SamplingParams(**sampling(found))
    except BadRequest as error:
        names = [OWN.get(one.name, one.name) for one in given]
        at = max((i for i, name in enumerate(names) if name in error.message), default=None)
        if at is None:
            raise BadRequest(f"with the parameters of FROM: {error.message}", error.param) from error
        raise given[at].error(f"PARAMETER {given[at].name}: {error.message}") from error
    return found


def from_json(given: Mapping[str, Any]) -> tuple[Command, ...]:
    """Commands for the parameters of a JSON object, whose values may have their own type. Raises `ModelfileError`."""
    made: list[Command] = []
    for name, value in given.items():
        if not Command(name, "").is_parameter:
            raise ModelfileError(f"there is no parameter {shown(name)}; there are {', '.join(sorted(NAMES))}")
        for one in _each(value):
            if not isinstance(one, str | int | float):
                raise ModelfileError(f"parameter {shown(name)} is {shown(one)}; a text or a number is needed")
            made.append(Command(name, one if isinstance(one, str) else json.dumps(one)))
    return tuple(made)


def commands(values: Mapping[str, Any]) -> tuple[Command, ...]:
    """What sets these values, under the names that Ollama has, if it has one."""
    return tuple(Command(name, one if isinstance(one, str) else json.dumps(one)) for name, one in _named(values))


def listed(values: Mapping[str, Any]) -> str:
    """A line for each, as Ollama lists them: texts are quoted."""
    return "\n".join(f"{name:<30} {json.dumps(one, ensure_ascii=False)}" for name, one in _named(values))


def _named(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each value, under the name that Ollama has for it, if it has one."""
    for name, value in sorted(values.items()):
        for one in _each(value):
            yield _OLLAMAS.get(name, name), one


def _each(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are fields of `SamplingParams`."""
    return {name: value for name, value in values.items() if name in PARAMETERS}


def _is_unused(command: Command) -> bool:
    if command.name not in _OFF:
        return command.name in _UNUSED
    if command.args.lower() in _OFF[command.name]:
        return True
    off = f", except for {_OFF[command.name][0]}" if _OFF[command.name] else ""
    raise command.error(f"PARAMETER {command.name} is not supported{off}; remove it")


def _value(command: Command, name: str) -> Any:
    try:
        return _READ[name](command.args)
    except ValueError as error:
        raise command.error(f"PARAMETER {command.name} is {shown(command.args)}; {error} is needed") from None


def _check(found: Mapping[str, Any], name: str, command: Command) -> None:
    """Raise `ModelfileError` if the value is out of its bounds."""
    try:
        if name in _OWN:
            _OWN[name].check(name, found[name])
            return
        given: dict[str, Any] = {name: found[name], **({"max_tokens": 1} if name == "shift" else {})}
        SamplingParams(**given)
    except BadRequest as error:
        raise command.error(f"PARAMETER {command.name}: {error.message}") from None
