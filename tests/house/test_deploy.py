"""What is in `deploy/` starts commands that exist, with options that exist, as a user without privileges."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import yaml

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
        if sources[0] == "--from=build":
            continue
        assert [source for source in sources if not (ROOT / source).exists()] == []
    installs = [line for line in of("RUN") if "pip install" in line]
    assert len(installs) == 2
    assert all("-c /src/constraints.txt" in line for line in installs)
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = {one for arguments in of("COPY") for one in shlex.split(arguments)[:-1]}
    assert {"src", "pyproject.toml", "hatch_build.py"} <= copied
    assert not copied & set(ignored)


def test_the_image_has_kernels_and_no_compiler():
    lines = instructions()
    second = [at for at, (name, _) in enumerate(lines) if name == "FROM"][1]
    assert any("KVCELLAR_KERNELS=" in arguments for _, arguments in lines[:second])
    assert not any("g++" in arguments for _, arguments in lines[second:])
    (copied,) = (arguments.split() for name, arguments in lines[second:] if name == "COPY")
    assert copied[0] == "--from=build"
    assert copied[1] == copied[2], "an environment has its place in its files"


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


COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
SERVICE, STATEFUL = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())


def test_the_compose_file_starts_a_server_that_finds_its_files_secrets_and_services():
    service = COMPOSE["services"]["kvcellar"]
    options = context(service["command"]).obj
    assert {f"/run/secrets/{one}" for one in service["secrets"]} == {
        options["api_key_file"],
        options["metrics_key_file"],
    }
    assert set(service["secrets"]) <= COMPOSE["secrets"].keys()
    assert options["store_remote"] == "redis://valkey:6379"
    assert "valkey" in COMPOSE["services"]
    assert "remote" in dict(one.split("=") for one in of("ARG") if "=" in one)["EXTRAS"].split(",")
    assert float(service["stop_grace_period"].removesuffix("s")) >= seconds_to_drain(options) + 3
    volumes = json.loads(of("VOLUME")[0])
    assert service["read_only"]
    assert set(volumes) <= {one.split(":")[1] for one in service["volumes"]}, "all that is written has a place"
    assert service["tmpfs"] == ["/tmp"]


def test_what_compose_mounts_is_here_and_prometheus_asks_with_the_key_of_metrics():
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source, *_ = volume.split(":")
            assert not source.startswith("./") or (ROOT / "deploy" / source).is_file(), source
            assert source.startswith((".", "$")) or source in COMPOSE["volumes"], source
    (scrape,) = yaml.safe_load((ROOT / "deploy/prometheus.yaml").read_text())["scrape_configs"]
    assert scrape["authorization"] == {"credentials_file": "/run/secrets/metrics-key"}
    assert scrape["static_configs"] == [{"targets": [f"kvcellar:{of('EXPOSE')[0]}"]}]
    (provider,) = yaml.safe_load((ROOT / "deploy/grafana-dashboards.yaml").read_text())["providers"]
    assert any(
        one.split(":")[1].startswith(provider["options"]["path"]) for one in COMPOSE["services"]["grafana"]["volumes"]
    )


def test_the_manifest_starts_a_server_without_privileges_that_has_time_to_end():
    spec = STATEFUL["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    options = context(container["args"]).obj
    assert spec["terminationGracePeriodSeconds"] >= seconds_to_drain(options) + 3
    assert f"--uid {spec['securityContext']['runAsUser']} " in " ".join(of("RUN"))
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert {*json.loads(of("VOLUME")[0]), "/tmp", str(Path(options["api_key_file"]).parent)} <= mounts.keys()
    named = {one["name"] for one in spec["volumes"]}
    claims = {one["metadata"]["name"] for one in STATEFUL["spec"]["volumeClaimTemplates"]}
    assert set(mounts.values()) == named | claims
    assert mounts["/state"] in claims, "what it remembers outlives the pod"


def test_the_manifest_probes_routes_that_need_no_key_at_the_port_of_the_server():
    (container,) = STATEFUL["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == context(container["args"]).obj["port"]
    assert SERVICE["spec"]["ports"][0]["targetPort"] == port["name"]
    assert SERVICE["spec"]["selector"] == STATEFUL["spec"]["template"]["metadata"]["labels"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {one["port"] for one in probes.values()} == {port["name"]}
    assert {name: one["path"] for name, one in probes.items()} == {
        "startup": "/live",
        "liveness": "/live",
        "readiness": "/ready",
    }
    assert {"/live", "/ready"} <= set(OPEN)


@pytest.mark.parametrize("manifest", [SERVICE, STATEFUL], ids=lambda one: one["kind"])
def test_the_manifest_fits_the_schemas_of_kubernetes(manifest):
    validate = pytest.importorskip("kubernetes_validate", reason="it is not installed: `make .venv/.wheel`")
    validate.validate(manifest, "1.33", strict=True)
