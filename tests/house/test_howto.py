"""The commands and the Python of every how-to page and tutorial run, in the order of the page, in one directory and
with an empty home. In a tutorial, a fence of text is what the fence before it has printed, where `...` stands for what
is different on each machine.

In that directory `my-model` is a model (the embedded one). `kvcellar` and `python -m` run in this process. A server
that `kvcellar serve ... &` starts serves the rest of the page, at the address that the page names. A command that
should fail has a comment, `# exit code 2`. What cannot run here has a line before it, `*Not run by the tests: it
needs X.*`, and contains the command of X.
"""

import ast
import doctest
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import ollama
import pytest
from anthropic import Anthropic
from click.testing import CliRunner
from openai import OpenAI
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvcellar.cli.hosting import Hosting, hosting
from kvcellar.cli.main import cli
from kvcellar.serve import ModelManager, Server, ServeSettings
from kvcellar.serve.http.server import bind

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "src/kvcellar/engine/models/embedded"
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
PAGES = [*sorted((ROOT / "docs/howto").glob("*.md")), *TUTORIALS]
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
    "free ports": "tcp://",
}
LONG = (  # pages whose models are loaded several times; the commands of the others are much the same
    "conversations", "deploy", "embeddings", "inspector", "keys-and-exposure", "limit-memory", "measure", "metrics",
    "models", "other-clients", "prefix-cache", "quantize", "responses", "score-text", "serve-several",
    "serve-your-model", "sessions", "share-a-machine", "speculate",
    "structured-output", "support-a-model-kind", "traces", "why",
    "an-agent-with-forks", "from-ollama", "from-transformers", "from-vllm", "serve-a-team",
)  # fmt: skip
SAME = doctest.OutputChecker().check_output
SHOWN = {"text", "json", "toml"}  # languages of what is neither a command nor a program
FENCE = re.compile(r"(?:^\*Not run by the tests: it needs ([^\n]+)\.\*\n\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass
class Page:
    """A page that is being run. `served` has the address of the server that the page has started."""

    monkeypatch: pytest.MonkeyPatch
    stack: ExitStack
    served: dict[str, str] = field(default_factory=dict)

    def python(self, code: str) -> str:
        names: dict[str, Any] = {"__name__": "__fence__"}
        with redirect_stdout(io.StringIO()) as out:
            exec(compile(self.here(code), "<fence>", "exec"), names)
        for client in [one for one in names.values() if isinstance(one, Anthropic | ollama.Client | OpenAI)]:
            client.close()  # at the end of a program, the system does
        return out.getvalue()

    def shell(self, text: str) -> str:
        printed = ""
        for line in text.replace("\\\n", " ").splitlines():
            command, _, comment = line.partition("  # ")
            if not command.strip() or command.startswith("#"):
                continue
            expected = int(found[1]) if (found := re.search(r"exit code (\d+)", comment)) else 0
            code, output = self.run(self.here(command.strip()))
            assert code == expected, f"{line}\n{output}"
            printed += output
        return printed

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
            return ran.exit_code, ""
        return ran.exit_code, ran.output if ran.exit_code else ran.stdout

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
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))  # kernels
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:
        page = Page(monkeypatch, stack)
        monkeypatch.setattr("kvcellar.cli.hosting.hosting", page.hosting)
        monkeypatch.setattr("kvcellar.serve.http.server.bind", lambda settings: bind(_anywhere(settings)))
        monkeypatch.setattr("kvcellar.serve.http.server.run", page.serve)
        yield page


def play(text: str, page: Page, *, outputs: bool = False) -> int:
    """Run the fences of `text`. Returns their number. With `outputs`, fences of text are what those before print."""
    ran, printed = 0, ""
    for needs, language, code in FENCE.findall(text):
        if needs:
            assert NEEDS[needs] in code, f"this does not seem to need {needs}:\n{code}"
        elif language in ("python", "sh"):
            printed = page.python(code) if language == "python" else page.shell(code)
            ran += 1
        elif outputs and language == "text":
            shown = SAME(code, printed.rstrip("\n") + "\n", doctest.ELLIPSIS)
            assert shown, f"the page shows\n{code}\nand its code prints\n{printed}"
        else:
            assert language in SHOWN, f"a fence of {language!r} neither runs nor has a reason"
    return ran


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=pytest.mark.slow if p.stem in LONG else ()) for p in PAGES]
)
def test_the_commands_of_a_page_run(path, page):
    assert play(path.read_text(), page, outputs=path in TUTORIALS), "nothing on this page runs"


