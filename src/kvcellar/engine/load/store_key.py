"""store_key: what the key of a store encrypts and hides."""

from hashlib import blake2b

from kvcellar.engine.load.settings import Settings
from kvcellar.errors import BadRequest
from kvcellar.memory.tiers.codec import AesGcm, Cipher, Plain


def cipher_of(settings: Settings) -> Cipher:
    if settings.store_key is None:
        return Plain()
    try:
        return AesGcm(settings.store_key)
    except ImportError as error:
        raise BadRequest(
            "store_key needs the package cryptography: install kvcellar[encryption]", "store_key"
        ) from error


def secret_of(settings: Settings) -> bytes:
    """What names in the store depend on, so that with a key they tell nothing about tokens and names."""
    return b"" if settings.store_key is None else blake2b(settings.store_key, person=b"kvcellar-names").digest()
