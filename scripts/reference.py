"""Write docs/reference/ from the code: `python -m scripts.reference`.

The description of a setting or field is its comment (`kvcellar.serve.openapi`).
"""

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel

import kvcellar
from kvcellar.cli.client import VARIABLE as URL_VARIABLE
from kvcellar.cli.main import COMMANDS, ENVIRONMENT, cli
from kvcellar.cli.options import STORE_KEY, flag
from kvcellar.cli.store_options import REMOTE
from kvcellar.comments import Comments
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.stats import (
    ClusterStats,
    EngineStats,
    GroupStats,
    PrefixStats,
    RecordingStats,
    ReplicaStats,
    SpeculationStats,
    StoreStats,
    TierStats,
    declared,
)
from kvcellar.events import Recall, Speculation, Timings, Usage
from kvcellar.inspector.routes import OPERATIONS
from kvcellar.kernels.compiled import COMPILERS
from kvcellar.sampling_params import PARAMETERS, Parameter, SamplingParams, names_in
from kvcellar.serve.anthropic import fields as anthropic_fields
from kvcellar.serve.generation.ignored_fields import NEUTRAL, NO_EFFECT
from kvcellar.serve.generation.messages import MESSAGE_NO_EFFECT, Message
from kvcellar.serve.generation.records import RecallFields, SpeculationFields
from kvcellar.serve.http.keys import ADMIN_VARIABLE, METRICS_VARIABLE, VARIABLE
from kvcellar.serve.http.request_log import LogLine
from kvcellar.serve.metrics import exposition
from kvcellar.serve.metrics.requests import ModelRequests
from kvcellar.serve.ollama import fields as ollama_fields
from kvcellar.serve.ollama.fields import Options
from kvcellar.serve.openai.chat import ChatBody
from kvcellar.serve.openai.completions import CompletionBody
from kvcellar.serve.openai.embeddings import EmbeddingsBody
from kvcellar.serve.openai.fields import SAMPLING as SAMPLING_FIELDS
from kvcellar.serve.openai.fields import CommonBody, StreamOptions
from kvcellar.serve.openai.formats import TimingsFields
from kvcellar.serve.openai.tokenizing import DetokenizeBody, TokenizeBody
from kvcellar.serve.openapi import ABOUT, EVERY, MEANINGS
from kvcellar.serve.responses import fields as responses_fields
from kvcellar.serve.responses.fields import ReasoningOptions, ResponsesBody, TextOptions
from kvcellar.serve.routes import TABLE
from kvcellar.serve.settings import ServeSettings

COMMENTS = Comments()
FOLDER = Path(__file__).parents[1] / "docs" / "reference"
EXAMPLES = Path(__file__).parent / "public_examples.md"
NOTE = "*Generated from the code by `make docs`; a test compares the two.*"

