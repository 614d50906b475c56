"""Fields of a request that state how long what it computes is kept."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest

from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions
from kvcellar.serve import Server, ServeSettings
from tests.engine.mixes import small_engine
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import CHAT, COMPLETIONS, chat, completion, error_of

DAY = 86400.0


@pytest.fixture
def fake():
    return FakeEngine()


@contextmanager
def connected(fake: FakeEngine, **settings: bool) -> Iterator[httpx.Client]:
    with Server(fake, ServeSettings(port=0, **settings)) as server, DeclaredClient(base_url=server.url) as http:
        yield http


def stated(fake: FakeEngine, route: str, fields: dict[str, object], **settings: bool) -> RetentionOptions:
    """The retention with which a request reaches the engine."""
    with connected(fake, **settings) as http:
        body = chat() if route == CHAT else completion()
        response = http.post(route, json=body | fields)
        assert response.status_code == 200, response.text
    return fake.retentions[-1]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, NO_OPTIONS),
        ({"prompt_cache_key": "agent-7"}, RetentionOptions(recurring=True)),
        ({"prompt_cache_key": ""}, NO_OPTIONS),
        ({"prompt_cache_retention": None}, NO_OPTIONS),
        ({"prompt_cache_retention": "in_memory"}, RetentionOptions(stored=False)),
        ({"prompt_cache_retention": "24h"}, RetentionOptions(ttl=DAY)),
        ({"prompt_cache_retention": "24h", "cache_ttl": 86400}, RetentionOptions(ttl=DAY)),
        ({"prompt_cache_retention": "in_memory", "cache_ttl": 60}, RetentionOptions(stored=False, ttl=60)),
        ({"cache_ttl": 0.5, "cache_priority": -8}, RetentionOptions(ttl=0.5, priority=-8)),
        ({"cache_pin": False, "cache_priority": 0}, NO_OPTIONS),
    ],
)
def test_fields_become_the_retention_of_the_request(fake, route, fields, options) -> None:
    assert stated(fake, route, fields) == options


FOR_ALL = [("cache_pin", True, RetentionOptions(pinned=True)), ("cache_priority", 8, RetentionOptions(priority=8))]


@pytest.mark.parametrize(("name", "value", "options"), FOR_ALL)
def test_what_is_at_the_cost_of_others_needs_the_servers_leave(fake, name, value, options) -> None:
    with connected(fake) as http:
        response = http.post(CHAT, json=chat(**{name: value}))
        error = error_of(response)
        assert (response.status_code, error["param"], error["code"]) == (403, name, "not_allowed")
    assert not fake.seen
    assert stated(fake, CHAT, {name: value}, client_pins=True) == options


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"prompt_cache_retention": "7d"}, "prompt_cache_retention"),
        ({"prompt_cache_retention": "24h", "cache_ttl": 60}, "cache_ttl"),
        ({"cache_ttl": 0}, "cache_ttl"),
        ({"cache_ttl": 1e12}, "cache_ttl"),
        ({"cache_ttl": "60"}, "cache_ttl"),
        ({"cache_priority": 9}, "cache_priority"),
        ({"cache_priority": 1.5}, "cache_priority"),
        ({"cache_pin": 1}, "cache_pin"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(fake, fields, param) -> None:
    with connected(fake, client_pins=True) as http:
        response = http.post(COMPLETIONS, json=completion(**fields))
        assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert not fake.seen


def test_the_fields_work_with_the_client_of_openai() -> None:
    """A pinned prompt outlasts others; what is kept in memory only is not in the store; a key separates no memory."""
    with small_engine("llama") as engine, Server(engine, ServeSettings(port=0, client_pins=True)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=PATIENCE) as client:

            def cached(prompt: list[int], **fields: object) -> int:
                how = {"extra_body": {name: value for name, value in fields.items() if name.startswith("cache_")}}
                how |= {name: value for name, value in fields.items() if name.startswith("prompt_")}
                model = client.models.list().data[0].id
                answer = client.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0, **how)
                return answer.usage.prompt_tokens_details.cached_tokens

            prompt = list(range(5, 45))
            assert cached(prompt, cache_pin=True, cache_ttl=3600) == 0
            assert engine.stats().pinned == 40
            others = {"prompt_cache_key": "agent", "prompt_cache_retention": "24h"}
            extra = {"extra_body": others}
            model = client.models.list().data[0].id
            usage = client.completions.create(model=model, prompt=prompt, max_tokens=1, **extra).usage
            assert usage.prompt_tokens_details.cached_tokens == 39
