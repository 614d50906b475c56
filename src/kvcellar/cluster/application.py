"""application: a cluster as an application of Ray Serve, which `serve run`, `serve deploy` and KubeRay take.

app({"models": ["./my-model"], "replicas": "1..4", "gateways": 2, "engine": {"store_remote": "valkey://host"}})
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from kvcellar.cluster.engine_replica import EngineReplica
from kvcellar.cluster.gateway import Deployed, Gateway
from kvcellar.cluster.node_files import KEY_FILE, REMOTE_FILE, KeyFiles, check_told, settings_here
from kvcellar.engine.load.settings import OF_ONE_ENGINE, settings_of
from kvcellar.errors import BadRequest
from kvcellar.frontend.documents import documents_of
from kvcellar.serve.http.keys import read_keys
from kvcellar.serve.settings import ServeSettings

DRAIN_SECONDS = 600.0  # for requests of what is to end, unless `server` says it
END_SECONDS = 30.0  # for a replica to write what it has, behind these
MOST_CONNECTIONS = 512  # of one gateway
REPORT_SECONDS, ROOM_SECONDS = 1.0, 30.0  # between two reports of a replica, and of which the mean room is taken
_Count = Annotated[int, Meta(ge=1)]


class Model(Struct, forbid_unknown_fields=True, kw_only=True):
    """One of several models that are not alike. What is not said is as for all."""

    path: str = ""  # a directory or name; empty: the embedded model
    name: Annotated[str, Meta(pattern=r"^[\w.:-]*$")] = ""  # for requests; empty: that of the directory
    engine: dict[str, Any] = {}  # settings, beside those of all
    replicas: int | str | None = None
    prefill: int | str | None = None
    engine_resources: dict[str, Any] = {}  # beside those of all


class Cluster(Struct, forbid_unknown_fields=True, kw_only=True):
    """What `app` is given. Files are of each machine, and of that where it is called."""

    models: list[str | Model] = []  # directories or names, the default first; empty: the embedded model
    replicas: int | str = 1  # of the engine of each model; "MIN..MAX": as many as it takes
    prefill: int | str = 0  # of replicas beside these that compute prompts: the others go on, from the shared store
    idle_seconds: Annotated[float, Meta(gt=REPORT_SECONDS)] = 300.0  # until a replica ends that it does not take
    gateways: _Count = 1
    engine: dict[str, Any] = {}  # settings of all engines (`EngineOptions`); adapters and KV events: of the first
    server: dict[str, Any] = {}  # settings of all gateways (`ServeSettings`)
    api_key_file: str | None = None  # files of keys; a gateway reads one again when it has changed
    admin_key_file: str | None = None
    metrics_key_file: str | None = None
    store_key_file: str | None = None  # in place of `store_key`
    store_remote_file: str | None = None  # in place of `store_remote`: with a URL that has a password
    engine_resources: dict[str, Any] = {}  # of one replica, for Ray: num_cpus, num_gpus, resources
    gateway_resources: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class _Engine:
    """What the replicas of one model are made of."""

    name: str
    model: str | None
    settings: Mapping[str, Any]
    replicas: int | str
    prefill: int | str
    resources: Mapping[str, Any]

    @property
    def made(self) -> str:
        """Other replicas than before have another one."""
        told = msgspec.json.encode([self.model, self.settings], enc_hook=repr, order="deterministic")
        return blake2b(told, digest_size=16).hexdigest()

    @property
    def to_zero(self) -> bool:
        return not replicas_of(self.replicas)[0]


def app(given: Mapping[str, Any]) -> serve.Application:
    """Raises `BadRequest` for what no cluster can be made of."""
    try:
        cluster = msgspec.convert(dict(given), Cluster)
    except msgspec.ValidationError as error:
        raise BadRequest(f"this is no description of a cluster: {error}", "cluster") from error
    engines = _engines(cluster)
    documents = documents_of(settings_of(settings_here(engines[0].settings)))
    if cluster.gateways > 1 and not documents.durable:
        why = "what one remembers, others must find: set store_remote (Valkey, Redis, or file://), or store"
        raise BadRequest(f"{why}, a directory that all machines share", "gateways")
    files = [
        None if file is None else str(Path(file).absolute())
        for file in (cluster.api_key_file, cluster.admin_key_file, cluster.metrics_key_file)
    ]
    keys = KeyFiles(files, read_keys(None, None, None, os.environ))
    server = {"drain_seconds": DRAIN_SECONDS} | cluster.server
    drain = ServeSettings(**server, **keys.read().fields()).drain_seconds
    gateways = serve.deployment(
        name="gateway",
        num_replicas=cluster.gateways,
        max_ongoing_requests=MOST_CONNECTIONS,
        ray_actor_options={"num_cpus": 0} | cluster.gateway_resources,
        graceful_shutdown_timeout_s=drain,
        max_surge_percent=100,  # an update starts new ones before others end
    )
    deployed = {one.name: _deployed(one, cluster.idle_seconds, drain) for one in engines}
    return gateways(serve.ingress()(Gateway)).bind(deployed, server, keys)


def _engines(cluster: Cluster) -> list[_Engine]:
    """The default first. Raises `BadRequest`."""
    files = {KEY_FILE: cluster.store_key_file, REMOTE_FILE: cluster.store_remote_file}
    shared = cluster.engine | {name: str(Path(file).absolute()) for name, file in files.items() if file is not None}
    found: list[_Engine] = []
    for one in cluster.models or [""]:
        one = Model(path=one) if isinstance(one, str) else one
        of_all = {name: value for name, value in shared.items() if not found or name not in OF_ONE_ENGINE}
        found.append(_engine(one, of_all | one.engine, cluster))
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise BadRequest("two models have one name; rename a directory, or give one another name", "models")
    return found


def _engine(one: Model, told: Mapping[str, Any], cluster: Cluster) -> _Engine:
    check_told(told)
    settings = settings_of(settings_here(told))
    replicas = cluster.replicas if one.replicas is None else one.replicas
    prefill = cluster.prefill if one.prefill is None else one.prefill
    least, _ = replicas_of(replicas)
    if prefill and not (least and replicas_of(prefill)[0] and settings.store_remote):
        raise BadRequest("replicas for prompts need others, at least one of both, and store_remote", "prefill")
    gpus = 1.0 if settings.device.startswith("cuda") else 0.0
    resources = {"num_cpus": float(settings.threads or 1), "num_gpus": gpus}
    resources |= cluster.engine_resources | one.engine_resources
    name = one.name or (Path(one.path).name if one.path else "embedded")
    return _Engine(name, one.path or None, told, replicas, prefill, resources)


def replicas_of(text: int | str) -> tuple[int, int]:
    """The least and the most of `replicas`. Raises `BadRequest`."""
    if found := re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", str(text)):
        least, most = int(found[1]), int(found[2] or found[1])
        if least <= most and most:
            return least, most
    raise BadRequest(f"replicas are a number of at least 1, or MIN..MAX, not {text}", "replicas")


def _deployed(engine: _Engine, idle: float, drain: float) -> Deployed:
    """The replicas of an engine, of each kind, as gateways are told of them."""
    kinds = {"engine": engine.replicas, "prefill": engine.prefill} if engine.prefill else {"engine": engine.replicas}
    bound: Sequence[Any] = [_bound(engine, kind, replicas, idle, drain) for kind, replicas in kinds.items()]
    return Deployed(bound, engine.settings, engine.made, engine.to_zero)


def _bound(engine: _Engine, kind: str, replicas: int | str, idle: float, drain: float) -> Any:
    least, most = replicas_of(replicas)
    scaling = AutoscalingConfig(
        min_replicas=least,
        initial_replicas=max(1, least),  # gateways have to know the model
        max_replicas=most,
        metrics_interval_s=REPORT_SECONDS,
        look_back_period_s=min(ROOM_SECONDS, idle),
        upscale_delay_s=0.0,
        downscale_delay_s=idle,
        policy=AutoscalingPolicy(policy_function="kvcellar.cluster.scaling:policy"),
    )
    number: dict[str, Any] = {"num_replicas": most} if least == most else {"autoscaling_config": scaling}
    deployed = serve.deployment(
        name=f"{kind}-{engine.name}",
        **number,
        ray_actor_options=dict(engine.resources),
        graceful_shutdown_timeout_s=drain + END_SECONDS,
        health_check_period_s=2.0,
        request_router_config={"request_router_class": "kvcellar.cluster.discovery:ReplicaRouter"},
    )
    return deployed(EngineReplica).bind(engine.model, engine.settings, engine.made, drain, prefill=kind == "prefill")
