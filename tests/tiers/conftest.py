"""Places of documents, for all tests of this folder."""

from tests.tiers.places import documents, make, server_url  # noqa: F401  # pytest finds them by name
