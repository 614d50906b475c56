"""A real Valkey or Redis server on a socket in a directory, started and killed by tests."""

import shutil
import socket
import subprocess
import time
from pathlib import Path

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")


class RedisServer:
    """A server without persistence: what it had is gone when it was killed."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._socket = directory, directory / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        assert BINARY is not None
        command = [BINARY, "--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, *options], cwd=self._directory, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        while not self._listens():
            assert self._process.poll() is None, "the server did not start"
            time.sleep(0.005)

    def _listens(self) -> bool:
        """Its socket is there before it listens."""
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self._socket)) == 0

    def kill(self) -> None:
        """As `kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._socket.unlink(missing_ok=True)
            self._process = None
