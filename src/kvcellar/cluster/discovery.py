"""discovery: how a gateway learns of the replicas of an engine: from the router of its handle, in this process.

Ray pickles this module by value, with all that it defines: so it defines nothing else.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class ReplicaRouter(RequestRouter):
    """Tells the gateway, which has sent what listens with a call of `meet`, of all replicas, and again when they have
    changed. Calls go to any of them."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._listener: Any = None  # a `gateway.Listener`

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener.seen(list(self.curr_replicas.values()))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None and self._listener is not (listener := pending_request.args[0]):
            self._listener = listener  # `meet` is all that gateways call
            self._tell()
        return [candidate_replicas]
