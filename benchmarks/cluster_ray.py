"""cluster_ray: a cluster on several Ray nodes of this machine, of which engines, nodes and gateways are killed, for the
row `cluster-kills-ray` and for tests.

    python -m benchmarks.cluster_ray   # on stdin a line of JSON: the arguments of `RayFleet`; then lines "node"

Gateways are on the head node, behind HAProxy, and engines on the others. What is killed is started again by Ray.
"""

import json
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from kvcellar.cli.cluster import ENVIRONMENT, NAME, OBJECTS, PORTS, free_ports

TOKEN = "RAY_AUTH_TOKEN"  # in the environment of all processes of a cluster: they are found by it
PATIENCE = 300.0  # seconds; only a cluster that fails takes so long


def processes(token: str, begin: str) -> Iterator[tuple[int, str]]:
    """Those of a cluster whose command lines begin so."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text()
            ours = token.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except (OSError, UnicodeDecodeError):
            continue
        if title.startswith(begin) and ours:
            yield int(pid), title


def replicas(token: str, kind: str) -> list[int]:
    """Processes of engines, or of gateways."""
    return [pid for pid, title in processes(token, "ray::ServeReplica") if f":{kind}" in title]


class RayFleet:
    """`described`: what `kvcellar.cluster.app` is given, but for resources. `of_node`: most engines of a node."""

    def __init__(self, described: Mapping[str, Any], *, port: int, nodes: int = 2, of_node: int = 2) -> None:
        """Returns before engines are loaded."""
        self._draw = random.Random(nodes)
        self._token = os.environ.setdefault(TOKEN, secrets.token_hex(32))
        own_ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        os.environ.update(ENVIRONMENT | own_ports | {"RAY_AUTH_MODE": "token"})
        import ray  # which reads the environment
        from ray import serve
        from ray.cluster_utils import Cluster

        from kvcellar.cluster import app

        self.ports, self._serve, self._ray = [port], serve, ray
        self._node = {"num_cpus": 1, "object_store_memory": OBJECTS, "resources": {"engine": of_node}}
        head = self._node | {"num_cpus": 2, "include_dashboard": False, "resources": {"gateway": 1}}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(nodes):
            self._add_node()
        ray.init(address=self._cluster.address, log_to_driver=False)
        resources = {"num_cpus": 0, "resources": {"engine": 1}}
        gateways = {"num_cpus": 0, "resources": {"gateway": 0.01}}
        application = app({**described, "engine_resources": resources, "gateway_resources": gateways})
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(application, name=NAME, route_prefix="/", blocking=False)

    @property
    def address(self) -> str:
        """Of Ray."""
        found = self._cluster.address
        assert found is not None, "the head node runs"
        return found

    def kill_engine(self) -> None:
        """As soon as another one runs."""
        self._until_run("engine", 2)
        os.kill(self._draw.choice(replicas(self._token, "engine")), signal.SIGKILL)

    def kill_node(self) -> None:
        """One with an engine, and all processes on it, as soon as an engine runs elsewhere. Another one takes its
        place."""
        self._until_run("engine", 2)
        node = self._draw.choice([one for one in self._cluster.worker_nodes if self._engines(one)])
        while self._running("engine") <= len(self._engines(node)):
            time.sleep(0.1)
        for engine in self._engines(node):
            os.kill(engine, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        self._add_node()

    def kill_gateway(self, at: int) -> None:
        """Any of those behind this port, as soon as another one runs."""
        self._until_run("gateway", 2)
        os.kill(self._draw.choice(replicas(self._token, "gateway")), signal.SIGKILL)

    def settle(self) -> None:
        """Until all engines and gateways run that were described."""
        until = time.monotonic() + PATIENCE
        while self._serve.status().applications[NAME].status != "RUNNING":
            assert time.monotonic() < until, self._serve.status()
            time.sleep(0.2)

    def close(self) -> None:
        self._serve.shutdown()
        self._ray.shutdown()
        self._cluster.shutdown()

    def _add_node(self) -> None:
        """Again where Ray gives up after 30 s: the machine is busy."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                self._cluster.add_node(**self._node)
                return
            except Exception:  # Ray has no class of its own for it
                if time.monotonic() > until:
                    raise

    def _engines(self, node: Any) -> list[int]:
        raylet = {one.process.pid for one in node.all_processes["raylet"]}
        return [one for one in replicas(self._token, "engine") if _parent(one) in raylet]

    def _running(self, kind: str) -> int:
        """How many run, as Serve knows, that are not killed."""
        deployed = self._serve.status().applications[NAME].deployments
        told = sum(one.replica_states.get("RUNNING", 0) for name, one in deployed.items() if name.startswith(kind))
        return min(told, len(replicas(self._token, kind)))

    def _until_run(self, kind: str, least: int) -> None:
        until = time.monotonic() + PATIENCE
        while self._running(kind) < least:
            assert time.monotonic() < until, self._serve.status()
            time.sleep(0.1)


def _parent(pid: int) -> int:
    """0 for one that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints what has died
    with closing(RayFleet(**json.loads(sys.stdin.readline()))) as fleet:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
        print(fleet.address, file=answers)
        for line in sys.stdin:
            assert line == "node\n", line
            fleet.kill_node()
            print("killed", file=answers)


if __name__ == "__main__":
    main()