SETTINGS = """\
Keyword arguments of `Engine(model, ...)`. Most have an option of the same name in `kvcellar serve`, `run` and `doctor`
(`cache_bytes` is `--cache-bytes`). How bytes are divided: [limit memory](../howto/limit-memory.md).
"""
SERVER = """\
Fields of `kvcellar.serve.ServeSettings`, for a server in your own program. `kvcellar serve` has [options for some of
them](command-line.md#kvcellar-serve) and uses the defaults of the others.
"""
SAMPLING = """\
Keyword arguments of `generate`, `stream`, `chat` and `send`, fields of `kvcellar.SamplingParams`, and fields of HTTP
requests. Defaults are those of the model, then those of this page, in Python, over HTTP and in chats alike: what the
model was created with in the library, else its generation config. Where that has no `do_sample`, tokens are sampled,
with the temperature and the filters that it has; with `do_sample` false, decoding is greedy. `kvcellar doctor` prints
which holds for a model, and why.
"""
STATISTICS = """\
Counters of an engine and of its results. Over HTTP, the usage of a request is in its response and in its log line, and
[metrics](metrics.md) have the state of all engines.
"""
PYTHON = """\
What `import kvcellar` has: these names, and the attributes that this page and those that it names describe, are public.
Everything else may change in any version. Each name has an example, which the tests run.

- A public name, argument or field that is going to be removed is deprecated first: it goes on working for one minor
  version at least, raises a `DeprecationWarning` that says what to use instead, and is in the changelog below
  *Deprecated*.
- Before 1.0, a minor version (0.2, 0.3) may have changes that break programs, all of them after that notice; a patch
  (0.2.1) has none.
- The same holds for options of the command line, fields over HTTP, and names of metrics. What is on disk (stores,
  models of the library) is read by the next minor version, or refused with the reason and left as it is.
"""
OWN_PAGES = {"Settings": "settings.md", "SamplingParams": "sampling.md"}
RECORDS = {
    EngineStats: "`engine.stats()`",
    GroupStats: "`groups` of `engine.stats()`",
    PrefixStats: "`prefixes` of `engine.stats()`",
    StoreStats: "`store` of `engine.stats()`",
    TierStats: "`tiers` of `engine.stats().store`",
    SpeculationStats: "`speculation` of `engine.stats()`",
    RecordingStats: "`recording` of `engine.stats()`",
    ClusterStats: "`cluster` of `engine.stats()`, of a gateway",
    ReplicaStats: "`replicas` of `engine.stats().cluster`",
    Usage: "`usage` of a result",
    Timings: "`timings` of a result",
    Recall: "`recall` of a result",
    Speculation: "`speculation` of a result",
}
COMMAND_LINE = """\
In a checkout the command is `.venv/bin/kvcellar`. Exit codes: 0 success; 1 refused or failed, with the reason in one
line; 2 wrong usage; 130 interrupted; 128 plus the number of the signal if `serve` got a second signal. Sizes are
written like 800M, 1.5G or 512MiB.

Every command has `--config FILE`, a TOML file with values of options, by default `~/.config/kvcellar/config.toml`
([how to write it, and completion](../howto/command-line.md)).

Stages of loading are printed, without a terminal those that last. At a terminal, `run` prints after each completion
tokens per second, the time to the first token, and how many prompt tokens came from memory; `--quiet` prints neither.
Its sampling options are described [on a page of their own](sampling.md).
"""
METRICS = """\
What `/metrics` has ([how to read it](../howto/metrics.md)). The names of counters end in `_total` there. Every metric
of a model has the label `model_name`.
"""
FIELDS = """\
How `POST /v1/completions` and `POST /v1/chat/completions` handle every field that a client may send. A field that could
change the response is never ignored silently: a field is implemented, or without effect by its nature, or accepted only
with values that have no effect, or refused with 400 and its name. `null` is the same as leaving a field out. Types are
strict: `"5"` is not a number and `true` is not 1.

Sampling fields are described [on a page of their own](sampling.md), which says where their defaults come from.
"""
ROUTES = """\
What a server has. Bodies and answers, with all their fields, are in its OpenAPI document, `/openapi.json`, from which
clients can be generated; [what it does with fields that it does not know](http-fields.md) depends on the API. Every
request may also get one of these statuses:

{every}

and one with a body 400, 408 (it did not arrive in time), 413 (it is too long) or 415 (it is no JSON). The shape of an
error is that of the API: OpenAI's `{{"error": {{"message", "type", "param", "code"}}}}`, Anthropic's below
`/v1/messages`, and `{{"error": "text"}}` below `/api/`.
"""
NEUTRAL_HEAD = """\
Any other value is refused with 400, `"code": "unsupported_parameter"` and the name of the field.
"""
ANTHROPIC = """\
Unknown fields are ignored, because agents send those of betas. [Use a client of this API](../howto/other-clients.md).
"""
ANTHROPIC_PARTS = {
    "A message": anthropic_fields.AnthropicMessage,
    "A block": anthropic_fields.Block,
    "A tool": anthropic_fields.AnthropicTool,
    "`tool_choice`": anthropic_fields.ToolChoice,
    "`thinking`": anthropic_fields.Thinking,
    "`output_config`": anthropic_fields.OutputConfig,
    "`cache_control`": anthropic_fields.CacheControl,
}
OLLAMA = """\
Unknown fields are ignored, as Ollama does. [Use a client of this API](../howto/other-clients.md).
"""
MESSAGE_TAIL = """\
The same holds for `cache_control` in a part of `content`, and for other keys in a tool call (such as `index`), which no
template reads. Any other field of a message is refused with its name.
"""
RESPONSES = """\
The fields of `POST /v1/responses` beside [those that both other routes have](#implemented-in-both-routes), of which `n`
must be 1 and `conversation` absent. What is accepted without effect there is so here, too. [How to use
it](../howto/responses.md).
"""
RESPONSE_FIELDS = """\
- `stop_reason` of a choice: the stop string that ended it, or `null` (as in vLLM).
- `token_ids` of a choice and of each chunk, if `return_token_ids` is set or the model has no tokenizer; with the
  former also `prompt_token_ids`, of a chat in the response or its first chunk, of a text completion in each choice or
  its first chunk (as in vLLM).
- `token_ms` of a choice and of each chunk, if `return_token_times` is set: when the server had each token, in
  milliseconds since the first one of the choice.
- Legacy `logprobs`: a token that is a part of a character is named by its bytes, `bytes:\\xc3` (as in OpenAI's API),
  and one whose text another likely token has by its id, `token_id:N`.
- `timings` of a response, or of the last chunk of a stream with `include_usage`: [statistics](statistics.md).
- `max_model_len` of a model in `/v1/models`: its context.
- The header `x-request-id`: the id of the request in the log. A client may set it.
"""