@pytest.mark.slow
def test_the_commands_of_the_readme_run(page, tmp_path):
    """But for make, which has made the environment of this test, and for what needs a hub or a terminal."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for name in ("one", "another"):
        shutil.copytree(EMBEDDED, tmp_path / name)  # a link would have the name of what it leads to
    text = (ROOT / "README.md").read_text().replace(".venv/bin/", "").replace("path/to/model", "my-model")
    text = re.sub(r"^(kvcellar serve\b.*?)(?= +#|$)", r"\1 &", text, flags=re.M)
    assert play(re.sub(r"^(make|kvcellar pull|kvcellar run +#) .*\n", "", text, flags=re.M), page) > 5


@pytest.mark.parametrize("wrong", ["```sh\nfalse\n```\n", "```python\nassert False\n```\n", "```ini\n[Unit]\n```\n"])
def test_a_fence_that_fails_or_does_not_run_is_seen(page, wrong):
    with pytest.raises(AssertionError):
        play(wrong, page)


def test_a_fence_is_left_out_only_for_what_its_command_needs(page):
    mark = "*Not run by the tests: it needs systemd.*\n\n"
    assert play(f"{mark}```ini\n# in systemd/system\n```\n", page) == 0
    with pytest.raises(AssertionError, match="does not seem to need systemd"):
        play(f"{mark}```sh\nls\n```\n", page)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_begins_with_what_to_type_and_has_two_screens(path):
    lines = path.read_text().splitlines()
    assert any(line.startswith("```") for line in lines[:20]), "what is to be typed is not in the first twenty lines"
    assert len(lines) <= 120, "move what is specified to docs/reference"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def brought(requirements: Iterable[str]) -> set[str]:
    """The distributions that pip installs for these requirements, as far as they are installed here."""
    found, left = set[str](), [Requirement(one) for one in requirements]
    while left:
        if (name := canonicalize_name(left.pop().name)) in found:
            continue
        found.add(name)
        try:
            more = [Requirement(one) for one in requires(name) or ()]
        except PackageNotFoundError:
            continue
        left += [one for one in more if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@cache
def ours() -> frozenset[str]:
    return frozenset(brought(PROJECT["dependencies"]))


def named(text: str) -> set[str]:
    """The distributions that `pip install` in `text` installs."""
    words = [word.strip("\"'") for found in re.findall(r"pip install ([^`\n]+)", text) for word in found.split()]
    extras = [extra for word in words for extra in re.findall(r"^kvcellar\[(\w+)\]", word)]
    wanted = [one for extra in extras for one in PROJECT["optional-dependencies"][extra]]
    return brought([*wanted, *(word for word in words if re.fullmatch(r"[\w.-]+", word) and word[0] != "-")])


def not_said(text: str) -> set[str]:
    """What the Python of a page imports that neither kvcellar nor the page, before that, has installed."""
    missing, who = set[str](), packages_distributions()
    for fence in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        have = ours() | named(text[: fence.start()])
        for node in ast.walk(ast.parse(fence[1])):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else ()
            modules = [str(node.module)] if isinstance(node, ast.ImportFrom) else modules
            for module in {module.partition(".")[0] for module in modules} - {*sys.stdlib_module_names, "kvcellar"}:
                if not have & {canonicalize_name(name) for name in who.get(module, [module])}:
                    missing.add(module)
    return missing


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=lambda path: path.stem)
def test_a_page_says_what_to_install_before_it_is_imported(path):
    assert not_said(path.read_text()) == set()


def test_an_import_that_was_not_installed_is_seen():
    page = "```python\nimport os\nimport torch\nimport openai\n```\n"
    assert not_said(page) == {"openai"}
    assert not_said(f"`pip install openai`\n\n{page}") == set()
    assert not_said('`pip install "kvcellar[events]"`\n\n```python\nimport zmq\n```\n') == set()


def test_pages_that_are_left_to_the_long_run_exist():
    assert {path.stem for path in PAGES} >= {*LONG}


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    assert [path.name for path in PAGES if f"({path.parent.name}/{path.name})" not in index] == []


def test_pages_run_with_an_empty_home(page):
    page.python("from pathlib import Path\nassert not Path.home().exists()")


def test_what_a_tutorial_shows_is_what_its_code_prints(page):
    assert play("```python\nprint(1, 2)\n```\n\n```text\n1 ...\n```\n", page, outputs=True) == 1
    with pytest.raises(AssertionError, match="its code prints"):
        play("```sh\necho 1\n```\n\n```text\n2\n```\n", page, outputs=True)


@pytest.mark.parametrize(
    "command", ["kvcellar run my-model --top-p 2 x", "kvcellar nothing", "false", "kvcellar doctor no-model"]
)
def test_a_command_that_fails_is_seen(page, command):
    with pytest.raises(AssertionError):
        page.shell(command)
