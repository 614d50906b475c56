"""application: a cluster as an application of Ray Serve, which `serve run`, `serve deploy` and KubeRay take.

app({"models": ["./my-model"], "replicas": "1..4", "gateways": 2, "engine": {"store_remote": "valkey://host"}})
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from kvcellar.cluster.engine_replica import LEAVE_SECONDS, EngineReplica
from kvcellar.cluster.gateway import Gateway
from kvcellar.engine.load.settings import settings_of
from kvcellar.errors import BadRequest
from kvcellar.serve.http.keys import read_keys
from kvcellar.serve.settings import ServeSettings

END_SECONDS = 30.0  # for a replica to write what it has, behind `LEAVE_SECONDS`
MOST_CONNECTIONS = 512  # of one gateway
REPORT_SECONDS, ROOM_SECONDS = 1.0, 30.0  # between two reports of a replica, and of which the mean room is taken
_Count = Annotated[int, Meta(ge=1)]


class Cluster(Struct, forbid_unknown_fields=True, kw_only=True):
    """What `app` is given."""

    models: list[str] = []  # directories or names, the default first; empty: the embedded model
    replicas: int | str = 1  # of the engine of each model; "MIN..MAX": as many as it takes
    prefill: int | str = 0  # of replicas beside these that compute prompts: the others go on, from the shared store
    idle_seconds: Annotated[float, Meta(gt=REPORT_SECONDS)] = 300.0  # until a replica ends that it does not take
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
    least, _ = replicas_of(cluster.replicas)
    kinds = ("engine", "prefill") if cluster.prefill else ("engine",)
    if cluster.prefill and not (least and replicas_of(cluster.prefill)[0] and cluster.engine.get("store_remote")):
        raise BadRequest("replicas for prompts need others, at least one of both, and store_remote", "prefill")
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
        name: ([_engine(kind, name, model or None, cluster, resources) for kind in kinds], cluster.engine)
        for name, model in zip(names, models, strict=True)
    }
    deployed = serve.deployment(
        name="gateway",
        num_replicas=cluster.gateways,
        max_ongoing_requests=MOST_CONNECTIONS,
        ray_actor_options={"num_cpus": 0} | cluster.gateway_resources,
        graceful_shutdown_timeout_s=END_SECONDS,
        max_surge_percent=100,  # an update starts new ones before others end
    )
    return deployed(serve.ingress()(Gateway)).bind(engines, server, to_zero=not least)


def replicas_of(text: int | str) -> tuple[int, int]:
    """The least and the most of `replicas`. Raises `BadRequest`."""
    if found := re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", str(text)):
        least, most = int(found[1]), int(found[2] or found[1])
        if least <= most and most:
            return least, most
    raise BadRequest(f"replicas are a number of at least 1, or MIN..MAX, not {text}", "replicas")


def _keys(cluster: Cluster) -> dict[str, Any]:
    """As fields of `ServeSettings`, with those in the environment."""
    api, admin, metrics = (
        None if file is None else Path(file)
        for file in (cluster.api_key_file, cluster.admin_key_file, cluster.metrics_key_file)
    )
    return read_keys(api, admin, metrics, os.environ).fields()


def _engine(kind: str, name: str, model: str | None, cluster: Cluster, resources: Mapping[str, Any]) -> Any:
    prefill = kind == "prefill"
    least, most = replicas_of(cluster.prefill if prefill else cluster.replicas)
    scaling = AutoscalingConfig(
        min_replicas=least,
        initial_replicas=max(1, least),  # gateways have to know the model
        max_replicas=most,
        metrics_interval_s=REPORT_SECONDS,
        look_back_period_s=min(ROOM_SECONDS, cluster.idle_seconds),
        upscale_delay_s=0.0,
        downscale_delay_s=cluster.idle_seconds,
        policy=AutoscalingPolicy(policy_function="kvcellar.cluster.scaling:policy"),
    )
    number: dict[str, Any] = {"num_replicas": most} if least == most else {"autoscaling_config": scaling}
    deployed = serve.deployment(
        name=f"{kind}-{name}",
        **number,
        ray_actor_options=dict(resources),
        graceful_shutdown_timeout_s=LEAVE_SECONDS + END_SECONDS,
        health_check_period_s=2.0,
        request_router_config={"request_router_class": "kvcellar.cluster.discovery:ReplicaRouter"},
    )
    return deployed(EngineReplica).bind(model, cluster.engine, prefill)
