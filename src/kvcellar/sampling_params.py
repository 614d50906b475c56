"""sampling_params: the sampling parameters of a request, declared once: their values, texts and names.

What takes sampling parameters reads `PARAMETERS`: bodies of HTTP, options of the command line, Modelfiles, generation
configs, the OpenAPI document and docs/reference. A new parameter is a line in `SamplingParams`, one in
`SamplingOptions`, which type checkers read, and the code that follows it.

Token ids are compared with the vocabulary later, by `check_ids`, when the model is loaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from kvcellar.constraint import Constraint
from kvcellar.errors import BadRequest, shown
from kvcellar.values import TOKEN, Flag, Items, Kind, Pair, Pairs, Real, Text, Whole

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_IDS = 2**16  # suppressed tokens
MAX_NGRAM = 64  # tokens of an n-gram, and of a sequence that is banned or biased
MAX_SEQUENCES = 4096  # that are banned or biased
MAX_BIASES = 2**14  # each costs time in every step, for all requests in it
TOKENS = Items(TOKEN, MAX_IDS, "token ids")
PHRASES = Items(Items(TOKEN, MAX_NGRAM, "token ids", least=1), MAX_SEQUENCES, "lists of token ids")
STOPS = Items(Text(4096, least=1), 64, "strings", alone=True)
DECAY = Pair(TOKEN, Real(0, 100, above=True), "a number of tokens and a factor")
BIASES = Pairs(Pair(TOKEN, Real(-100, 100), "a token id and a number"), MAX_BIASES, "map token ids to numbers")
SEQUENCE_BIASES = Pairs(
    Pair(PHRASES.item, Real(-1e4, 1e4), "a list of token ids and a number"),
    MAX_SEQUENCES,
    "be pairs of a list of token ids and a number",
)


class Constrained(Kind):
    def check(self, name: str, value: Any) -> Constraint:
        """A copy, checked again."""
        if not isinstance(value, Constraint):
            raise BadRequest(f"{name} is Constraint(...), not {shown(value)}", name)
        return replace(value)


SAME = "the same"  # a name: that of the field


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A sampling parameter. `None` for a name: it cannot be set there."""

    name: str = ""  # that of the field
    default: Any
    kind: Kind
    about: str  # other parameters are between backquotes
    http: str | None = None  # the server whose API has the field, and ours with it
    anthropic: str | None = None  # its name in Anthropic's API
    ollama: str | None = None  # its name in the options of Ollama's API
    config: str | None = None  # its name in transformers' GenerationConfig
    option: str | None = SAME  # of the command line
    modelfile: str | None = None  # its name in a Modelfile
    filters: bool = False  # it only chooses what may be drawn, and so has no effect on greedy decoding


