"""replicas: the route that lists the replicas of each model, on a gateway of a cluster."""

from starlette.requests import Request
from starlette.responses import Response

from kvcellar.engine.stats import ReplicaStats
from kvcellar.serve.answers import Answer
from kvcellar.serve.http.sending import json_response
from kvcellar.serve.shared import Shared


class ModelReplicas(Answer):
    model: str
    moved: int  # requests of this gateway that went on at another replica
    unranked: int  # requests of this gateway whose replica was chosen by numbers of requests alone
    replicas: tuple[ReplicaStats, ...]


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
                found.append(ModelReplicas.of(cluster, model=loaded.spec.name))
        return ClusterContents(found)
