"""application: a cluster as an application of Ray Serve, which `serve run`, `serve deploy` and KubeRay take.

app({"models": ["./my-model"], "replicas": 2, "gateways": 2, "engine": {"store_remote": "valkey://host"}})
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from ray import serve

from kvcellar.cluster.engine_replica import LEAVE_SECONDS, EngineReplica
from kvcellar.cluster.gateway import Gateway
from kvcellar.engine.load.settings import settings_of
from kvcellar.errors import BadRequest
from kvcellar.serve.http.keys import read_keys
from kvcellar.serve.settings import ServeSettings

END_SECONDS = 30.0  # for a replica to write what it has, behind `LEAVE_SECONDS`
MOST_CONNECTIONS = 512  # of one gateway
_Count = Annotated[int, Meta(ge=1)]


class Cluster(Struct, forbid_unknown_fields=True, kw_only=True):
    """What `app` is given."""

    models: list[str] = []  # directories or names, the default first; empty: the embedded model
    replicas: _Count = 1  # of the engine of each model
    gateways: _Count = 1
    engine: dict[str, Any] = {}  # settings of all engines (`EngineOptions`)
    server: dict[str, Any] = {}  # settings of all gateways (`ServeSettings`)
    api_key_file: str | None = None  # files of keys: read once, where this is called
    admin_key_file: str | None = None
    metrics_key_file: str | None = None
    engine_resources: dict[str, Any] = {}  # of one replica, for Ray: num_cpus, num_gpus, resources
    gateway_resources: dict[str, Any] = {}


def app(given: Mapping[str, Any]) -> serve.Application:
    """Raises `BadRequest` for what no cluster can be made of."""
    try:
        cluster = msgspec.convert(dict(given), Cluster)
    except msgspec.ValidationError as error:
        raise BadRequest(f"this is no description of a cluster: {error}", "cluster") from error
    settings, server = settings_of(cluster.engine), cluster.server | _keys(cluster)
    ServeSettings(**server)
    models = cluster.models or [""]
    names = [Path(one).name if one else "embedded" for one in models]
    if len(set(names)) < len(names):
        raise BadRequest("two models have one name; rename a directory", "models")
    cpus = float(settings.threads or 1)
    gpus = 1.0 if settings.device.startswith("cuda") else 0.0
    resources = {"num_cpus": cpus, "num_gpus": gpus} | cluster.engine_resources
    engines = {
        name: (_engine(name, model or None, cluster, resources), cluster.engine)
        for name, model in zip(names, models, strict=True)
    }
    deployed = serve.deployment(
        name="gateway",
        num_replicas=cluster.gateways,
        max_ongoing_requests=MOST_CONNECTIONS,
        ray_actor_options={"num_cpus": 0} | cluster.gateway_resources,
        graceful_shutdown_timeout_s=END_SECONDS,
    )
    return deployed(serve.ingress()(Gateway)).bind(engines, server)


def _keys(cluster: Cluster) -> dict[str, Any]:
    """As fields of `ServeSettings`, with those in the environment."""
    api, admin, metrics = (
        None if file is None else Path(file)
        for file in (cluster.api_key_file, cluster.admin_key_file, cluster.metrics_key_file)
    )
    return read_keys(api, admin, metrics, os.environ).fields()


def _engine(name: str, model: str | None, cluster: Cluster, resources: Mapping[str, Any]) -> Any:
    deployed = serve.deployment(
        name=f"engine-{name}",
        num_replicas=cluster.replicas,
        ray_actor_options=dict(resources),
        graceful_shutdown_timeout_s=LEAVE_SECONDS + END_SECONDS,
        health_check_period_s=2.0,
        request_router_config={"request_router_class": "kvcellar.cluster.discovery:ReplicaRouter"},
    )
    return deployed(EngineReplica).bind(model, cluster.engine)
