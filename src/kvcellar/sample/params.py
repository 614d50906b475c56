"""params: the sampling parameters of a request, validated when they are created, and immutable.

Token ids are compared with the vocabulary later, by `check_ids`, when the model is loaded.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypedDict

from kvcellar.errors import BadRequest, shown
from kvcellar.sample.constraint import Constraint

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_NGRAM = 64  # tokens of an n-gram, and of a sequence that is banned or biased
MAX_SEQUENCES = 4096  # that are banned or biased
MAX_IDS = 2**16  # suppressed tokens
MAX_SEQUENCE_BIAS = 1e4
MAX_STOP_IDS = 4096
MAX_BIASES = 2**14  # each costs time in every step, for all requests in it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Raises `BadRequest` with the field's name for invalid values.

    `stop` may also be one string, tuples may be lists, `logit_bias` any mapping, `sequence_bias` a mapping or pairs of
    token ids and a bias; the record has immutable copies. Parameters that vLLM does not have are named as in
    transformers' GenerationConfig.
    """

    max_tokens: int | None = None  # most new tokens; None: until the context is full
    min_tokens: int = 0  # before this many tokens, end-of-text and stop ids are banned and stop strings ignored
    min_length: int = 0  # as min_tokens, counting the prompt too
    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # keep only this many of the most likely tokens; 0: all
    top_p: float = 1.0  # keep only the fewest tokens that have this probability together
    min_p: float = 0.0  # drop tokens less likely than this share of the most likely one
    typical_p: float = 1.0  # as top_p, with the most typical tokens first (arXiv 2202.00666)
    top_h: float | None = None  # keep the first of the 100 best with this share of their entropy; None: off
    epsilon_cutoff: float = 0.0  # keep only tokens with this probability
    eta_cutoff: float = 0.0  # as epsilon_cutoff, lower where the entropy is high (arXiv 2210.15191)
    repetition_penalty: float = 1.0  # over prompt and completion, as in the CTRL paper (arXiv 1909.05858)
    presence_penalty: float = 0.0  # over the completion, as OpenAI defines it
    frequency_penalty: float = 0.0  # over the completion, as OpenAI defines it
    repeat_last_n: int = -1  # penalties read this many of the last tokens; 0: none; -1: all
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logit of a token
    # added to the logit of the last id after the others
    sequence_bias: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    no_repeat_ngram_size: int = 0  # no n-gram of this size occurs twice in prompt and completion; 0: off
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # banned sequences of token ids
    suppress_tokens: tuple[int, ...] = ()  # banned tokens
    begin_suppress_tokens: tuple[int, ...] = ()  # tokens banned as the first of a completion
    # (tokens, factor): from this many tokens on, the end becomes more likely by the factor per token
    exponential_decay_length_penalty: tuple[int, float] | None = None
    seed: int | None = None  # makes sampling reproducible; None: a new seed for each request
    n: int = 1  # number of completions, which share the K/V of the prompt
    logprobs: int | None = None  # return log-probabilities of the token and of this many of the most likely
    # the same of every token of the prompt, which is computed again for that; `max_tokens` may be 0 then
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()  # the completion ends before the first of these strings
    stop_token_ids: tuple[int, ...] = ()  # the completion ends at any of these tokens
    ignore_eos: bool = False  # continue past the end of text
    shift: bool = False  # at the end of the context, drop the oldest tokens and continue; else end
    # with shift: first tokens, including BOS, that are never dropped; at most the context minus one; -1: the prompt
    num_keep: int = 0
    constraint: Constraint | None = None  # what each completion has to match; None: any text

    def __post_init__(self) -> None:
        for name, (low, high) in _WHOLE.items():
            if (value := getattr(self, name)) is not None or name not in _OPTIONAL:
                self._set(name, _whole(name, value, self._lowest(name, low), high))
        for name, (low, high, above) in _REAL.items():
            if (value := getattr(self, name)) is not None or name not in _OPTIONAL:
                self._set(name, _real(name, value, low, high, above=above))
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            self._set(name, _ids(name, getattr(self, name), MAX_IDS))
        self._set("stop_token_ids", _stop_ids(self.stop_token_ids))
        self._set("stop", _stops(self.stop))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("bad_words_ids", _phrases(self.bad_words_ids))
        self._set("sequence_bias", _sequence_biases(self.sequence_bias))
        self._set("exponential_decay_length_penalty", _decay(self.exponential_decay_length_penalty))
        for name in ("ignore_eos", "shift"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} is True or False, not {shown(getattr(self, name))}", name)
        self._set("constraint", _constraint(self))
        if self.shift and self.max_tokens is None:
            raise BadRequest("shift needs max_tokens: with it, the context does not end a completion", "max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}", "min_tokens")

    def _lowest(self, name: str, low: int) -> int:
        """Where the prompt is scored, it may be all that is wanted."""
        return 0 if name == "max_tokens" and self.prompt_logprobs is not None else low

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, where each has its comment, as keyword arguments."""

    max_tokens: int | None
    min_tokens: int
    min_length: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_h: float | None
    epsilon_cutoff: float
    eta_cutoff: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    logit_bias: Mapping[int, float]
    sequence_bias: Mapping[tuple[int, ...], float]
    no_repeat_ngram_size: int
    bad_words_ids: Sequence[Sequence[int]]
    suppress_tokens: Sequence[int]
    begin_suppress_tokens: Sequence[int]
    exponential_decay_length_penalty: tuple[int, float] | None
    seed: int | None
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    shift: bool
    num_keep: int
    constraint: Constraint | None


_MOST = 2**31 - 1
_LENGTHENING = ("ignore_eos", "min_tokens", "min_length")
_OPTIONAL = {"max_tokens", "logprobs", "prompt_logprobs", "seed", "top_h"}  # may be None
_WHOLE = {  # the lowest and the highest value
    "max_tokens": (1, _MOST), "min_tokens": (0, _MOST), "min_length": (0, _MOST), "top_k": (0, _MOST),
    "no_repeat_ngram_size": (0, MAX_NGRAM), "num_keep": (-1, _MOST), "repeat_last_n": (-1, _MOST),
    "n": (1, MAX_CHOICES), "logprobs": (0, MAX_LOGPROBS), "prompt_logprobs": (0, MAX_LOGPROBS),
    "seed": (-(2**63), 2**64 - 1),
}  # fmt: skip
_REAL = {  # the lowest and the highest value, and whether the lowest itself is excluded
    "temperature": (0.0, 100.0, False), "top_p": (0.0, 1.0, True), "min_p": (0.0, 1.0, False),
    "typical_p": (0.0, 1.0, True), "top_h": (0.0, 1.0, True), "epsilon_cutoff": (0.0, 1.0, False),
    "eta_cutoff": (0.0, 1.0, False), "repetition_penalty": (0.0, 100.0, True),
    "presence_penalty": (-2.0, 2.0, False), "frequency_penalty": (-2.0, 2.0, False),
}  # fmt: skip


def bounds(name: str) -> dict[str, float] | None:
    """The bounds of a number as JSON Schema writes them; None for what is no single number."""
    if name in _WHOLE:
        low, high = _WHOLE[name]
        return {"minimum": low, "maximum": high}
    if name in _REAL:
        low, high, above = _REAL[name]
        return {"exclusiveMinimum" if above else "minimum": low, "maximum": high}
    return None


def _plain(value: Any) -> Any:
    """An int or a float of a subclass, whose comparisons may be overridden, as a plain one; all else as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else value


