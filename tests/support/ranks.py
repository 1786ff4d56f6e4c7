"""One process of a distributed trainer, for tests: a tiny model on gloo, and a fake publisher on rank 0.

    python -m support.ranks BASE OUT KIND FAULT      with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT

KIND: `ddp` trains; `fsdp2` and `alone` sync twice, with another adapter in between, since accelerate shards nothing on
a CPU. FAULT: none; save@RANK fails there after the collective part; submit@SYNC and exit@SYNC raise or die on rank 0;
health@N,M trains twice, and on rank 0 the rollout process is found dead after N batches, and after M.
Writes `OUT/rank-N.json`: what was raised, and on rank 0 the digest of each adapter that was handed over.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from adaptersync.trainer.checkpoint import adapter_in
from adaptersync_core.errors import AdapterSyncError, Fenced
from support import trainers
from support.publications import FakePublication, FakePublisher
from support.rollouts import StubWorker


class Recording(FakePublisher):
    """Keeps the digest of each adapter; fails at one of them as told."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.digests: list[str] = []
        self._fault, _, at = fault.partition("@")
        self._at = int(at) if at.isdigit() else 0

    def submit(self, directory: Path, **more: Any) -> FakePublication:
        self.digests.append(adapter_in(directory).digest)
        if len(self.digests) == self._at and self._fault == "exit":
            os._exit(9)
        if len(self.digests) == self._at and self._fault == "submit":
            raise Fenced("a newer trainer has begun this run", run="run")
        return super().submit(directory, **more)


class Dies(StubWorker):
    """After the batches of the first version."""

    def update_model_version(self, model_version: int) -> None:
        if not self.versions:
            super().update_model_version(model_version)

    def check_health(self, stale_after_s: float) -> None:
        raise AdapterSyncError("the rollout process ended: killed")


def sync_twice(made: Any) -> None:
    made._on_main(lambda: made._open(None))
    for _ in range(2):
        made._sync_weight()
        for name, parameter in made.model.named_parameters():
            if "lora_" in name:
                parameter.data.mul_(2.0)


def train(made: Any, kind: str, world: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(1)
    for name, parameter in made.model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.01, generator=generator)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(made.model, mesh=init_device_mesh("cpu", (world,)))
    made.train() if kind == "ddp" else sync_twice(made)


def main(base: Path, out: Path, kind: str, fault: str) -> None:
    rank = int(os.environ.get("RANK", "0"))
    trl = trainers.load_trl()
    import torch

    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    trainers.on_cpu(patch)
    publisher = Recording(fault)
    patch.setattr(trl.AdapterSyncGRPOTrainer, "_open_publisher", lambda _self: publisher)
    if fault == f"save@{rank}":
        save = trl.async_grpo_trainer.save_lora_adapter

        def full(*args: Any) -> None:
            save(*args)
            raise OSError(28, "No space left on device")

        patch.setattr(trl.async_grpo_trainer, "save_lora_adapter", full)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    name, _, after = fault.partition("@")
    deaths = after.split(",") if name == "health" else []
    dying: list[StubWorker] = [Dies(trainers.BATCH, int(batches)) for batches in deaths]
    began, raised = time.monotonic(), []
    for worker in dying or [StubWorker(trainers.BATCH)]:
        torch.manual_seed(0)
        arguments = {"per_device_train_batch_size": trainers.BATCH // world}
        made = trainers.trainer(trl, base, out, steps=2, rollout_worker=worker, arguments=arguments)
        try:
            train(made, kind, world)
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    said = {
        "raised": "; ".join(raised),
        "seconds": time.monotonic() - began,
        "digests": publisher.digests,
        "processes": made.accelerator.num_processes,
        "sharded": any(type(parameter).__name__ == "DTensor" for parameter in made.model.parameters()),
    }
    (out / f"rank-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
