"""The unit and the container file start commands that exist, with options that exist, as a user without privileges."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from kvcellar.cli.main import cli
from kvcellar.serve.admin.health import OPEN

ROOT = Path(__file__).parents[2]
UNIT, CONTAINER = ROOT / "deploy/kvcellar.service", ROOT / "deploy/Containerfile"


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read_string(UNIT.read_text())
    return found


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the container file, with its arguments."""
    text = re.sub(r"\\\n", " ", "".join(re.findall(r"^(?!#).*\n", CONTAINER.read_text(), re.M)))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def of(name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == name]


def context(words: list[str]) -> click.Context:
    """The words of a `kvcellar` command as click reads them; fails for what the command does not have."""
    name, command, rest = cli.resolve_command(click.Context(cli), words)
    assert command is not None
    parser = command.make_parser(click.Context(command, info_name=name))
    options, _, _ = parser.parse_args(rest)
    return click.Context(command, obj=options)


def seconds_to_drain(options: dict[str, str]) -> float:
    return float(options.get("drain_seconds", 5))


def test_the_unit_starts_a_server_with_options_that_exist_and_leaves_time_to_end():
    service = unit()["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert Path(program).name == "kvcellar"
    options = context(words).obj
    assert float(service["TimeoutStopSec"]) >= seconds_to_drain(options) + 3
    assert service["User"] == "kvcellar"
    assert "-HUP" in service["ExecReload"], "the signal that reads the keys again"
    assert options["api_key_file"] == "%d/keys"
    assert service["LoadCredential"].startswith("keys:")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_has_no_complaint_about_the_unit(tmp_path):
    """The program and the user are not there on the machine of a test."""
    text = UNIT.read_text().replace("/srv/kvcellar/.venv/bin/kvcellar", "/bin/true").replace("kvcellar.service", "")
    text = re.sub(r"^(User|Group|Documentation)=.*\n", "", text, flags=re.M)
    (tmp_path / "kvcellar.service").write_text(text)
    ran = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "kvcellar.service")], capture_output=True, text=True
    )
    complaints = [line for line in ran.stderr.splitlines() if "kvcellar.service" in line]
    assert complaints == []


def test_the_container_builds_from_files_of_this_repository_by_the_constraints():
    for arguments in of("COPY"):
        *sources, _ = shlex.split(arguments)
        assert [source for source in sources if not (ROOT / source).exists()] == []
    installs = [line for line in of("RUN") if "pip install" in line]
    assert len(installs) == 2
    assert all("-c /src/constraints.txt" in line for line in installs)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"src", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} & set(ignored)


def test_the_container_runs_a_server_without_privileges():
    (entry,), (command,), (user,) = (json.loads(of("ENTRYPOINT")[0]),), (json.loads(of("CMD")[0]),), (of("USER")[0],)
    assert (entry, user) == (["kvcellar"], "kvcellar")
    options = context(command).obj
    assert options["host"] == "0.0.0.0"
    assert options["api_key_file"], "an address that other machines can reach needs keys"
    assert [options["port"]] == of("EXPOSE")
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(at for at, name in enumerate(names) if name == "RUN")


def test_the_container_is_probed_at_a_route_that_needs_no_key():
    (probe,) = of("HEALTHCHECK")
    (path,) = re.findall(r"127\.0\.0\.1:8080(/\w+)", probe)
    assert path in OPEN
