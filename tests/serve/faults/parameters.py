"""Faults 19 to 29: parameters of a request, and prompts."""

from collections.abc import Iterator

from tests.serve.every_api import CONTEXT
from tests.serve.faults.case import FIELDS, MODEL, OLLAMA, Case, Fault, put, sent, valid, values

END_TO_END = "tests/serve/test_end_to_end.py"
INVALID = "tests/serve/test_invalid_requests.py"
REALS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
OPENAI = ("completions", "chat", "responses")


def literals() -> Iterator[Case]:
    """Numbers that JSON does not have, and those that are too large for a float."""
    for field in REALS:
        for api, own in FIELDS[field].items():
            body = put(valid(api), own, "NUMBER")
            for literal, names in (("NaN", "JSON"), ("-Infinity", "JSON"), ("1e999", ""), ("-1e999", "")):
                text = Case("", body).data or b""
                yield sent(api, text.replace(b'"NUMBER"', literal.encode()), 400, names)


def both_limits() -> Iterator[Case]:
    """Fields of one API that say the same, and must not differ."""
    yield sent("chat", valid("chat") | {"max_completion_tokens": 5}, 400, "max_completion_tokens")
    yield sent("chat", valid("chat") | {"max_completion_tokens": 4, "min_tokens": 5}, 400, "min_tokens")
    for value in (0, 2**31):
        yield sent("chat", valid("chat") | {"max_completion_tokens": value}, 400, "max_completion_tokens")
    yield sent("responses", valid("responses") | {"max_tokens": 5}, 400, "max_output_tokens")


