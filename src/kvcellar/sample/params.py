"""params: what a request may say about how its tokens are chosen. Validated when it is made; frozen afterwards.

Whether token ids are in the vocabulary is not known here: `check_ids` says so once the model is.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypedDict

from kvcellar.errors import BadRequest, shown

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_NGRAM = 64  # tokens of an n-gram, and of a sequence that is forbidden or biased
MAX_SEQUENCES = 4096  # that are forbidden, or biased
MAX_IDS = 2**16  # tokens that are suppressed
MAX_SEQUENCE_BIAS = 1e4
MAX_STOP_IDS = 4096
MAX_BIASES = 2**14  # each costs time in every step, for all requests in it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Raises `BadRequest`, naming the field, for anything out of its bounds.

    `stop` may also be given as one string, tuples as lists, `logit_bias` as any mapping, `sequence_bias` as a mapping
    or as pairs of token ids and a bias: the record holds its own, unchangeable copies. What vLLM does not have is named
    as in transformers' GenerationConfig.
    """

    max_tokens: int | None = None  # most new tokens; None: until the context is full
    min_tokens: int = 0  # before this many tokens, end-of-text and stop ids are banned and stop strings ignored
    min_length: int = 0  # as min_tokens, counting the prompt too
    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # keep only this many of the most likely tokens; 0: all
    top_p: float = 1.0  # keep only the fewest tokens that have this probability together
    min_p: float = 0.0  # keep only tokens with this share of the highest probability
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
    stop: tuple[str, ...] = ()  # the completion ends before the first of these strings
    stop_token_ids: tuple[int, ...] = ()  # the completion ends at any of these tokens
    ignore_eos: bool = False  # continue past the end of text
    shift: bool = False  # at the end of the context, drop the oldest tokens and continue; else end
    # with shift: first tokens, including BOS, that are never dropped; at most the context minus one; -1: the prompt
    num_keep: int = 0

    def __post_init__(self) -> None:
        self._whole("max_tokens", self.max_tokens, 1, 2**31 - 1, optional=True)
        self._whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        self._whole("top_k", self.top_k, 0, 2**31 - 1)
        self._whole("min_length", self.min_length, 0, 2**31 - 1)
        self._whole("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, MAX_NGRAM)
        self._whole("num_keep", self.num_keep, -1, 2**31 - 1)
        self._whole("repeat_last_n", self.repeat_last_n, -1, 2**31 - 1)
        self._whole("n", self.n, 1, MAX_CHOICES)
        self._whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        self._whole("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        self._real("temperature", self.temperature, 0.0, 100.0)
        self._real("top_p", self.top_p, 0.0, 1.0, above=True)
        self._real("min_p", self.min_p, 0.0, 1.0)
        self._real("typical_p", self.typical_p, 0.0, 1.0, above=True)
        if self.top_h is not None:
            self._real("top_h", self.top_h, 0.0, 1.0, above=True)
        self._real("epsilon_cutoff", self.epsilon_cutoff, 0.0, 1.0)
        self._real("eta_cutoff", self.eta_cutoff, 0.0, 1.0)
        self._real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        self._real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._stops()
        self._biases()
        self._sequences()
        self._decay()
        for name in ("ignore_eos", "shift"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} is True or False, not {shown(getattr(self, name))}", name)
        for name in _NUMBERS:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        if self.shift and self.max_tokens is None:
            raise BadRequest("shift needs max_tokens: with it, the context does not end an answer", "max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}", "min_tokens")

    def _stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple):
            raise BadRequest(f"stop must be strings, not {shown(stop)}", "stop")
        if len(stop) > MAX_STOPS:
            raise BadRequest(f"stop has {len(stop)} strings; {MAX_STOPS} are allowed", "stop")
        for text in stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise BadRequest(f"every stop string needs 1 to {MAX_STOP_CHARS} characters", "stop")
        if not isinstance(self.stop_token_ids, list | tuple):
            raise BadRequest(f"stop_token_ids must be token ids, not {shown(self.stop_token_ids)}", "stop_token_ids")
        if (count := len(self.stop_token_ids)) > MAX_STOP_IDS:
            raise BadRequest(f"stop_token_ids has {count} ids; {MAX_STOP_IDS} are allowed", "stop_token_ids")
        object.__setattr__(self, "stop", tuple(str.__str__(text) for text in stop))
        object.__setattr__(self, "stop_token_ids", self._ids("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS))
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            object.__setattr__(self, name, self._ids(name, getattr(self, name), MAX_IDS))

    def _biases(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise BadRequest(f"logit_bias must map token ids to numbers, not {shown(self.logit_bias)}", "logit_bias")
        if (count := len(self.logit_bias)) > MAX_BIASES:
            raise BadRequest(f"logit_bias has {count} entries; {MAX_BIASES} are allowed", "logit_bias")
        biases = {_plain(token): _plain(bias) for token, bias in self.logit_bias.items()}
        for token, bias in biases.items():
            self._whole("logit_bias", token, 0, 2**31 - 1)
            self._real("logit_bias", bias, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", MappingProxyType(biases))

    def _sequences(self) -> None:
        """Forbidden and biased sequences of token ids."""
        bad, biased = self.bad_words_ids, self.sequence_bias
        if not isinstance(bad, list | tuple) or len(bad) > MAX_SEQUENCES:
            raise BadRequest(f"bad_words_ids must be at most {MAX_SEQUENCES} lists of token ids", "bad_words_ids")
        bad = tuple(self._ids("bad_words_ids", ids, MAX_NGRAM, least=1) for ids in bad)
        object.__setattr__(self, "bad_words_ids", bad)
        pairs = list(biased.items()) if isinstance(biased, Mapping) else biased
        if not isinstance(pairs, list | tuple) or len(pairs) > MAX_SEQUENCES or not all(map(_is_pair, pairs)):
            raise BadRequest(
                f"sequence_bias must be at most {MAX_SEQUENCES} pairs of a list of token ids and a number",
                "sequence_bias",
            )
        biases: dict[tuple[int, ...], float] = {}
        for ids, bias in pairs:
            self._real("sequence_bias", bias, -MAX_SEQUENCE_BIAS, MAX_SEQUENCE_BIAS)
            biases[self._ids("sequence_bias", ids, MAX_NGRAM, least=1)] = _plain(bias)
        object.__setattr__(self, "sequence_bias", MappingProxyType(biases))

    def _decay(self) -> None:
        name, decay = "exponential_decay_length_penalty", self.exponential_decay_length_penalty
        if decay is None:
            return
        if not _is_pair(decay):
            raise BadRequest(f"{name} must be a pair: a number of tokens, and a factor", name)
        self._whole(name, decay[0], 0, 2**31 - 1)
        self._real(name, decay[1], 0.0, 100.0, above=True)
        object.__setattr__(self, name, (_plain(decay[0]), _plain(decay[1])))

    def _ids(self, name: str, ids: object, most: int, *, least: int = 0) -> tuple[int, ...]:
        if not isinstance(ids, list | tuple) or not least <= len(ids) <= most:
            raise BadRequest(f"{name} must have {least} to {most} token ids in a list", name)
        plain = tuple(map(_plain, ids))
        for token in plain:
            self._whole(name, token, 0, 2**31 - 1)
        return plain

    def _whole(self, name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
        if optional and value is None:
            return
        plain = _plain(value)
        if type(plain) is not int or not low <= plain <= high:
            raise BadRequest(f"{name} must be a whole number from {low} to {high}, not {_sent(value)}", name)

    def _real(self, name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
        """NaN is between no two numbers."""
        plain = _plain(value)
        if type(plain) not in (int, float) or not low <= plain <= high or (above and plain == low):
            border = "above" if above else "from"
            raise BadRequest(f"{name} must be a finite number {border} {low:g} to {high:g}, not {_sent(value)}", name)


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
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    shift: bool
    num_keep: int


_NUMBERS = (
    "max_tokens", "min_tokens", "min_length", "temperature", "top_k", "top_p", "min_p", "typical_p", "top_h",
    "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n",
    "no_repeat_ngram_size", "seed", "n", "logprobs", "num_keep",
)  # fmt: skip


def _plain(value: Any) -> Any:
    """An int or a float of a subclass, which may compare as it likes, as a plain one; all else as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else value


def _sent(value: object) -> str:
    """A value as the request has it: where it came as JSON, in JSON's words."""
    return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def asked(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """`defaults` with the fields that a request gave. A `min_tokens` that is only a default gives way to a `max_tokens`
    that was given."""
    most = given.get("max_tokens")
    if "min_tokens" not in given and isinstance(most, int) and 0 < most < defaults.min_tokens:
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
