"""noise: the only source of chance. A keyed hash, so that no draw depends on any other draw, batch or device."""

import hashlib
import struct


def uniform(seed: int, choice: int, pos: int, purpose: str = "draw") -> float:
    """A number in [0, 1) with 53 random bits, the same for the same arguments on every machine.

    `seed` is from -2**63 to 2**64 - 1, `choice` and `pos` are at least 0, `purpose` has at most 16 ASCII characters:
    uses that must not influence each other (drawing a token, accepting a draft) take different ones.
    """
    digest = hashlib.blake2b(
        struct.pack("<QQ", choice, pos),
        digest_size=8,
        key=seed.to_bytes(16, "little", signed=True),
        person=purpose.encode("ascii"),
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
