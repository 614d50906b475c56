"""The commands and the Python of every how-to page run, in the order of the page and in one directory.

In that directory `my-model` is a model (the embedded one). `kvcellar` and `python -m` run in this process. A server
that `kvcellar serve ... &` starts serves the rest of the page, at the address that the page names. A command that
should fail has a comment, `# exit code 2`. What cannot run here has a line before it, `*Not run by the tests: it
needs X.*`, and contains the command of X.
"""

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvcellar.cli.hosting import Hosting, hosting
from kvcellar.cli.main import cli
from kvcellar.serve import ModelManager, Server, ServeSettings
from kvcellar.serve.http.server import bind

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "src/kvcellar/engine/models/embedded"
PAGES = sorted((ROOT / "docs/howto").glob("*.md"))
NEEDS = {
    "a hub": "kvcellar pull",
    "a package index": "pip install",
    "a GGUF file": ".gguf",
    "systemd": "systemd",
    "a container runtime": "docker",
    "a CUDA device": "cuda",
    "a cluster": "kvcellar cluster",
    "Kubernetes": "kubectl",
    "minutes": "make",
}
LONG = (  # pages whose models are loaded several times; the commands of the others are much the same
    "conversations", "deploy", "embeddings", "inspector", "keys-and-exposure", "limit-memory", "measure", "metrics",
    "models", "other-clients", "prefix-cache", "quantize", "responses", "score-text", "serve-several",
    "serve-your-model", "sessions", "share-a-machine", "speculate",
    "structured-output", "support-a-model-kind", "traces", "why",
)  # fmt: skip
SHOWN = {"text", "json", "toml"}  # languages of what is neither a command nor a program
FENCE = re.compile(r"(?:^\*Not run by the tests: it needs ([^\n]+)\.\*\n\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass
class Page:
    """A page that is being run. `served` has the address of the server that the page has started."""

    monkeypatch: pytest.MonkeyPatch
    stack: ExitStack
    served: dict[str, str] = field(default_factory=dict)

    def python(self, code: str) -> None:
        with redirect_stdout(io.StringIO()):
            exec(compile(self.here(code), "<fence>", "exec"), {"__name__": "__fence__"})

    def shell(self, text: str) -> None:
        for line in text.replace("\\\n", " ").splitlines():
            command, _, comment = line.partition("  # ")
            if not command.strip() or command.startswith("#"):
                continue
            expected = int(found[1]) if (found := re.search(r"exit code (\d+)", comment)) else 0
            code, output = self.run(self.here(command.strip()))
            assert code == expected, f"{line}\n{output}"

    def run(self, command: str) -> tuple[int, str]:
        piped, bar, last = command.rpartition(" | ")
        words = shlex.split(last)
        if bar and words[0] == "kvcellar":
            source = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, check=True)
            return self.kvcellar(words[1:], source.stdout)
        words = shlex.split(command)
        if words[0] == "kvcellar":
            return self.kvcellar(words[1:], "")
        if words[:2] == ["python", "-m"]:
            self.monkeypatch.setattr(sys, "argv", words[2:])
            self.monkeypatch.delitem(sys.modules, words[2], raising=False)  # another test may have imported it
            with redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
                runpy.run_module(words[2], run_name="__main__")
            return int(ended.value.code or 0), out.getvalue()
        ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
        return ran.returncode, ran.stdout + ran.stderr

    def kvcellar(self, words: list[str], piped: str) -> tuple[int, str]:
        target = words[words.index(">") + 1] if ">" in words else None
        words = [word for word in words if word not in (">", target, "&")]
        ran = CliRunner().invoke(cli, words, input=piped)
        if target is not None:
            Path(target).write_text(ran.stdout)
        return ran.exit_code, ran.output

    def here(self, text: str) -> str:
        for address, url in self.served.items():
            text = text.replace(address, url)
        return text

    @contextmanager
    def hosting(self, models: Sequence[str], **options: Any) -> Iterator[Hosting]:
        yield self.stack.enter_context(hosting(models, **options))

    def serve(
        self,
        models: ModelManager,
        settings: ServeSettings,
        *,
        library: Any,
        tools: Any,
        mount: Any,
        load: Callable[[], None],
        **_: object,
    ) -> None:
        load()
        port, settings = settings.port, _anywhere(settings)
        server = self.stack.enter_context(Server(models, settings, library=library, tools=lambda: tools, mount=mount))
        self.served[f"http://127.0.0.1:{port}"] = server.url


def _anywhere(settings: ServeSettings) -> ServeSettings:
    return replace(settings, host="127.0.0.1", port=0)


@pytest.fixture
def page(monkeypatch, tmp_path) -> Iterator[Page]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    (tmp_path / "my-model").symlink_to(EMBEDDED)
    with ExitStack() as stack:
        page = Page(monkeypatch, stack)
        monkeypatch.setattr("kvcellar.cli.hosting.hosting", page.hosting)
        monkeypatch.setattr("kvcellar.serve.http.server.bind", lambda settings: bind(_anywhere(settings)))
        monkeypatch.setattr("kvcellar.serve.http.server.run", page.serve)
        yield page


def play(text: str, page: Page) -> int:
    """Run the fences of `text`. Returns their number."""
    ran = 0
    for needs, language, code in FENCE.findall(text):
        if needs:
            assert NEEDS[needs] in code, f"this does not seem to need {needs}:\n{code}"
        elif language == "python":
            page.python(code)
            ran += 1
        elif language == "sh":
            page.shell(code)
            ran += 1
        else:
            assert language in SHOWN, f"a fence of {language!r} neither runs nor has a reason"
    return ran


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=pytest.mark.slow if p.stem in LONG else ()) for p in PAGES]
)
def test_the_commands_of_a_page_run(path, page):
    assert play(path.read_text(), page), "nothing on this page runs"


@pytest.mark.parametrize("wrong", ["```sh\nfalse\n```\n", "```python\nassert False\n```\n", "```ini\n[Unit]\n```\n"])
def test_a_fence_that_fails_or_does_not_run_is_seen(page, wrong):
    with pytest.raises(AssertionError):
        play(wrong, page)


def test_a_fence_is_left_out_only_for_what_its_command_needs(page):
    mark = "*Not run by the tests: it needs systemd.*\n\n"
    assert play(f"{mark}```ini\n# in systemd/system\n```\n", page) == 0
    with pytest.raises(AssertionError, match="does not seem to need systemd"):
        play(f"{mark}```sh\nls\n```\n", page)


def test_pages_that_are_left_to_the_long_run_exist():
    assert {path.stem for path in PAGES} >= {*LONG}


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    assert [path.name for path in PAGES if f"(howto/{path.name})" not in index] == []


@pytest.mark.parametrize(
    "command", ["kvcellar run my-model --top-p 2 x", "kvcellar nothing", "false", "kvcellar doctor no-model"]
)
def test_a_command_that_fails_is_seen(page, command):
    with pytest.raises(AssertionError):
        page.shell(command)
