"""A server with the embedded model, which gets a chat template with tools."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar import Engine
from kvcellar.engine.models import embedded
from kvcellar.serve import Server, ServeSettings
from tests.engine.mixes import assert_at_rest
from tests.text.replies.chats import chat

# Calls, but no reasoning, which would be free in front of a required call, and which this model would not end.
CALLS = """{% for c in m.tool_calls or [] %}
<tool_call>
{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "caller"
    shutil.copytree(Path(embedded.__file__).parent, path, ignore=shutil.ignore_patterns("*.py", "__pycache__", "mtp*"))
    (path / "chat_template.jinja").write_text(chat(CALLS))
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, dtype="float32", device="cpu", cache_bytes=64_000_000, threads=1) as engine:
        yield engine
        assert_at_rest(engine)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with Server(engine, ServeSettings(port=0)) as server:
        yield server