def pages() -> dict[str, str]:
    """File name and text of every page."""
    return {
        "python.md": _page("Public names of Python", PYTHON, *_public_names()),
        "settings.md": _page("Engine settings", SETTINGS, _settings_table(Settings)),
        "server-settings.md": _page("Server settings", SERVER, _settings_table(ServeSettings)),
        "sampling.md": _page("Sampling parameters", SAMPLING, _sampling_table()),
        "statistics.md": _page("Statistics", STATISTICS, *map(_record, RECORDS), *_http_statistics()),
        "metrics.md": _page("Metrics", METRICS, *_metrics()),
        "command-line.md": _page(
            "Command line", COMMAND_LINE, _group_options(), *map(_command, COMMANDS), _environment()
        ),
        "http-fields.md": _page("Fields of HTTP requests", FIELDS, *_http()),
        "http-routes.md": _page("Routes", ROUTES.format(every=_every()), *_routes()),
    }


def examples() -> Mapping[str, str]:
    """What stands at each public name: the example that is the first of its heading, or a link to that."""
    found = dict[str, str]()
    for heading, code in re.findall(r"^## ([^\n]+)\n\n(```python\n.*?^```\n)", EXAMPLES.read_text(), re.M | re.S):
        first, *others = heading.split(", ")
        found |= {first: code} | {one: f"Example: at [`{first}`](#{first.lower()}).\n" for one in others}
    return found


def _public_names() -> Iterator[str]:
    found = {name: getattr(kvcellar, name) for name in sorted(kvcellar.__all__, key=str.lower)}
    errors = [name for name, one in found.items() if isinstance(one, type) and issubclass(one, BaseException)]
    shown = examples()
    for title, names in (("Classes and functions", [one for one in found if one not in errors]), ("Errors", errors)):
        yield f"## {title}\n"
        yield from (f"{_public_name(name, found[name])}\n{shown[name]}" for name in names)


def _public_name(name: str, found: Any) -> str:
    about = inspect.getdoc(found) or ""
    if name in OWN_PAGES:
        return f"### `{name}`\n\n{about} [Its fields]({OWN_PAGES[name]}).\n"
    methods = [
        (f"`{each}{_signature(one)}`", " ".join((inspect.getdoc(one) or "").split()))
        for each, one in vars(found).items()
        if isinstance(found, type) and not each.startswith("_") and inspect.isroutine(one) and inspect.getdoc(one)
    ]
    made = "" if isinstance(found, type) and issubclass(found, BaseException | dict) else _signature(found)
    table = [_table(("method", "what it does"), methods)] if methods else []
    return "\n".join([f"### `{name}`\n", *([f"`{name}{made}`\n"] if made else []), f"{about}\n", *table])


def _signature(found: Any) -> str:
    """Without `self` and `cls`, and without where a type is defined."""
    try:
        given = inspect.signature(found)
    except (TypeError, ValueError):
        return ""
    kept = [one for name, one in given.parameters.items() if name not in ("self", "cls")]
    return re.sub(
        r"\b(?:kvcellar|collections|typing|pathlib|transformers|torch)\.(?:\w+\.)*",
        "",
        str(given.replace(parameters=kept)),
    )


def _page(title: str, *parts: str) -> str:
    return "\n".join([f"# {title}\n", f"{NOTE}\n", *parts])


def described(cls: type) -> Mapping[str, str]:
    """The comment of each field that the body of `cls` declares, empty where there is none."""
    return COMMENTS.of(cls)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    head = list(head)
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows), ""])


def _settings_table(cls: Any) -> str:
    comments = described(cls)
    rows = [(f"`{f.name}`", f"`{_type(cls, f.name)}`", f"`{_default(f)}`", comments[f.name]) for f in fields(cls)]
    return _table(("name", "type", "default", "meaning"), rows)


