"""adapter_config: which layers an adapter changes, and how, by its adapter_config.json as `peft` writes it.

Only LoRA is supported: y = W x + s B A x, with s = alpha / r, or alpha / sqrt(r). Every field is followed, is without
effect after training, or is refused with the reason. `peft` gives these fields their meaning.

Patterns of names of modules are not trusted, and Python's own matcher can take time exponential in the length of a
name. Here the set of all ends of a match is computed for each part of a pattern and each position of the name, once:
the time is polynomial, and `Effort` bounds it. Patterns are parsed by Python's own parser; back references, flags and
atomic groups are refused.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, ValidationError, convert

from kvcellar.engine.models.weights.config_file import read_object
from kvcellar.errors import ModelRefused, shown

T = TypeVar("T")
MOST = 10_000  # characters of a pattern
EFFORT = 20_000_000  # ends of parts of patterns that are found for one adapter; a few seconds
_BRANCHES = frozenset("*+?{|")  # where Python's matcher may try again
_parser: Any = re._parser  # pyright: ignore[reportAttributeAccessIssue] - the only parser of these patterns
_op: Any = re._constants  # pyright: ignore[reportAttributeAccessIssue]
_CHARACTERS = (_op.LITERAL, _op.NOT_LITERAL, _op.ANY, _op.IN)


@dataclass(slots=True)
class Effort:
    """How many ends of parts may still be found, of all patterns that have it."""

    left: int = EFFORT


class NamePattern:
    """A pattern of names. Raises `ModelRefused` where it is no pattern, or not a supported one."""

    def __init__(self, pattern: str, what: str, effort: Effort) -> None:
        """`what` names the field that has it."""
        self._pattern, self._what, self._effort = pattern, what, effort
        if len(pattern) > MOST:
            raise ModelRefused(f"{what} has a pattern of {len(pattern)} characters; {MOST} are allowed")
        try:
            self._plain = None if _BRANCHES & set(pattern) else re.compile(pattern)
            _supported(self._parts, self)
        except (re.error, RecursionError, OverflowError, ValueError) as error:
            raise ModelRefused(f"{what}: {shown(pattern)} is not a regular expression: {error}") from error

    def matches(self, name: str) -> bool:
        """Whether the pattern matches all of a name, or what follows one of its dots."""
        return self._matches(name, (0, *(at + 1 for at, char in enumerate(name) if char == ".")))

    def fullmatch(self, name: str) -> bool:
        """Whether the pattern matches all of a name."""
        return self._matches(name, (0,))

    def _matches(self, name: str, starts: Iterable[int]) -> bool:
        if self._plain is not None:
            return any(self._plain.fullmatch(name, at) is not None for at in starts)
        ends = _Ends(name, self._effort)
        try:
            return any(len(name) in ends.of(self._parts, at) for at in starts)
        except TimeoutError:
            raise ModelRefused(f"{self._what}: {shown(self._pattern)} takes too long to match. Simplify it") from None

    @cached_property
    def _parts(self) -> Any:
        parsed = _parser.parse(self._pattern)
        if parsed.state.flags & ~re.UNICODE:
            self.refuse("flags")
        return parsed

    def refuse(self, what: str) -> None:
        raise ModelRefused(f"{self._what}: {shown(self._pattern)} has {what}, which are not supported")


def _supported(parts: Iterable[Any], pattern: NamePattern) -> None:
    for op, value in parts:
        if op in (_op.MAX_REPEAT, _op.MIN_REPEAT):
            _supported(value[2], pattern)
        elif op is _op.SUBPATTERN:
            if value[1] or value[2]:
                pattern.refuse("flags")
            _supported(value[3], pattern)
        elif op is _op.BRANCH:
            for branch in value[1]:
                _supported(branch, pattern)
        elif op in (_op.ASSERT, _op.ASSERT_NOT):
            _supported(value[1], pattern)
        elif op not in (*_CHARACTERS, _op.AT):
            pattern.refuse("back references or atomic groups")


class _Ends:
    """Where matches of the parts of one pattern end in one name."""

    def __init__(self, name: str, effort: Effort) -> None:
        self._name, self._effort = name, effort
        self._known: dict[tuple[int, int], frozenset[int]] = {}  # by identity of the parts, and the start
        self._stops: dict[int, list[int]] = {}  # of parts that are one character: the first position without it

    def of(self, parts: Any, start: int) -> frozenset[int]:
        """The ends of all matches of parts in a row that begin at `start`."""
        key = id(parts), start
        if key not in self._known:
            at = frozenset({start})
            for op, value in parts:
                at = frozenset(end for one in at for end in self._one(op, value, one))
            self._known[key] = at
        found = self._known[key]
        self._effort.left -= 1 + len(found)
        if self._effort.left < 0:
            raise TimeoutError
        return found

    def _one(self, op: Any, value: Any, at: int) -> Iterable[int]:
        if op in (_op.MAX_REPEAT, _op.MIN_REPEAT):
            least, most, repeated = value
            return self._repeated(least, most, repeated, at)
        if op is _op.SUBPATTERN:
            return self.of(value[3], at)
        if op is _op.BRANCH:
            return [end for branch in value[1] for end in self.of(branch, at)]
        if op is _op.AT:
            return (at,) if _AT[value](self._name, at) else ()
        if op in (_op.ASSERT, _op.ASSERT_NOT):
            direction, ahead = value
            return (at,) if self._looks(direction, ahead, at) == (op is _op.ASSERT) else ()
        return (at + 1,) if at < len(self._name) and _is(op, value, self._name[at]) else ()

    def _repeated(self, least: int, most: Any, parts: Any, start: int) -> Iterable[int]:
        """Among more repeats than the name has characters one is empty, so that still more change nothing."""
        if len(parts) == 1 and parts[0][0] in _CHARACTERS:
            stop = self._stop(parts)[start]
            return range(start + least, min(stop, start + int(most)) + 1)
        at, found, n = frozenset({start}), set[int](), len(self._name) + 1
        for count in range(min(int(most), n) + 1):
            if count >= min(least, n):
                found |= at
            at = frozenset(end for one in at for end in self.of(parts, one))
        return found

    def _stop(self, parts: Any) -> list[int]:
        """For each position, the first one from there on that has another character."""
        if id(parts) not in self._stops:
            stops, (op, value) = [len(self._name)] * (len(self._name) + 1), parts[0]
            for at in reversed(range(len(self._name))):
                stops[at] = stops[at + 1] if _is(op, value, self._name[at]) else at
            self._stops[id(parts)] = stops
        return self._stops[id(parts)]

    def _looks(self, direction: int, parts: Any, at: int) -> bool:
        if direction > 0:
            return bool(self.of(parts, at))
        return any(at in self.of(parts, start) for start in range(at + 1))


def _is(op: Any, value: Any, char: str) -> bool:
    if op is _op.ANY:
        return char != "\n"
    if op is _op.IN:
        negated = value[0][0] is _op.NEGATE
        return negated != any(_is(kind, of, char) for kind, of in value[negated:])
    if op is _op.RANGE:
        return value[0] <= ord(char) <= value[1]
    if op is _op.CATEGORY:
        return _CATEGORIES[value](char)
    return (ord(char) == value) == (op is _op.LITERAL)


def _word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _boundary(name: str, at: int) -> bool:
    return (at > 0 and _word(name[at - 1])) != (at < len(name) and _word(name[at]))


_CATEGORIES: Mapping[Any, Callable[[str], bool]] = {
    _op.CATEGORY_DIGIT: str.isdecimal,
    _op.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    _op.CATEGORY_SPACE: str.isspace,
    _op.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    _op.CATEGORY_WORD: _word,
    _op.CATEGORY_NOT_WORD: lambda char: not _word(char),
}
_AT: Mapping[Any, Callable[[str, int], bool]] = {
    _op.AT_BEGINNING: lambda name, at: at == 0,
    _op.AT_BEGINNING_STRING: lambda name, at: at == 0,
    _op.AT_END: lambda name, at: at == len(name),
    _op.AT_END_STRING: lambda name, at: at == len(name),
    _op.AT_BOUNDARY: _boundary,
    _op.AT_NON_BOUNDARY: lambda name, at: not _boundary(name, at),
}


CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
MOST_PATTERNS = 100_000
MOST_RANK = 1 << 20
Name = Annotated[str, Meta(min_length=1)]
Rank = Annotated[int, Meta(ge=1, le=MOST_RANK)]
Alpha = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]  # finite
Layer = Annotated[int, Meta(ge=0)]
LayerList = Annotated[str, Meta(pattern=r"^[\w.]*$")]


class Fields(Struct, kw_only=True):
    """The fields that are followed, as the file has them."""

    base_model_name_or_path: str | None = None
    r: Rank = 8
    lora_alpha: Alpha = 8.0
    use_rslora: bool | None = None
    target_modules: Name | list[Name]
    exclude_modules: str | list[Name] | None = None
    layers_to_transform: Layer | list[Layer] | None = None
    layers_pattern: LayerList | list[LayerList] | None = None
    rank_pattern: Annotated[dict[str, Rank], Meta(max_length=MOST_PATTERNS)] | None = None
    alpha_pattern: Annotated[dict[str, Alpha], Meta(max_length=MOST_PATTERNS)] | None = None


_WITHOUT_EFFECT = frozenset({  # of training, of the form of the base weights, or of features that other fields select
    "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out", "inference_mode",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config",
})  # fmt: skip
_REFUSED = {  # fields that must not be set, and what they would do
    "use_dora": "it scales the layers' own weights (DoRA)",
    "lora_bias": "it has biases of its own",
    "modules_to_save": "it replaces whole modules of the model",
    "trainable_token_indices": "it changes embeddings",
    "target_parameters": "it changes parameters that are no linear layers",
    "layer_replication": "it repeats layers of the model",
    "alora_invocation_tokens": "it applies to a part of the text only (aLoRA)",
    "use_qalora": "it reads inputs in groups (QALoRA)",
    "use_bdlora": "its matrices are block-diagonal (BD-LoRA)",
    "arrow_config": "it selects among other adapters (Arrow)",
    "megatron_config": "it is for layers of Megatron",
}
_OWN_INIT = ("gaussian", "orthogonal", "eva")  # initial values that leave the weights of the model as they are


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter's config says of the layers of a model."""

    base: str  # the model that it was made for, as its author named it
    rank: int
    alpha: float
    rslora: bool
    targets: frozenset[str] | NamePattern | None  # None: all linear layers but the output head
    excluded: frozenset[str] | NamePattern
    layers: frozenset[int] | None  # numbers of the layers that are changed; None: all
    layer_lists: tuple[str, ...]  # names of the lists that layers are numbered in; none: any
    ranks: Sequence[tuple[NamePattern, int]]
    alphas: Sequence[tuple[NamePattern, float]]

    def selects(self, module: str) -> bool:
        """Whether a module is to be changed, but for `ALL_LINEAR`, which depends on its kind."""
        if _named(self.excluded, module):
            return False
        if self.targets is None or isinstance(self.targets, NamePattern) or module in self.targets:
            return self.targets is None or _named(self.targets, module)
        return _named(self.targets, module) and (self.layers is None or self._layer(module) in self.layers)

    def _layer(self, module: str) -> int | None:
        lists = "|".join(map(re.escape, self.layer_lists)) or r"[^.]*"
        before = r"(?:^|.*?\.)" if self.layer_lists else r".*?\."
        found = re.match(rf"{before}(?:{lists})\.(\d+)\.", module)
        return int(found[1]) if found is not None else None

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks if pattern.matches(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of its matrices is multiplied by."""
        rank = self.rank_of(module)
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.matches(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _named(names: frozenset[str] | NamePattern, module: str) -> bool:
    if isinstance(names, NamePattern):
        return names.fullmatch(module)
    parts = module.split(".")
    return any(".".join(parts[start:]) in names for start in range(len(parts)))


def adapter_config(directory: Path) -> AdapterConfig:
    """Of an adapter's directory. Raises `ModelRefused`, naming the field."""
    if not (directory / CONFIG).is_file():
        raise ModelRefused(f"{directory} has no {CONFIG}, so it is no adapter in the form of peft")
    raw = read_object(directory / CONFIG)
    _check_kind(raw)
    try:
        fields = convert(raw, Fields)
    except ValidationError as error:
        raise ModelRefused(f"{CONFIG}: {error}") from error
    targets, excluded, effort = fields.target_modules, fields.exclude_modules or [], Effort()
    everywhere = isinstance(targets, str) and targets.lower() == ALL_LINEAR
    if isinstance(targets, str) and fields.layers_to_transform not in (None, []):
        raise ModelRefused("layers_to_transform needs a list of target_modules, not a pattern")
    return AdapterConfig(
        base=fields.base_model_name_or_path or "",
        rank=fields.r,
        alpha=fields.lora_alpha,
        rslora=bool(fields.use_rslora),
        targets=None if everywhere else _modules("target_modules", targets, effort),
        excluded=_modules("exclude_modules", excluded, effort),
        layers=frozenset(_listed(fields.layers_to_transform)) or None,
        layer_lists=tuple(filter(None, _listed(fields.layers_pattern))),
        ranks=[(NamePattern(one, "rank_pattern", effort), rank) for one, rank in (fields.rank_pattern or {}).items()],
        alphas=[(NamePattern(one, "alpha_pattern", effort), a) for one, a in (fields.alpha_pattern or {}).items()],
    )


def _modules(field: str, value: str | list[str], effort: Effort) -> frozenset[str] | NamePattern:
    return NamePattern(value, field, effort) if isinstance(value, str) else frozenset(value)


def _listed(value: T | list[T] | None) -> list[T]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _check_kind(raw: Mapping[str, Any]) -> None:
    if (kind := raw.get("peft_type")) != "LORA":
        raise ModelRefused(f"peft_type is {shown(kind)}; only LORA is supported")
    if (task := raw.get("task_type")) not in (None, "CAUSAL_LM"):
        raise ModelRefused(f"task_type is {shown(task)}; only adapters for CAUSAL_LM are supported")
    if (bias := raw.get("bias", "none")) != "none":
        raise ModelRefused(f"bias is {shown(bias)}: it replaces biases of the model. Only none is supported")
    initial = raw.get("init_lora_weights", True)
    if not isinstance(initial, bool) and initial not in _OWN_INIT:
        raise ModelRefused(
            f"init_lora_weights is {shown(initial)}, which changes weights of the model. Convert the adapter with "
            f"peft: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    for field, reason in _REFUSED.items():
        if raw.get(field):
            raise ModelRefused(f"{field} is set: {reason}, which is not supported")
    checked = {"peft_type", "task_type", "bias", "init_lora_weights"}
    known = checked.union(Fields.__struct_fields__, _WITHOUT_EFFECT, _REFUSED)
    if strange := sorted(name for name, value in raw.items() if value and name not in known):
        raise ModelRefused(f"{CONFIG} sets {shown(strange[0])}, which is unknown and could change what it computes")
