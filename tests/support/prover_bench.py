"""An agent's engine and prover beside one server: what an agent does with a version, without Redis and the store.

And with the freedom to load something else than what is proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from adaptersync.agent.engine import Engine
from adaptersync.agent.prove import Prover
from adaptersync_core.manifest import Manifest
from adaptersync_core.proof import Probe, Proof
from adaptersync_core.vllm import VllmClient
from support.adapters import make_adapter
from support.artifacts import manifest_of


class ProverBench:
    """Versions lie in `stage` under their adapter ids."""

    def __init__(self, client: VllmClient, stage: Path) -> None:
        self.client = client
        self.stage = stage
        self.engine = Engine(client, stage)
        self.prover = self.new_prover()

    def new_prover(self) -> Prover:
        return Prover(self.client, self.engine, self.stage, timeout_s=30)

    def version(self, seq: int = 1, **how: Any) -> Manifest:
        """Files as staging leaves them, and their manifest."""
        made = make_adapter(self.stage / f"made-{seq}", **{"seed": seq} | how)
        manifest = manifest_of(made, seq=seq)
        made.rename(self.path(manifest))
        return manifest

    def path(self, manifest: Manifest) -> Path:
        return self.stage / manifest.adapter_id

    async def load(self, manifest: Manifest) -> None:
        await self.engine.load(manifest.adapter_id, self.path(manifest), timeout_s=30)

    async def load_instead(self, manifest: Manifest, path: Path) -> None:
        """Other files under the version's name: what an agent would never do."""
        await self.client.load(manifest.adapter_id, str(path), timeout_s=30)

    async def prove(self, manifest: Manifest) -> Proof:
        return await self.prover.prove(manifest.adapter_id, manifest, self.path(manifest))

    async def loaded_and_proved(self, manifest: Manifest) -> Proof:
        await self.load(manifest)
        return await self.prove(manifest)


def with_probe(manifest: Manifest, tokens: Sequence[int], deltas: Sequence[float] = ()) -> Manifest:
    return replace(manifest, probe=Probe(tokens=tuple(tokens), deltas=tuple(deltas)))