def _whole(name: str, value: object, low: int, high: int) -> int:
    plain = _plain(value)
    if type(plain) is not int or not low <= plain <= high:
        raise BadRequest(f"{name} must be a whole number from {low} to {high}, not {_sent(value)}", name)
    return plain


def _real(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """NaN is between no two numbers."""
    plain = _plain(value)
    if type(plain) not in (int, float) or not low <= plain <= high or (above and plain == low):
        border = "above" if above else "from"
        raise BadRequest(f"{name} must be a finite number {border} {low:g} to {high:g}, not {_sent(value)}", name)
    return plain


def _ids(name: str, ids: object, most: int, *, least: int = 0) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or not least <= len(ids) <= most:
        raise BadRequest(f"{name} must have {least} to {most} token ids in a list", name)
    return tuple(_whole(name, token, 0, _MOST) for token in ids)


def _stop_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple):
        raise BadRequest(f"stop_token_ids must be token ids, not {shown(ids)}", "stop_token_ids")
    if len(ids) > MAX_STOP_IDS:
        raise BadRequest(f"stop_token_ids has {len(ids)} ids; {MAX_STOP_IDS} are allowed", "stop_token_ids")
    return _ids("stop_token_ids", ids, MAX_STOP_IDS)


def _stops(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple):
        raise BadRequest(f"stop must be strings, not {shown(texts)}", "stop")
    if len(texts) > MAX_STOPS:
        raise BadRequest(f"stop has {len(texts)} strings; {MAX_STOPS} are allowed", "stop")
    if not all(isinstance(text, str) and 1 <= len(text) <= MAX_STOP_CHARS for text in texts):
        raise BadRequest(f"every stop string needs 1 to {MAX_STOP_CHARS} characters", "stop")
    return tuple(_unicode("stop", str.__str__(text)) for text in texts)


