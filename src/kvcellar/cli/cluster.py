"""cluster: the subcommands of a cluster of engines on Ray Serve."""

import json
import os
import random
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from kvcellar.cli import top
from kvcellar.cli.client import AdminClient, server_options, why_command
from kvcellar.cli.completion import loadable_models
from kvcellar.cli.options import FILE, STORE_KEY, Command, adapter_option, given, json_option, together
from kvcellar.cli.printing import replica_lines
from kvcellar.cli.progress_line import working
from kvcellar.cli.serve import HTTP_OPTIONS, http_options
from kvcellar.cli.setting_options import engine_options, image_options
from kvcellar.cli.store_options import placed, store_options
from kvcellar.engine.load.in_library import located
from kvcellar.engine.models.weights.find import find
from kvcellar.errors import BadRequest, EngineFailed, extra_missing

NAME = "kvcellar"  # of the application
ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # HAProxy passes streams on; Serve's own proxy takes a millisecond for each part
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # for HAProxy to leave out a gateway that ends
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # of a busy machine; Serve kills HAProxy after 5 s, and fails
    "RAY_USAGE_STATS_ENABLED": "0",
}
PORTS = (  # fixed ones would be those of all clusters of a machine: HAProxy passes requests to the last one at times
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)
GATEWAY_PORTS = ("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT")  # likewise
STARTED = (signal.SIGINT, signal.SIGTERM)
READY_SECONDS = 600.0
FILES = ("api_key_file", "admin_key_file", "metrics_key_file", "store_key_file", "store_remote_file")
FREE = range(2_000, 10_000)  # above are ports that Ray gives to workers and gateways, and systems to connections
RANGES = range(20_000, 30_000, 100)  # where those of gateways begin: neither Ray nor systems give these to others
OBJECTS = 100 << 20  # bytes of shared memory: nothing of requests is in it


@click.group("cluster")
def command() -> None:
    """Serve models by several engines and gateways, on Ray."""


command.add_command(top.command)
command.add_command(why_command)


@command.command("status", cls=Command, epilog="Example: kvcellar cluster status --admin-key-file admin.txt")
@json_option
@server_options
def status(as_json: bool, url: str, admin_key_file: Path | None) -> None:
    """List the replicas of each model, as the gateway that answers knows them, and how many of its requests went on at
    another one (moved), or went to one without a comparison of what they have (unranked)."""
    found = AdminClient(url, admin_key_file).get("/admin/cluster")
    if as_json:
        click.echo(json.dumps(found))
        return
    if not found["models"]:
        raise BadRequest(f"the server at {url} is no gateway of a cluster", "url")
    for one in found["models"]:
        click.echo(f"{one['model']}: {one['moved']} requests moved, {one['unranked']} unranked")
        click.echo("\n".join(replica_lines(one["replicas"])))


