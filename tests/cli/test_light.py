"""Commands that ask a server, and those that refuse a mistake, import nothing that loads models or serves them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.cli.command import environment

HEAVY = ("torch", "transformers", "numpy", "uvicorn", "pydantic", "jinja2", "prompt_toolkit")
ANSWERS = {
    "/api/ps": {"models": []},
    "/api/generate": {},
    "/admin/requests": {"requests": []},
    "/admin/cache": {"device": {"namespaces": []}, "store": None},
    "/admin/cluster": {"models": [{"model": "a", "moved": 0, "unranked": 0, "replicas": []}]},
}


class Server(BaseHTTPRequestHandler):
    """Answers what a server without requests would."""

    def do_GET(self) -> None:
        body = json.dumps(ANSWERS.get(self.path.partition("?")[0], {})).encode()
        self.send_response(200 if body != b"{}" or "generate" in self.path else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def imported(home: Path, code: int, *words: str) -> tuple[list[str], str]:
    """What a command has imported of what is heavy, and what it has printed."""
    program = (
        f"import sys; sys.argv = {['kvcellar', *words]!r}\n"
        "from kvcellar.cli.main import main\n"
        f"try:\n    main()\nfinally:\n    print('IMPORTED', *sorted({set(HEAVY)!r} & set(sys.modules)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment(home), capture_output=True, text=True, cwd=home, timeout=120
    )
    printed, _, names = ran.stdout.rpartition("IMPORTED")
    assert ran.returncode == code, ran.stderr
    return names.split(), printed + ran.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("ps",), 0),
        (("stop", "a"), 0),
        (("why",), 0),
        (("cache", "ls"), 0),
        (("cluster", "status"), 0),
        (("top", "--once"), 1),  # it is answered 404
    ],
    ids=str,
)
def test_a_command_that_asks_a_server_imports_little(
    tmp_path: Path, url: str, words: tuple[str, ...], code: int
) -> None:
    assert imported(tmp_path, code, *words, "--url", url)[0] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("FROM embedded\nFROMM x", "Modelfile (line 2): command must be one of"),
        ("FROM ./nothing", "Modelfile (line 1): FROM ./nothing: "),
        ("FROM embedded\nPARAMETER temprature 1", "Modelfile (line 2): there is no parameter 'temprature'"),
        ("FROM embedded\nPARAMETER temperature hot", "Modelfile (line 2): PARAMETER temperature is 'hot'"),
        ("FROM embedded\nTEMPLATE {{ if .x }}", "Modelfile (line 2): TEMPLATE is a template of Go"),
        ("FROM embedded\nADAPTER ./nothing", "Modelfile (line 2): ADAPTER ./nothing: "),
        ("FROM embedded\nDRAFT embedded", "Modelfile (line 2): DRAFT must not"),
        ("FROM embedded\nREQUIRES 99", "Modelfile (line 2): the model requires kvcellar 99"),
    ],
)
def test_a_modelfile_is_checked_before_torch_is_imported(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "Modelfile").write_text(text)
    names, printed = imported(tmp_path, 1, "create", "a")
    assert why in printed
    assert "torch" not in names


def test_a_type_of_weights_is_checked_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "Modelfile").write_text("FROM embedded")
    names, printed = imported(tmp_path, 2, "create", "a", "--quantize", "int3")
    assert "Invalid value for '--quantize'" in printed
    assert "torch" not in names


@pytest.mark.parametrize("command", ["run", "serve", "doctor", "verify"])
def test_what_was_taken_as_a_model_is_said_before_torch_is_imported(tmp_path: Path, command: str) -> None:
    words = {"run": ("nothing", "a prompt"), "serve": ("embedded", "nothing")}.get(command, ("nothing",))
    names, printed = imported(tmp_path, 1, command, *words)
    assert f"'nothing' was taken as MODEL of `kvcellar {command} " in printed
    assert "torch" not in names