def _sampling_table() -> str:
    rows: list[tuple[str, ...]] = []
    for name, one in PARAMETERS.items():
        others = {"Anthropic": one.anthropic, "Ollama": one.ollama, "generation config": one.config}
        named = [f"{where}: `{other}`" for where, other in others.items() if other not in (None, name)]
        elsewhere = ", ".join([*([] if one.option is None else [f"`{flag(one)}`"]), *named])
        rows.append((f"`{name}`", f"`{_type(SamplingParams, name)}`", f"`{one.default!r}`", elsewhere, one.about))
    return _table(("name", "type", "default", "elsewhere", "meaning"), rows)


def _sampling_fields(names: Mapping[str, Parameter]) -> str:
    rows = [(f"`{name}`", _json_type(one.kind.schema()), one.about) for name, one in names.items()]
    return _table(("field", "type", "what it does"), rows)


def _record(cls: Any) -> str:
    comments = described(cls)
    rows = [(f"`{f.name}`", f"`{_type(cls, f.name)}`", _meaning(f, comments[f.name])) for f in fields(cls)]
    return "\n".join([f"## {RECORDS[cls]}\n", _table(("name", "type", "meaning"), rows)])


def _meaning(field: Any, comment: str) -> str:
    if (metric := field.metadata.get("metric")) is None:
        return comment
    return metric.text if metric.label is None else f"{metric.text}, by {metric.label}"


def _http_statistics() -> Iterator[str]:
    for title, table in (
        (
            "`timings` of an HTTP response; the last three where drafts were used (`--draft`)",
            COMMENTS.of(TimingsFields),
        ),
        ("`speculation` in the timings of an HTTP response", COMMENTS.of(SpeculationFields)),
        ("`recall` in the usage of an HTTP response", COMMENTS.of(RecallFields)),
        ("Log line of an HTTP request", COMMENTS.of(LogLine)),
    ):
        yield f"## {title}\n"
        yield _table(("name", "meaning"), [(f"`{name}`", meaning) for name, meaning in table.items()])


def _metrics() -> Iterator[str]:
    for title, cls in (("an engine", EngineStats), ("requests", ModelRequests)):
        yield f"## Of {title}\n"
        for kind in ("gauge", "counter", "histogram"):
            rows = [
                (f"`{metric.name}`", ", ".join(f"`{label}`" for label in labels), metric.help)
                for metric, labels in declared(cls)
                if metric.kind == kind
            ]
            if rows:
                yield f"{kind.capitalize()}s:\n"
                yield _table(("name", "labels", "meaning"), rows)
    yield "## Of the server\n\nGauges, without the label `model_name` but for the last:\n"
    yield _table(("name", "meaning"), [(f"`{one.name}`", one.help) for one in (*exposition.SERVER, exposition.STALE)])
    yield "`kvcellar_build_info` has the label `version`.\n"
    yield "## Names of vLLM\n\nWith `metrics_compat`, beside `vllm:kv_cache_usage_perc` and `vllm:request_success`:\n"
    yield _table(("name", "the same as"), [(f"`{name}`", f"`{own}`") for name, own in exposition.VLLM.items()])


def _type(cls: type, name: str) -> str:
    kind = inspect.get_annotations(cls)[name]
    text = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    for module in (
        "collections.abc.",
        "typing.",
        "pathlib.",
        "kvcellar.engine.stats.",
        "kvcellar.engine.speculate.factory.",
    ):
        text = text.replace(module, "")
    return text


def _default(field: Any) -> str:
    value = field.default_factory() if field.default is MISSING else field.default
    return repr(dict(value)) if isinstance(value, Mapping) else repr(value)


def _command(name: str, command: click.Command | None = None) -> str:
    """The section of a command; of one of a group, if that is given."""
    if command is None:
        command = cli.get_command(click.Context(cli), name)
    else:
        name = f"{name} {command.name}"
    assert command is not None
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    words = " ".join(f"[{p.name.upper()}]" for p in arguments if p.name)
    rows = [_option(p) for p in command.params if isinstance(p, click.Option)]
    about = "\n\n".join(
        textwrap.fill(" ".join(part.split()), 118) for part in inspect.cleandoc(command.help or "").split("\n\n")
    )
    usage = f"```text\nkvcellar {name} [OPTIONS] {words}".rstrip() + "\n```\n"
    if isinstance(command, click.Group):
        verbs = [_command(name, one) for one in command.commands.values()]
        return "\n".join([f"## kvcellar {name}\n", f"{about}\n", *(text.replace("## ", "### ", 1) for text in verbs)])
    return "\n".join([f"## kvcellar {name}\n", usage, f"{about}\n", _table(("option", "default", "meaning"), rows)])