@command.command("serve", cls=Command, epilog="Example: kvcellar cluster serve ./my-model --replicas 4 --gateways 2")
@click.argument("models", metavar="[MODEL]...", nargs=-1, shell_complete=loadable_models)
@click.option(
    "--replicas",
    metavar="N|MIN..MAX",
    help="Engines of each model, or as many as it takes. Default: 2.",
)
@click.option(
    "--roles",
    metavar="PREFILL:DECODE",
    help="In place of --replicas: engines for prompts, and those that go on from the store (--store-remote).",
)
@click.option(
    "--idle",
    "idle_seconds",
    type=click.FloatRange(1, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Until an engine ends that is not needed, with MIN..MAX.",
)
@click.option("--gateways", type=click.IntRange(1), default=1, show_default=True, help="Front ends of all engines.")
@click.option("--ray", "address", help="Address of a running Ray cluster, or auto. Default: Ray is started here.")
@click.option(
    "--drain-timeout",
    "drain_seconds",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="For running requests of a gateway that ends, as in an update, and of an engine where no other can go on.",
)
@click.option(
    "--store-remote-file",
    type=FILE,
    help="In place of --store-remote: its URL is in this file of each machine, and so not in what Ray shows.",
)
@together(http_options, store_options, engine_options, image_options, adapter_option)
def serve(
    models: tuple[str, ...],
    replicas: str | None,
    roles: str | None,
    idle_seconds: float,
    gateways: int,
    address: str | None,
    drain_seconds: float,
    **options: Any,
) -> None:
    """Serve models until a signal: each MODEL has its engines, and requests go where memory has most of their text, or
    will have soonest. Needs kvcellar[cluster]."""
    if STORE_KEY in os.environ:
        raise BadRequest(f"engines do not see ${STORE_KEY}: write it into a file of each machine", "store_key_file")
    shared = (options["store"], options["store_remote"], options["store_remote_file"])
    if address is not None and gateways > 1 and not any(shared):
        why = "what one remembers, others must find: set --store-remote, or --store, on a disk that all share"
        raise BadRequest(why, "gateways")
    placed(options)
    engines = _engines(replicas, roles)
    if address is None:
        for model in models:
            find(located(model))  # raises, before anything is started
    server: dict[str, Any] = {name: options.pop(name) for name in HTTP_OPTIONS} | {"drain_seconds": drain_seconds}
    files = {name: options.pop(name) for name in FILES}
    described = {"models": list(map(_absolute, models)), "gateways": gateways, "server": server}
    described |= {"idle_seconds": idle_seconds} | engines
    described |= {name: str(file) for name, file in files.items() if file is not None}
    try:
        ray = import_module("ray")
        own_ports = {} if address is not None else _own_ports()
        for name, value in (ENVIRONMENT | own_ports).items():
            os.environ.setdefault(name, value)  # `ray.serve` reads it when it is imported
        ray_serve = import_module("ray.serve")
    except ImportError as error:
        raise BadRequest(extra_missing("a cluster", "cluster", error), "cluster") from error
    application = import_module("kvcellar.cluster.application").app(described | {"engine": _engine(options)})
    own = {"include_dashboard": False, "object_store_memory": OBJECTS} if address is None else {}
    with working("starting Ray" if address is None else f"connecting to Ray at {address}"):
        ray.init(address=address or "local", log_to_driver=False, **own)  # without one, Ray looks for a cluster here
    try:
        if address is not None:
            _check_authentication(address)
        _serve(ray_serve, application, server["host"], server["port"], models)
        if address is None:
            ray_serve.shutdown()
    finally:
        ray.shutdown()


def _check_authentication(address: str) -> None:
    """Raises `BadRequest` where Ray runs what anyone asks of its ports, unless that was asked for."""
    if os.environ.get("RAY_AUTH_MODE", "") not in ("token", "disabled"):  # Ray has set it if it has found a token
        raise BadRequest(
            f"Ray at {address} has no token authentication here, so who reaches its ports can run programs on it. Run "
            "ray get-auth-token --generate, copy the token to each machine, and start Ray again; or allow that with "
            "RAY_AUTH_MODE=disabled",
            "ray",
        )


def _serve(ray_serve: Any, application: Any, host: str, port: int, models: Sequence[str]) -> None:
    """Until a signal, which interrupts the start. One that has failed is taken back, but not an update."""
    updates = NAME in ray_serve.status().applications
    ray_serve.start(http_options={"host": host, "port": port})
    _check_address(host, port)
    try:
        try:
            with working("starting engines and gateways"):
                ray_serve.run(application, name=NAME, route_prefix="/")
        except RuntimeError as error:
            raise EngineFailed(f"the cluster could not be started: {error}") from error
        stop = _signalled()
        url = _url(host, port)
        with working("waiting for the gateways"):
            ready = _ready(url, stop)
        if ready:
            click.echo(f"Serving {', '.join(models) or 'the embedded model'} at {url}/v1", err=True)
            while not stop:
                time.sleep(0.2)
    except BaseException:
        if not updates:
            _delete(ray_serve)
        raise
    _delete(ray_serve)


def _delete(ray_serve: Any) -> None:
    """Waits for a minute, and Ray goes on with it: requests have as long as the gateways drain."""
    with suppress(TimeoutError):
        ray_serve.delete(NAME)


def _check_address(host: str, port: int) -> None:
    """Raises `BadRequest` where Serve ran before, and listens elsewhere: it cannot be told another address."""
    client = import_module("ray.serve.context")._get_global_client()
    if (client.http_config.host, client.http_config.port) != (host, port):
        there = f"--host {client.http_config.host} --port {client.http_config.port}"
        raise BadRequest(f"Serve runs in this Ray cluster already, and listens elsewhere: give {there}", "port")


def _url(host: str, port: int) -> str:
    """For this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _engines(replicas: str | None, roles: str | None) -> dict[str, Any]:
    """How many of each kind. Raises `BadRequest`."""
    if roles is None:
        return {"replicas": "2" if replicas is None else replicas}
    if replicas is not None:
        raise BadRequest("they are in place of --replicas: leave one of both out", "roles")
    prefill, _, decode = roles.partition(":")
    if not prefill or not decode:
        raise BadRequest(f"they are PREFILL:DECODE, as 2:2 or 1:1..4, not {roles}", "roles")
    return {"prefill": prefill, "replicas": decode}


def _absolute(text: str) -> str:
    """A path that is there, as processes in other directories find it; anything else as it is."""
    path = Path(text).expanduser()
    return str(path.absolute()) if path.exists() else text


def _engine(options: dict[str, Any]) -> dict[str, Any]:
    """Settings of engines. The store may not be there yet. Adapters are models with names of their own."""
    engine = given(**options | {"adapter": None})
    if "store" in engine:
        engine["store"] = str(Path(engine["store"]).expanduser().absolute())
    if "draft" in engine:
        engine["draft"] = _absolute(engine["draft"])
    if "adapters" in engine:
        engine["adapters"] = {name: list(map(_absolute, paths)) for name, paths in engine["adapters"].items()}
    return engine


def _own_ports() -> dict[str, str]:
    """Variables of Ray that is started here. With the ports of others, HAProxy would reach their gateways for seconds
    after a death."""
    first = random.choice(RANGES)
    ports = *free_ports(len(PORTS)), first, first + RANGES.step
    return dict(zip((*PORTS, *GATEWAY_PORTS), map(str, ports), strict=True))


def free_ports(number: int) -> list[int]:
    """Ports, all different, that neither the system nor Ray gives to others before they are used."""
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(FREE, len(FREE)):
            if len(found) == number:
                break
            with suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
        return found


def _signalled() -> list[int]:
    """Has a signal once one has come that asks for the end."""
    found: list[int] = []
    for number in STARTED:
        signal.signal(number, lambda number, frame: found.append(number))
    return found


def _ready(url: str, stop: list[int]) -> bool:
    """Whether the gateways are, before a signal. Raises `BadRequest` where that takes too long."""
    until = time.monotonic() + READY_SECONDS
    while not stop:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5.0):
                return True
        except (OSError, urllib.error.URLError) as error:
            if time.monotonic() > until:
                raise BadRequest(
                    f"the gateways were not ready within {READY_SECONDS:g} s: {error}", "cluster"
                ) from None
            time.sleep(0.2)
    return False
