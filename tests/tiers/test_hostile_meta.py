"""Descriptions of snapshots that no store has written are damaged; they raise nothing else."""

import json
import struct
from dataclasses import replace

import pytest

from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.retention import DEFAULT
from kvcellar.memory.tiers.codec import (
    Content,
    Damaged,
    Plain,
    digest,
    head_of,
    read_header,
    sealed_meta,
    unsealed_meta,
)
from tests.tiers.made import IDENTITY, made

SNAPSHOT = made(1)[0]
DEEP = b"[" * 100_000


def words(**changes: object) -> bytes:
    found = {"namespace": "n", "start": 0, "end": 3, "sizes": [40, 20], "tokens": 24}
    return json.dumps(found | changes).encode()


def described(content: bytes, tokens: bytes = SNAPSHOT.tokens) -> bytes:
    return Plain.mark + struct.pack("<I", len(content)) + content + tokens


@pytest.mark.parametrize(
    "meta",
    [
        described(DEEP),
        described(words(namespace="\ud800")),
        described(words(namespace=7)),
        described(words(tokens=-8)),
        described(words(end=2**63)),
        described(words(sizes=[2**63])),
        described(words(), key_of([1, 2, -1])),
        described(words(), key_of([1, 2, 2**32])),
        described(words(), key_of([1, 2, 2**62 - 1])),
    ],
)
def test_descriptions(meta) -> None:
    assert unsealed_meta(SNAPSHOT.key, None, described(words()), Plain()).span == SNAPSHOT.span
    with pytest.raises(Damaged):
        unsealed_meta(SNAPSHOT.key, None, meta, Plain())


@pytest.mark.parametrize(
    "kept",
    [
        DEEP[:60_000],
        b'{"expires":1e400}',
        *(
            json.dumps({"priority": 0, "pinned": False, "expires": None, "owner": ""} | change).encode()
            for change in (
                {"owner": "\ud800"},
                {"priority": 2**63},
                {"expires": 2**63},
                {"expires": float("nan")},
                {"expires": float("inf")},
            )
        ),
    ],
)
def test_retentions(kept) -> None:
    snapshot = replace(SNAPSHOT, sizes=())
    meta = sealed_meta(snapshot, Plain())
    whole = head_of(IDENTITY, snapshot, DEFAULT, meta, Plain())
    head = b"".join((IDENTITY, snapshot.key, bytes(32), struct.pack("<H", len(kept)), kept, meta))
    start = whole[:12] + struct.pack("<I", len(head)) + whole[16:28] + head
    with pytest.raises(Damaged, match="its retention cannot be read"):
        read_header(Content(start + digest(start) + bytes(16)))
