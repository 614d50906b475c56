"""address: where a replica listens, and what a gateway must know to use it."""

import socket
import sys

from msgspec import Struct

SECRET = 32  # bytes


class Address(Struct, frozen=True):
    """What a replica says of itself in Ray Serve, which tells it to gateways. `weights`: a digest of what decides its
    answers, with the code; replicas of one model have the same."""

    replica: str
    host: str
    port: int
    secret: bytes
    version: str  # of kvcellar
    weights: str
    block: int  # tokens of a block of its KV events
    prefill: bool = False  # it computes prompts, and others go on with their requests, from the store
    made: str = ""  # digest of the model and settings that it was given


def keep_alive(link: socket.socket) -> None:
    """Find out within half a minute that the other machine has gone, and send small messages at once."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
            link.setsockopt(socket.IPPROTO_TCP, option, value)