def top_logprobs() -> Iterator[Case]:
    for api in ("chat", *OLLAMA):
        wrong = {"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False}
        above = tuple({"top_logprobs": value, "logprobs": True} for value in (-1, 21, 10**6, 1.5, "2"))
        yield from (sent(api, valid(api) | one, 400, "top_logprobs") for one in (*wrong, *above))
    yield from (sent("chat", valid("chat") | {"logprobs": value}, 400, "logprobs") for value in (1, "yes"))
    yield from (sent("responses", valid("responses") | {"top_logprobs": 2}, 400, "top_logprobs") for _ in range(1))
    for api in ("completions", "chat", "responses"):
        yield from (sent(api, valid(api) | {"prompt_logprobs": n}, 400, "prompt_logprobs") for n in (-1, 21, 10**6))


BIASES = (
    *({token: 1} for token in ("-1", "99999", str(2**31), str(10**30), "a", "", "\u0661", "1.0")),
    *({"1": bias} for bias in (101, -101, "1", True, None)),
    [1],
)
IDS = ([-1], [99999], [2**31], [2**63], [10**30], [1.5], [1.0], [True], [None], [[1, 2.5]], [1, [2]], [[[1]]])
PROMPTS = (5, True, {"text": "x"}, [], [[]], ["a", 1], [[1], "a"], [None], ["a"] * 257, "", ["a", ""])
ODD = (" ", "\n" * 50, "\t \r\n", "\x00", "\u2028", "<s>", "<s></s><|im_end|>", "<|none|>")


def prompts() -> Iterator[Case]:
    yield from (sent("completions", valid("completions") | {"prompt": value}, 400, "prompt") for value in PROMPTS)
    yield sent("completions", {"model": MODEL}, 400, "prompt")
    yield from (sent("embeddings", {"model": MODEL, "input": value}, 400, "input") for value in (*PROMPTS[:8], "", {}))
    yield sent("embeddings", {"model": MODEL}, 400, "input")
    yield from (sent("ollama embed", {"model": MODEL, "input": value}, 400, "input") for value in ([[]], [None], {}, 5))
    yield from (sent("ollama embedding", {"model": MODEL, "prompt": value}, 400, "prompt") for value in ([], 5, {}))
    yield from (sent("ollama generate", {"model": MODEL, "prompt": value}, 400, "prompt") for value in ([], 5, {}))
    yield from (sent("tokenize", {"model": MODEL, "prompt": value}, 400, "prompt") for value in ([], 5, {}))


def odd_prompts() -> Iterator[Case]:
    """Texts without words are texts."""
    for api, field in (("completions", "prompt"), ("ollama generate", "prompt"), ("tokenize", "prompt")):
        yield from (sent(api, put(valid(api), field, text) | _without(api), 200) for text in ODD)
    for api in ("embeddings", "ollama embed"):
        yield from (sent(api, {"model": MODEL, "input": text}, 200) for text in ODD)
    for api in FIELDS["messages"]:
        messages = [[{"role": "user", "content": text}] for text in ODD]
        yield from (sent(api, put(valid(api), FIELDS["messages"][api], given), 200) for given in messages)
    for body in ({"prompt": ""}, {"prompt": None}, {}):
        yield sent("ollama generate", {"model": MODEL, "stream": False} | body, 200)  # loads the model
    yield sent("ollama embed", {"model": MODEL, "input": ""}, 200)
    yield sent("tokenize", {"model": MODEL, "prompt": ""}, 200)
    yield sent("detokenize", {"model": MODEL, "tokens": []}, 200)


def _without(api: str) -> dict[str, None]:
    return {"messages": None} if api == "tokenize" else {}


def contexts() -> Iterator[Case]:
    """At the context, one token beyond it, a hundred times it, and as long as a body may be."""
    yield sent("completions", valid("completions") | {"prompt": [5] * (CONTEXT - 1)}, 200)
    for length in (CONTEXT + 1, 100 * CONTEXT):
        yield sent("completions", valid("completions") | {"prompt": [5] * length}, 400, "prompt")
        yield sent("embeddings", valid("embeddings") | {"input": [5] * length}, 400, "input")
    for lines in (200_000, 1_000_000):
        text = "\n" * lines
        yield sent("completions", valid("completions") | {"prompt": text}, (400, 413), "")
        yield sent("embeddings", valid("embeddings") | {"input": text}, (400, 413), "")
        yield sent("tokenize", {"model": MODEL, "prompt": text}, (400, 413), "")
        yield sent("ollama generate", valid("ollama generate") | {"prompt": text}, (400, 413), "")
        for api, own in FIELDS["messages"].items():
            yield sent(api, put(valid(api), own, [{"role": "user", "content": text}]), (400, 413))
    for api in ("chat", "responses", "messages"):
        long = [{"role": "user", "content": "a b " * CONTEXT}]
        names = "prompt" if api == "messages" else FIELDS["messages"][api]  # Anthropic's errors have only a text
        yield sent(api, put(valid(api), FIELDS["messages"][api], long), 400, names)


PARAMETERS = (
    Fault(19, "`n` of 0, -1, 10⁹, 129; `best_of`", "400. Anthropic and Ollama have no such fields",
          (*values("n", 0, -1, 10**9, 129, 1.5, "2", True, [1]),
           *(sent("responses", valid("responses") | {"n": 2}, 400, "n"),
             *(sent(api, valid(api) | {"best_of": value}, 400, "best_of")
               for api in OPENAI for value in (2, 10**9, -1))))),
    Fault(20, "A limit on new tokens of 0, -1, 2³¹, 2⁶³, 1.5, \"5\"; null",
          "400; null is as absent, where the field may be absent. Ollama's `num_predict` is without a limit below 0, "
          "and at least 1",
          (*values("max_tokens", 2**31, 2**63, 1.5, 1.0, "5", True, []),
           *values("max_tokens", 0, -1, -(2**63), only=(*OPENAI, "messages")),
           *values("max_tokens", None, only=("completions",), status=200),
           *values("max_tokens", None, only=("messages",)),
           *(sent(api, put(valid(api), "options.num_predict", 0), 200) for api in OLLAMA),
           *both_limits())),
    Fault(21, "Sampling numbers that are NaN, infinite, -1, 10³⁰⁸ or 10⁻⁴⁵",
          "400; 10⁻⁴⁵ is a temperature",
          (*values("temperature", -1, 1e308, 101, "1", True, [1], {}),
           *values("top_p", 0, -1, 1.1, 1e308, "1"),
           *values("min_p", -0.1, 1.1, 1e308),
           *values("typical_p", 0, 1.5),
           *values("repetition_penalty", 0, 1e-144, -1, 1e308),
           *values("presence_penalty", -2.1, 2.1, 1e308, "0"),
           *values("frequency_penalty", -2.1, 2.1, 1e308),
           *literals(),
           *values("temperature", 1e-45, 0, status=200))),
    Fault(22, "`top_k` of -1, or beyond the vocabulary; log-probabilities of -1, of 10⁶, `top_logprobs` alone",
          "400; a `top_k` beyond the vocabulary keeps all tokens",
          (*values("top_k", -1, 2**31, 1.5, "3"),
           *values("top_k", 0, 10**6, status=200),
           *values("logprobs", -1, 21, 10**6, 1.5, True, "1"),
           *top_logprobs())),
    Fault(23, "`seed` of -1, 2⁶³, 2⁶⁴", "up to 2⁶⁴ - 1 as they are; 400 beyond",
          (*values("seed", 2**64, -(2**63) - 1, 10**30, 1.5, "7"), *values("seed", 2**63, -1, 0, status=200))),
    Fault(24, "`stop` of an empty string, 10 000 strings, a string of 100 000 characters; no strings; a stop string "
          "over several tokens, or within a character of several bytes",
          "400; no strings are as absent; where a stop string is complete, the text ends before it",
          (*values("stop", [""], ["a"] * 10_000, ["a" * 100_000], 5, ["a", 5], {"a": 1}),
           *values("stop", "", "a" * 100_000, without=("messages",)),
           *values("stop", [], ["\U0001f347"], status=200),
           *values("stop_token_ids", [-1], [2**31], [1.5], ["1"], 5, [True], [99999])),
          (f"{INVALID}::test_a_stop_string_across_tokens", f"{END_TO_END}::test_a_stop_string_ends_the_completion")),
    Fault(25, "`logit_bias` of tokens that the model does not have, or of more than 100", "400",
          tuple(values("logit_bias", *BIASES))),
    Fault(26, "Token ids that are negative, beyond the vocabulary, 2⁶³, no whole numbers, nested; an empty list",
          "400. Ids of rows that no token uses are ids",
          (*values("ids", *IDS[:9]),
           *values("ids", *IDS[9:], only=("completions",)),
           *values("ids", [[[1]]], [1, [2]], only=("embeddings", "ollama embed")),
           *(Case("/kvcellar/conversations", {"name": "ids", "prompt": value}, 400, "prompt") for value in IDS[:9]))),
    Fault(27, "An empty prompt; one of blanks or of control tokens only",
          "400 where there is nothing to read; blanks and control tokens are a text. Ollama loads the model",
          (*prompts(), *odd_prompts())),
    Fault(28, "A prompt as long as the context, longer by one, 100 times as long; a million line feeds",
          "400 with both lengths; 413 beyond the limit of a body. Ollama's routes cut the text of embeddings",
          tuple(contexts()),
          (f"{END_TO_END}::test_a_prompt_at_the_limit_of_the_context",)),
    Fault(29, "A message with the text of control tokens, such as `<\\|im_end\\|>`", "they are text",
          tests=("tests/serve/test_faults.py::test_control_tokens_in_messages_are_text",),
          to="every route with messages"),
)  # fmt: skip
