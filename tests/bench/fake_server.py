"""Stands in for the interpreter of a server, of its engine, and of the clients: run with the arguments of each.

A server answers /health and /v1/models, and starts a process in a session of its own; one of llama.cpp fails as
FAKE_SERVER says. The clients write what they were given to FAKE_LOG, and a result.
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "ours"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve() -> None:
    if os.environ.get("FAKE_SERVER") == "missing" and "kvcellar" not in sys.argv:
        sys.exit("no module of a server")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with Path(os.environ["FAKE_LOG"]).open("a") as log:
        log.write(json.dumps({"pids": [os.getpid(), child.pid]}) + "\n")
    HTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()


def ask() -> None:
    texts = [json.loads(line)["prompt"] for line in Path(option("--dataset-path")).read_text().splitlines()]
    with Path(os.environ["FAKE_LOG"]).open("a") as log:
        log.write(
            json.dumps({"model": option("--model"), "texts": texts, "greedy": "--temperature" in sys.argv}) + "\n"
        )
    new, wrong = (
        int(option("--custom-output-len")),
        os.environ.get("FAKE_SERVER") if option("--model") != "ours" else "",
    )
    print("Starting main benchmark run...", flush=True)  # noqa: T201
    time.sleep(0.05)
    print("Serving Benchmark Result", flush=True)  # noqa: T201
    if wrong == "dies":
        sys.exit("the clients were not answered")
    lengths = [new - (wrong == "short") for _ in texts]
    errors = ["Traceback: refused" if wrong == "refuses" else "" for _ in texts]
    found = {
        "output_lens": lengths,
        "errors": errors,
        "ttfts": [0.5 for _ in texts],
        "itls": [[0.1, 0.2] for _ in texts],
    }
    Path(option("--result-filename")).write_text(json.dumps(found))


if __name__ == "__main__":
    if "--dataset-path" in sys.argv:
        ask()
    elif "--port" in sys.argv:
        serve()
    else:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
