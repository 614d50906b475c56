"""replicas: the route that lists the replicas of each model, on a gateway of a cluster."""

from starlette.requests import Request
from starlette.responses import Response

from kvcellar.engine.stats import ReplicaState
from kvcellar.serve.answers import Answer
from kvcellar.serve.http.sending import json_response
from kvcellar.serve.shared import Shared


class ReplicaFields(Answer):
    """One replica, as this gateway knows it: the fields of `kvcellar.engine.stats.ReplicaStats`."""

    name: str
    state: ReplicaState
    address: str = ""
    why: str = ""  # why it is lost or refused
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    cells: int = 0  # of the fullest group of layers
    cells_used: int = 0
    cells_cached: int = 0
    prefill_rate: float = 0.0  # tokens per second of the last seconds
    decode_rate: float = 0.0
    blocks: int = 0  # blocks of tokens that the router of this gateway knows to be there


class ModelReplicas(Answer):
    model: str
    moved: int  # requests of this gateway that went on at another replica
    unranked: int  # requests of this gateway whose replica was chosen by numbers of requests alone
    replicas: list[ReplicaFields]


class ClusterContents(Answer):
    models: list[ModelReplicas]  # empty: the server is not a gateway of a cluster


class ReplicasHandler:
    def __init__(self, server: Shared) -> None:
        self._server = server

    async def get(self, request: Request) -> Response:
        """What this gateway knows: no replica is asked."""
        return json_response(await self._server.threads.run("files", self._contents))

    def _contents(self) -> ClusterContents:
        found: list[ModelReplicas] = []
        for loaded in self._server.host.engines():
            cluster = loaded.engine.last_stats.cluster if loaded.engine is not None else None
            if cluster is not None:
                replicas = [ReplicaFields.of(one) for one in cluster.replicas]
                found.append(ModelReplicas.of(cluster, model=loaded.spec.name, replicas=replicas))
        return ClusterContents(found)
