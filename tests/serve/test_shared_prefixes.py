"""What a request has computed is not computed again by requests of the same API key and user, and by no others."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest

from kvcellar import BadRequest, Engine
from kvcellar.memory.prefix.node import common_prefix
from kvcellar.serve import Server, ServeSettings, key_digest
from tests.engine.mixes import small_engine, tokens
from tests.serve.fake_engine import PATIENCE, FakeEngine

KEYS = ("one-key-of-the-server", "another-key-of-the-server")
KINDS = ["llama", "gemma3", "llama4", "lfm2"]  # full, sliding, chunked, hybrid
GREEDY = {"temperature": 0, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
CHAT = [{"role": "user", "content": "def add(a, b):"}]


@contextmanager
def client_of(engine: Engine, key: str = KEYS[0], **settings: bool) -> Iterator[openai.OpenAI]:
    with Server(engine, ServeSettings(port=0, key_digests=tuple(map(key_digest, KEYS)), **settings)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE) as client:
            yield client


def complete(client: openai.OpenAI, prompt: list[int], *, key: str | None = None, **fields: object):
    """Of a prompt: the usage, and the tokens that follow it."""
    asking = client if key is None else client.with_options(api_key=key)
    how = GREEDY | {"extra_body": GREEDY["extra_body"] | fields}
    answer = asking.completions.create(model=asking.models.list().data[0].id, prompt=prompt, max_tokens=6, **how)
    return answer.usage, answer.choices[0].token_ids


@pytest.mark.parametrize("name", KINDS)
def test_each_turn_of_a_conversation_reads_only_what_is_new(name) -> None:
    draw = random.Random(name)
    with small_engine(name) as engine, client_of(engine) as client:
        text: list[int] = []
        for _ in range(10):
            known = max(0, len(text) - 1)  # the last token of an answer was drawn, and not computed
            text += tokens(draw, 8)
            usage, answer = complete(client, text)
            assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (len(text), known)
            text += answer
        engine.clear_cache()
        stats = engine.stats()
        assert (stats.cells_used, stats.cells_cached, stats.rows_used, stats.rows_cached) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", KINDS)
def test_clients_of_one_key_read_their_common_prefix_once(name) -> None:
    """Where resuming needs a checkpoint, at most once more: only the second request shows where prompts diverge, and
    the first may have passed that position before."""
    draw = random.Random(name)
    system = list(tokens(draw, 150))
    own = [[3 + number, *tokens(draw, 4)] for number in range(24)]
    with small_engine(name) as engine, client_of(engine) as client, ThreadPoolExecutor(len(own)) as pool:
        usages = list(pool.map(lambda rest: complete(client, system + rest)[0], own))
    read = sum(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens for usage in usages)
    once = len(system) + sum(map(len, own))
    assert read == once or (name != "llama" and once < read <= once + len(system))


def test_clients_of_one_key_read_the_system_prompt_of_their_chats_once() -> None:
    """Of the embedded model, which has windows and recurrent layers: where messages begin, checkpoints are left."""
    system = {"role": "system", "content": "You write short functions. " * 12}
    users = [f"def number_{number}(value):" for number in range(12)]

    def ask(text: str):
        messages = [system, {"role": "user", "content": text}]
        return client.chat.completions.create(model=name, messages=messages, max_tokens=2, temperature=0).usage

    with (
        Engine(dtype="float32", device="cpu", cache_bytes=64_000_000, threads=1) as engine,
        client_of(engine) as client,
    ):
        name = engine.model.name
        common = common_prefix(*(engine.render([system, {"role": "user", "content": text}]) for text in ("a", "b")))
        with ThreadPoolExecutor(len(users)) as pool:
            usages = list(pool.map(ask, users))
    prompts = sum(usage.prompt_tokens for usage in usages)
    read = prompts - sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert read <= prompts - (len(users) - 1) * (common - 8), "a system prompt ends a few tokens before prompts diverge"


def read_of(client: openai.OpenAI, key: str | None = None, **fields: object) -> int:
    usage, _ = complete(client, list(range(5, 45)), key=key, **fields)
    return usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens


FIELDS = ("cache_salt", "user", "safety_identifier")


@pytest.mark.parametrize("field", FIELDS)
def test_other_keys_salts_and_users_find_nothing(field) -> None:
    with small_engine("llama") as engine, client_of(engine) as client:
        assert (read_of(client), read_of(client)) == (40, 1)
        assert (read_of(client, KEYS[1]), read_of(client, KEYS[1])) == (40, 1)
        assert (read_of(client, **{field: "a"}), read_of(client, **{field: "a"})) == (40, 1)
        assert read_of(client, **{field: "b"}) == 40
        assert read_of(client, KEYS[1], **{field: "a"}) == 40
        others = [name for name in FIELDS if name != field]
        assert [read_of(client, **{name: "a"}) for name in others] == [40, 40], "fields have namespaces of their own"


def test_prefixes_are_shared_by_all_where_that_is_switched_on_but_for_salts() -> None:
    with small_engine("llama") as engine, client_of(engine, share_prefixes=True) as client:
        assert (read_of(client), read_of(client, KEYS[1]), read_of(client, user="a")) == (40, 1, 1)
        assert (read_of(client, cache_salt="a"), read_of(client, KEYS[1], cache_salt="a")) == (40, 1)


@pytest.mark.parametrize("share", [True, False])
def test_what_is_shared_is_shown_to_no_other_key(share) -> None:
    """With keys that share, a response has no text of the prompt that it diverges from."""
    with small_engine("llama") as engine, client_of(engine, share_prefixes=share) as client:
        complete(client, [*range(5, 45), 50, 51, 52])
        other = KEYS[1] if share else None
        usage, _ = complete(client, [*range(5, 45), 60, 61], key=other, return_recall=True)
        (recall,) = usage.recall
        assert (recall["reason"], recall["matched"]) == ("diverged", 40)
        hidden = [recall[name] for name in ("entry", "ours", "theirs", "rewrite", "image")]
        assert hidden == ["", None, None, None, ""] if share else recall["theirs"]["tokens"][:3] == [50, 51, 52]


def test_the_owner_of_a_request_is_its_api_key() -> None:
    """Not its user, which a client may choose; and also where all keys share."""
    fake = FakeEngine()
    for settings in ({}, {"share_prefixes": True}):
        fake.retentions.clear()
        with client_of(fake, **settings) as client:
            for key, fields in ((KEYS[0], {}), (KEYS[0], {"user": "a", "cache_salt": "b"}), (KEYS[1], {})):
                name = client.models.list().data[0].id
                client.with_options(api_key=key).completions.create(model=name, prompt="a", extra_body=fields)
        owners = [retention.owner for retention in fake.retentions]
        assert owners[0] == owners[1] != owners[2]
        assert all(owners)
    fake.retentions.clear()
    with Server(fake, ServeSettings(port=0)) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as none:
        none.completions.create(model=fake.model.name, prompt="a")
    assert [retention.owner for retention in fake.retentions] == [""]


@pytest.mark.parametrize("namespace", [5, None, "n" * 257, "n\ud800"])
def test_what_is_no_namespace_is_refused(namespace) -> None:
    with small_engine("llama") as engine, pytest.raises(BadRequest, match="namespace is"):
        engine.submit([5], engine.params(), deliver=lambda event: None, namespace=namespace)