def _unicode(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{name} is not Unicode text: half of a surrogate pair at character {error.start}", name
        ) from None
    return text


def _biases(given: object) -> Mapping[int, float]:
    if not isinstance(given, Mapping):
        raise BadRequest(f"logit_bias must map token ids to numbers, not {shown(given)}", "logit_bias")
    if len(given) > MAX_BIASES:
        raise BadRequest(f"logit_bias has {len(given)} entries; {MAX_BIASES} are allowed", "logit_bias")
    return MappingProxyType(
        {
            _whole("logit_bias", token, 0, _MOST): _real("logit_bias", bias, -100.0, 100.0)
            for token, bias in given.items()
        }
    )


def _phrases(given: object) -> tuple[tuple[int, ...], ...]:
    name = "bad_words_ids"
    if not isinstance(given, list | tuple) or len(given) > MAX_SEQUENCES:
        raise BadRequest(f"{name} must be at most {MAX_SEQUENCES} lists of token ids", name)
    return tuple(_ids(name, ids, MAX_NGRAM, least=1) for ids in given)


def _sequence_biases(given: object) -> Mapping[tuple[int, ...], float]:
    name = "sequence_bias"
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, list | tuple) or len(pairs) > MAX_SEQUENCES or not all(map(_is_pair, pairs)):
        raise BadRequest(f"{name} must be at most {MAX_SEQUENCES} pairs of a list of token ids and a number", name)
    return MappingProxyType(
        {
            _ids(name, ids, MAX_NGRAM, least=1): _real(name, bias, -MAX_SEQUENCE_BIAS, MAX_SEQUENCE_BIAS)
            for ids, bias in pairs
        }
    )


def _constraint(params: SamplingParams) -> Constraint | None:
    """A copy, checked again. Raises `BadRequest` beside what says otherwise where an answer ends."""
    constraint = params.constraint
    if constraint is None:
        return None
    if not isinstance(constraint, Constraint):
        raise BadRequest(f"constraint is Constraint(...), not {shown(constraint)}", "constraint")
    for name in _LENGTHENING:
        if getattr(params, name):
            raise BadRequest(f"{name} cannot be combined with a constraint, which says where an answer ends", name)
    return replace(constraint)


def _decay(given: Any) -> tuple[int, float] | None:
    name = "exponential_decay_length_penalty"
    if given is None:
        return None
    if not _is_pair(given):
        raise BadRequest(f"{name} must be a pair: a number of tokens, and a factor", name)
    return _whole(name, given[0], 0, _MOST), _real(name, given[1], 0.0, 100.0, above=True)


def _sent(value: object) -> str:
    """A value as the request has it: None and booleans as in JSON."""
    return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def merged(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """`defaults`, with the fields of a request in place of them. A default of `min_tokens` is lowered to the
    `max_tokens` of the request, and beside a constraint no default makes completions longer."""
    if given.get("constraint") is not None:
        given = {**dict.fromkeys(_LENGTHENING, 0), "ignore_eos": False, **given}
    most = given.get("max_tokens")
    if "min_tokens" not in given and isinstance(most, int) and 0 <= most < defaults.min_tokens:
        given = {**given, "min_tokens": most}
    return replace(defaults, **given)


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise `BadRequest` if `params` names a token that a model with `vocab_size` tokens does not have."""
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "suppress_tokens": params.suppress_tokens,
        "begin_suppress_tokens": params.begin_suppress_tokens,
        "bad_words_ids": (token for ids in params.bad_words_ids for token in ids),
        "sequence_bias": (token for ids in params.sequence_bias for token in ids),
    }
    for name, ids in named.items():
        for token in ids:
            if token >= vocab_size:
                raise BadRequest(f"{name} names token {token}; this model's tokens are 0 to {vocab_size - 1}", name)
