"""with_transformers: `generate` of transformers with its dynamic cache, as a peer. It runs in our own environment."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def library(options: Mapping[str, Any]) -> str:
    import_module("kvcellar.bench.hf_baseline")
    return f"transformers {import_module('transformers').__version__}"


def Peer(options: Mapping[str, Any]) -> Any:
    return import_module("kvcellar.bench.hf_baseline").Generating(options)