def _command_line() -> Iterator[str]:
    yield _group_options()
    yield from map(_command, COMMANDS)
    yield _environment()


def _group_options() -> str:
    rows = [
        (f"`{'`/`'.join(p.opts)}`", p.help or "")
        for p in cli.get_params(click.Context(cli))
        if isinstance(p, click.Option)
    ]
    return _table(("option of `kvcellar`", "meaning"), rows)


def _option(option: click.Option) -> tuple[str, str, str]:
    names = "/".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = "" if option.default is None or option.default is False or option.multiple else f"`{option.default}`"
    return names, default if option.show_default else "", option.help or ""


def _environment() -> str:
    rows = [
        (f"`{VARIABLE}`", "one more API key of `kvcellar serve`"),
        (f"`{ADMIN_VARIABLE}`", "one more admin key of `kvcellar serve`; the admin key of `why` and `cache`"),
        (f"`{METRICS_VARIABLE}`", "one more metrics key of `kvcellar serve`"),
        (f"`{URL_VARIABLE}`", "as `--url`, the address of the server that `ps`, `why`, `top`, `cache` and others ask"),
        (f"`{STORE_KEY}`", "key of what is stored, as in the file of `--store-key-file`"),
        (f"`{REMOTE}`", "as `--store-remote`, for URLs with a password"),
        (
            "`XDG_CACHE_HOME`",
            "directory of compiled kernels and measured steps, in its folder `kvcellar`; default: `~/.cache`",
        ),
        (
            "`XDG_CONFIG_HOME`",
            "directory of the file with values of options, in its folder `kvcellar`; default: `~/.config`",
        ),
        (
            "`XDG_STATE_HOME`",
            "directory of the history of `kvcellar run`, in its folder `kvcellar`; default: `~/.local/state`",
        ),
        ("`CXX`", f"C++ compiler for kernels; default: the first of {', '.join(COMPILERS)}"),
        ("`OMP_NUM_THREADS`", "default of `--threads`"),
        *(
            (f"`{name}`", f"read by a library; set to `{value}` if it is not set")
            for name, value in ENVIRONMENT.items()
        ),
    ]
    return "\n".join(["## Environment variables\n", _table(("name", "meaning"), rows)])


def _every() -> str:
    return "\n".join(f"- {status}: {MEANINGS[status]}" for status in sorted((401, *EVERY)))


def _routes() -> Iterator[str]:
    for api, about in ABOUT.items():
        rows = [
            (f"`{method}`", f"`{path}`", one.about, ", ".join(map(str, (*one.statuses, *sorted(one.errors)))))
            for (method, path), one in {**TABLE, **OPERATIONS}.items()
            if one.api == api
        ]
        yield f"## {api}\n\n{about}\n"
        yield _table(("method", "path", "what it does", "statuses of its own"), rows)


def _http() -> Iterator[str]:
    yield "## Implemented in both routes\n"
    yield _fields(CommonBody)
    yield "Sampling parameters:\n"
    yield _sampling_fields(SAMPLING_FIELDS)
    yield "## Implemented in completions only\n"
    yield _fields(CompletionBody)
    yield "## Implemented in chats only\n"
    yield _fields(ChatBody)
    yield "## Of `/v1/embeddings`\n"
    yield _fields(EmbeddingsBody)
    yield "## Of `/tokenize`\n"
    yield _fields(TokenizeBody)
    yield "## Of `/detokenize`\n"
    yield _fields(DetokenizeBody)
    yield "## `stream_options`\n"
    yield _fields(StreamOptions)
    yield "Only the usage in the last chunk has `prompt_tokens_details`, with the number of cached tokens, and\n"
    yield "`completion_tokens_details`, with the numbers of accepted and rejected drafts where drafts were used.\n"
    yield "## Accepted without effect, with any value\n"
    yield _harmless(NO_EFFECT)
    yield f"## Accepted only with values that have no effect\n\n{NEUTRAL_HEAD}"
    yield _table(("field", "values"), [(_where(n), ", ".join(_json(v) for v in same)) for n, same in NEUTRAL.items()])
    yield "## Messages of a chat\n"
    comments = {name: text for name, text in described(Message).items() if name not in MESSAGE_NO_EFFECT}
    types = _types(Message)
    yield _table(("field", "type", "what happens"), [(f"`{n}`", types[n], text) for n, text in comments.items()])
    yield "Without effect, with any value:\n"
    yield _harmless(MESSAGE_NO_EFFECT)
    yield MESSAGE_TAIL
    yield from _responses_api()
    yield f"## Response fields beyond OpenAI's\n\n{RESPONSE_FIELDS}"
    yield from _other_apis()