def _parameter(default: Any, kind: Kind, about: str, http: str | None, **names: Any) -> Any:
    declared = Parameter(default=default, kind=kind, about=about, http=http, **names)
    how: dict[str, Any] = {"default_factory": lambda: default} if isinstance(default, dict) else {"default": default}
    return field(**how, metadata={"declared": declared})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Raises `BadRequest` with the field's name for invalid values.

    `stop` may also be one string, tuples may be lists, `logit_bias` any mapping, `sequence_bias` a mapping or pairs of
    token ids and a bias; the record has immutable copies. Parameters that vLLM does not have are named as in
    transformers' GenerationConfig.
    """

    max_tokens: int | None = _parameter(
        None, Whole(1), "most new tokens; none: until the context is full", "OpenAI",
        anthropic=SAME, ollama="num_predict", config="max_new_tokens", modelfile="num_predict",
    )  # fmt: skip
    min_tokens: int = _parameter(
        0, Whole(0), "before this many tokens, end-of-text and stop ids are banned and stop strings ignored", "vLLM",
        config="min_new_tokens", modelfile=SAME,
    )  # fmt: skip
    min_length: int = _parameter(
        0, Whole(0), "as `min_tokens`, counting the prompt too", "transformers", config=SAME, modelfile=SAME
    )
    temperature: float = _parameter(
        1.0, Real(0, 100), "0: always the most likely token", "OpenAI",
        anthropic=SAME, ollama=SAME, config=SAME, modelfile=SAME, filters=True,
    )  # fmt: skip
    top_k: int = _parameter(
        0, Whole(0), "keep only this many of the most likely tokens; 0: all", "vLLM",
        anthropic=SAME, ollama=SAME, config=SAME, modelfile=SAME, filters=True,
    )  # fmt: skip
    top_p: float = _parameter(
        1.0, Real(0, 1, above=True), "keep only the fewest tokens that have this probability together", "OpenAI",
        anthropic=SAME, ollama=SAME, config=SAME, modelfile=SAME, filters=True,
    )  # fmt: skip
    min_p: float = _parameter(
        0.0, Real(0, 1), "drop tokens less likely than this times the most likely one", "vLLM",
        ollama=SAME, config=SAME, modelfile=SAME, filters=True,
    )  # fmt: skip
    typical_p: float = _parameter(
        1.0, Real(0, 1, above=True), "as `top_p`, with the most typical tokens first (arXiv 2202.00666)", "llama.cpp",
        ollama=SAME, config=SAME, modelfile=SAME, filters=True,
    )  # fmt: skip
    top_h: float | None = _parameter(
        None, Real(0, 1, above=True), "keep the first of the 100 best with this share of their entropy; none: off",
        "transformers", config=SAME, modelfile=SAME, filters=True,
    )  # fmt: skip
    epsilon_cutoff: float = _parameter(
        0.0, Real(0, 1), "drop tokens with a probability below this", "transformers",
        config=SAME, modelfile=SAME, filters=True,
    )  # fmt: skip
    eta_cutoff: float = _parameter(
        0.0, Real(0, 1), "as `epsilon_cutoff`, lower where the entropy is high (arXiv 2210.15191)", "transformers",
        config=SAME, modelfile=SAME, filters=True,
    )  # fmt: skip
    repetition_penalty: float = _parameter(
        1.0, Real(0.01, 100), "above 1, makes tokens of prompt and completion less likely (arXiv 1909.05858)",
        "vLLM", ollama="repeat_penalty", config=SAME, modelfile="repeat_penalty",
    )  # fmt: skip
    presence_penalty: float = _parameter(
        0.0, Real(-2, 2), "subtracted from the logits of generated tokens, as OpenAI defines it", "OpenAI",
        ollama=SAME, modelfile=SAME,
    )  # fmt: skip
    frequency_penalty: float = _parameter(
        0.0, Real(-2, 2), "subtracted once per occurrence of a generated token, as OpenAI defines it", "OpenAI",
        ollama=SAME, modelfile=SAME,
    )  # fmt: skip
    repeat_last_n: int = _parameter(
        -1, Whole(-1), "penalties read this many of the last tokens; 0: none; -1: all", "Ollama",
        ollama=SAME, modelfile=SAME,
    )  # fmt: skip
    logit_bias: Mapping[int, float] = _parameter(
        {}, BIASES, "from a token id to what is added to its logit, -100 to 100", "OpenAI"
    )
    sequence_bias: Mapping[tuple[int, ...], float] = _parameter(
        {}, SEQUENCE_BIASES, "from token ids to what is added to the logit of the last of them after the others",
        "transformers", config=SAME,
    )  # fmt: skip
    no_repeat_ngram_size: int = _parameter(
        0, Whole(0, MAX_NGRAM), "no n-gram of this size occurs twice in prompt and completion; 0: off", "transformers",
        config=SAME, modelfile=SAME,
    )  # fmt: skip
    bad_words_ids: tuple[tuple[int, ...], ...] = _parameter(
        (),
        PHRASES,
        "banned sequences of token ids",
        "transformers",
        config=SAME,
        option="bad_words",
    )
    suppress_tokens: tuple[int, ...] = _parameter(
        (), TOKENS, "banned token ids", "transformers", config=SAME, option="suppress_token"
    )
    begin_suppress_tokens: tuple[int, ...] = _parameter(
        (), TOKENS, "token ids that are banned as the first of a completion", "transformers",
        config=SAME, option="begin_suppress_token",
    )  # fmt: skip
    exponential_decay_length_penalty: tuple[int, float] | None = _parameter(
        None, DECAY, "a number of tokens and a factor: behind so many tokens, the end becomes more likely by the "
        "factor per token", "transformers", config=SAME, option="exponential_decay",
    )  # fmt: skip
    seed: int | None = _parameter(
        None, Whole(-(2**63), 2**64 - 1), "makes sampling reproducible; none: a new seed for each request", "OpenAI",
        anthropic=SAME, ollama=SAME, modelfile=SAME,
    )  # fmt: skip
    n: int = _parameter(
        1, Whole(1, MAX_CHOICES), "number of completions, which share the K/V of the prompt", "OpenAI", option=None
    )
    logprobs: int | None = _parameter(
        None, Whole(0, MAX_LOGPROBS), "return log-probabilities of the token and of this many of the most likely", None,
        option=None,
    )  # fmt: skip
    prompt_logprobs: int | None = _parameter(
        None, Whole(0, MAX_LOGPROBS), "the same of every token of the prompt, which is computed again for that; "
        "`max_tokens` may be 0 then", None, option=None,
    )  # fmt: skip
    stop: tuple[str, ...] = _parameter(
        (), STOPS, "the completion ends before the first of these strings", "OpenAI",
        anthropic="stop_sequences", ollama=SAME, config="stop_strings", modelfile=SAME,
    )  # fmt: skip
    stop_token_ids: tuple[int, ...] = _parameter(
        (), Items(TOKEN, 4096, "token ids"), "the completion ends at any of these token ids", "vLLM", option="stop_id"
    )
    ignore_eos: bool = _parameter(False, Flag(), "continue past the end of text", "vLLM", modelfile=SAME)
    shift: bool = _parameter(
        False, Flag(), "at the end of the context, drop the oldest tokens and continue; needs `max_tokens`", "Ollama",
        modelfile=SAME,
    )  # fmt: skip
    num_keep: int = _parameter(
        0, Whole(-1), "with `shift`: first tokens, including BOS, that are never dropped, at most the context minus "
        "one; -1: the prompt", "Ollama", ollama=SAME, modelfile=SAME,
    )  # fmt: skip
    constraint: Constraint | None = _parameter(  # noqa: RUF009 - it makes a field
        None, Constrained(), "what each completion has to match; none: any text", None, option=None
    )

    def __post_init__(self) -> None:
        for one in PARAMETERS.values():
            value = getattr(self, one.name)
            if value is one.default:
                continue
            kind = SCORED if one.name == "max_tokens" and self.prompt_logprobs is not None else one.kind
            object.__setattr__(self, one.name, kind.check(one.name, value))
        if self.constraint is not None and (name := next(filter(self.__getattribute__, _LENGTHENING), None)):
            raise BadRequest(f"{name} cannot be combined with a constraint, which says where an answer ends", name)
        if self.shift and self.max_tokens is None:
            raise BadRequest("shift needs max_tokens: with it, the context does not end a completion", "max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}", "min_tokens")


SCORED = Whole(0)  # `max_tokens` where the prompt is scored, which may be all that is wanted
_LENGTHENING = ("ignore_eos", "min_tokens", "min_length")


def _resolved(name: str, declared: Parameter) -> Parameter:
    """With its own name in place of `SAME`."""
    places = ("anthropic", "ollama", "config", "option", "modelfile")
    return replace(declared, name=name, **{place: name for place in places if getattr(declared, place) is SAME})


PARAMETERS: Mapping[str, Parameter] = {
    one.name: _resolved(one.name, one.metadata["declared"]) for one in fields(SamplingParams)
}


def names_in(place: str) -> dict[str, Parameter]:
    """The parameters that can be set in `place`, a field of `Parameter`, by the names that they have there."""
    found = {getattr(one, place): one for one in PARAMETERS.values()}
    found.pop(None, None)
    return found


def renamed(place: str) -> dict[str, str]:
    """By field of `SamplingParams`, the names that are others in `place`."""
    return {one.name: name for name, one in names_in(place).items() if name != one.name}


def sampling_of(names: Mapping[str, Parameter], sent: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are set in a JSON object which has them by `names`: fields of `SamplingParams`, which checks
    them."""
    given = ((one, sent[name]) for name, one in names.items() if name in sent)
    return {one.name: one.kind.from_json(one.name, value) for one, value in given if value is not None}


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
