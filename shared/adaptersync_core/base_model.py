"""A base model's directory, as far as adapters must fit it: names and shapes of its weights."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from adaptersync_core.errors import AdapterInvalid
from adaptersync_core.tensors import read_header

HUB_CACHE = re.compile(r"models--(?:.+--)?(?P<name>[^/]+)/snapshots/[^/]+/?$")  # of huggingface_hub
log = logging.getLogger(__name__)


def base_shapes(root: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the base model's weights, from the headers of its files; empty when they are not on this host."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(root.glob("*.safetensors")) if root.is_absolute() else ():
        try:
            with path.open("rb") as file:
                tensors, _ = read_header(file, size=path.stat().st_size, name=path.name)
        except (OSError, AdapterInvalid) as error:
            log.warning("base weights cannot be read, so adapters are not checked against them: %s", error)
            return {}
        shapes |= {name: tensor.shape for name, tensor in tensors.items()}
    return shapes


def short_name(base: str) -> str:
    """What a model's path, hub name or place in the hub's cache has in common on different hosts."""
    cached = HUB_CACHE.search(base)
    return (cached["name"] if cached else base.rstrip("/").rpartition("/")[2]).lower()