def _responses_api() -> Iterator[str]:
    yield f"## Responses\n\n{RESPONSES}"
    yield _fields(ResponsesBody)
    yield "### `reasoning`\n"
    yield _fields(ReasoningOptions)
    yield "### `text`\n"
    yield _fields(TextOptions)
    yield "### Accepted without effect, or with some values only\n"
    yield _harmless({name: why for name, why in responses_fields.NO_EFFECT.items() if name not in NO_EFFECT})
    more = {name: same for name, same in responses_fields.NEUTRAL.items() if name not in NEUTRAL}
    yield _table(("field", "values"), [(f"`{n}`", ", ".join(_json(v) for v in same)) for n, same in more.items()])


def _other_apis() -> Iterator[str]:
    yield f"## Of Anthropic's `/v1/messages`\n\n{ANTHROPIC}"
    yield _parts(anthropic_fields.PromptBody)
    yield "In `/v1/messages` only:\n"
    yield _parts(anthropic_fields.MessagesBody)
    yield "Sampling parameters there, beside `max_tokens`:\n"
    yield _sampling_fields({name: one for name, one in names_in("anthropic").items() if name != "max_tokens"})
    for name, kind in ANTHROPIC_PARTS.items():
        yield f"### {name}\n"
        yield _parts(kind)
    yield f"## Of Ollama's `/api/chat` and `/api/generate`\n\n{OLLAMA}"
    yield _parts(ollama_fields.LoadBody)
    yield "In `/api/chat` only:\n"
    yield _parts(ollama_fields.OllamaChatBody)
    yield "In `/api/generate` only:\n"
    yield _parts(ollama_fields.GenerateBody)
    yield "### A message of `/api/chat`\n"
    yield _parts(ollama_fields.OllamaMessage)
    yield "### `options`\n"
    yield _parts(Options)
    yield "Sampling parameters:\n"
    yield _sampling_fields({name: one for name, one in names_in("ollama").items() if name != "num_predict"})


def _fields(body: type[BaseModel]) -> str:
    types = _types(body)
    rows = []
    for name, text in described(body).items():
        origin, _, what = text.partition(": ")
        rows.append((f"`{name}`", types[name], origin, what))
    return _table(("field", "type", "from", "what it does"), rows)


def _parts(body: type[BaseModel]) -> str:
    """Fields whose comments name no origin: all are of one API."""
    types = _types(body)
    rows = [(f"`{name}`", types[name], text.removeprefix("Anthropic: ")) for name, text in described(body).items()]
    return _table(("field", "type", "what it does"), rows)


def _harmless(table: Mapping[str, str]) -> str:
    return _table(("field", "why ignoring it changes nothing"), [(f"`{name}`", why) for name, why in table.items()])


def _where(name: str) -> str:
    """A field; with the route if the other route implements it."""
    for body, other in ((CompletionBody, "chats"), (ChatBody, "completions")):
        if name in body.model_fields:
            return f"`{name}` in {other}"
    return f"`{name}`"


def _types(body: type[BaseModel]) -> dict[str, str]:
    return {name: _json_type(schema) for name, schema in body.model_json_schema()["properties"].items()}


def _json_type(schema: dict[str, Any]) -> str:
    match schema:
        case {"$ref": _}:
            return "object"
        case {"anyOf": list(kinds)}:
            found = dict.fromkeys(kind for one in kinds if (kind := _json_type(one)) != "null")
            return " or ".join(found) or "null"
        case {"const": value}:
            return _json(value)
        case {"enum": list(values)}:
            return ", ".join(map(_json, values))
        case {"type": "array", "items": dict(items)}:
            return f"list of {_json_type(items)}"
        case {"type": str(kind)}:
            return kind
        case _:
            return "any"


def _json(value: object) -> str:
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
        print(f"wrote docs/reference/{name}")
