"""A small model in a directory, engines of it on a thread and in a process, and what one hears of their requests."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvcellar import Constraint, Engine, Result
from kvcellar.frontend.client import EngineClient
from tests.engine.embedding_models import saved
from tests.engine.test_going_on import Ear, submission
from tests.models import lora

PATIENCE = 120.0  # seconds; only a test that fails waits so long
SMALL: Any = {"dtype": "float32", "cache_bytes": 8_000_000, "threads": 1, "record": "off", "pack": False}
GREEDY: Any = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
SEEDED: Any = {"max_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True}
LONG: Any = {"max_tokens": 100_000, "temperature": 0.0, "ignore_eos": True, "shift": True}  # it does not end by itself
ASSISTANT = "{% if add_generation_prompt %}assistant:{% endif %}"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}" + ASSISTANT
SCHEMA = Constraint.json_schema(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer", "minimum": 100, "maximum": 99999}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
MATCHING: Any = {"max_tokens": 60, "temperature": 1.0, "seed": 5, "constraint": SCHEMA}
CHAT = [{"role": "user", "content": "Who keeps the cellar?"}]


def model_in(folder: Path) -> Path:
    """With a tokenizer, a chat template and a pooling, and adapters in `adapter` and `other`."""
    network = saved(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    layers = lora.layers_of(network, lora.ends_with("q_proj", "v_proj"))
    for seed, name in enumerate(("adapter", "other")):
        lora.saved(folder / name, layers, seed=seed, strength=2.0)
    return folder


def sent(client: EngineClient, prompt: tuple[int, ...], **sampling: Any) -> tuple[int, Ear]:
    """A request to the engine itself, without text: its number, and what it hears."""
    number, ear = client.number(), Ear()
    client.submit(submission(prompt, number=number, **sampling), ear)
    return number, ear


def outcome(result: Result) -> Any:
    """All of it that does not depend on time and memory."""
    told = [(one.text, one.token_ids, one.finish_reason, one.stop_string) for one in result.choices]
    return told, result.usage.prompt_tokens, result.usage.completion_tokens


def conversation(engine: Engine) -> Any:
    """Two turns, a fork, and a turn in each."""
    with engine.session() as session:
        first = outcome(session.send("Who keeps the cellar?", **SEEDED))
        with session.fork() as fork:
            turns = [outcome(one.send(text, **SEEDED)) for one, text in ((session, "Why?"), (fork, "When?"))]
        return first, turns


ASKED: Mapping[str, Callable[[Engine], Any]] = {
    "greedy": lambda engine: outcome(engine.generate([5, 6, 7, 8], **GREEDY)),
    "seeded": lambda engine: outcome(engine.generate("The cellar", **SEEDED)),
    "outputs": lambda engine: outcome(engine.generate([9, 8, 7], n=3, **SEEDED)),
    "schema": lambda engine: outcome(engine.generate([5, 6], **MATCHING)),
    "conversation": conversation,
    "stop string": lambda engine: outcome(engine.generate([5, 6, 7], **SEEDED | {"stop": "e", "max_tokens": 200})),
    "chat": lambda engine: outcome(engine.chat(CHAT, **SEEDED)),
    "batch": lambda engine: [outcome(one) for one in engine.generate([[5, 6], [7, 8], [9]], **GREEDY)],
}


def eventually(holds: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait until it does. Only a test that fails waits for so many seconds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"{what}: that does not happen"
        time.sleep(0.005)


def at_rest(engine: Engine) -> None:
    """Wait until no request is left, and then assert that none holds anything."""

    def still() -> bool:
        stats = engine.stats()
        return not (stats.running or stats.waiting)

    eventually(still, "all requests end")
    stats = engine.stats()
    assert (stats.sequences, stats.cells_used, stats.rows_used) == (0, 0, 0)
    engine.check()
