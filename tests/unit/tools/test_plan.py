"""What a plan says, beside the real thing: a file that PEFT saved, and what a real Redis takes."""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from adaptersync.trainer import AdapterPublisher
from adaptersync_core.archive import Archive
from adaptersync_core.chain import Head
from adaptersync_core.config import Config, RedisSection, StoreSection
from adaptersync_core.errors import ConfigError
from adaptersync_core.events import PHASES, ReplicaAcked, to_fields
from adaptersync_core.fates import Fates, write_fates
from adaptersync_core.keys import Keys
from adaptersync_core.manifest import inspect
from adaptersync_core.redis import RedisClient
from adaptersync_core.rollouts import FIELD, Row
from adaptersync_tools.cli import main
from adaptersync_tools.engines import LINEAR, EngineSettings
from adaptersync_tools.plan import (
    EVENT_BYTES,
    EVENTS,
    FILE_BYTES,
    GIB,
    LINK_BYTES,
    RECORD_BYTES,
    SPARE,
    STORED_EVENT_BYTES,
    STORED_ROW_BYTES,
    Plan,
    Wanted,
    base_model,
    manifest_size,
    plan,
    tensors,
    weights_size,
)
from support.adapters import make_adapter
from support.tiny_model import build_tiny_model

# Qwen2.5-7B, by its published config
SEVEN = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SEVEN))
    return directory


def made(model: Path, **wanted: Any) -> Plan:
    return plan(base_model(model), Wanted(**wanted))


@pytest.mark.trl
@pytest.mark.parametrize(("rank", "targets"), [(8, LINEAR), (3, ("q_proj", "v_proj"))])
def test_an_adapter_is_as_large_as_the_one_that_peft_saves(tmp_path: Path, rank: int, targets: tuple[str, ...]) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = build_tiny_model(tmp_path / "tiny")
    config = LoraConfig(r=rank, target_modules=list(targets), task_type="CAUSAL_LM")
    saved = tmp_path / "saved"
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(str(saved))

    shapes = tensors(base_model(base), rank=rank, targets=targets)
    assert shapes == inspect(saved).tensors
    assert weights_size(shapes, "F32") == (saved / "adapter_model.safetensors").stat().st_size
    assert plan(base_model(base), Wanted(rank=rank, targets=targets))["adapter"] == weights_size(shapes, "F32")
    assert (saved / "adapter_config.json").stat().st_size < 2048


def test_weights_of_a_model_that_is_known(model: Path) -> None:
    """PEFT says of Qwen2.5-7B: 40,370,176 trainable parameters at rank 16 for all linear layers."""
    shapes = tensors(base_model(model), rank=16, targets=LINEAR)
    assert sum(rows * columns for rows, columns in shapes.values()) == 40_370_176
    assert len(shapes) == 2 * 7 * 28


def test_flags_are_those_that_we_start_engines_with(model: Path) -> None:
    ours = EngineSettings(model=model)
    assert made(model, rank=16, window=2).flags == {
        "--max-loras": ours.max_loras,
        "--max-cpu-loras": ours.max_cpu_loras,
        "--max-lora-rank": ours.max_lora_rank,
    }


@pytest.mark.parametrize(("rank", "limit"), [(1, 1), (9, 16), (64, 64), (257, 320)])
def test_a_rank_is_rounded_to_what_vllm_takes(model: Path, rank: int, limit: int) -> None:
    assert made(model, rank=rank).flags["--max-lora-rank"] == limit


def test_more_of_each_needs_more(model: Path) -> None:
    one = made(model)
    assert made(model, runs=2).flags["--max-loras"] == 2 * one["versions live"] + 1
    assert made(model, window=3)["versions live"] == one["versions live"] + 1
    assert made(model, dtype="BF16")["adapter"] == pytest.approx(one["adapter"] / 2, rel=0.01)
    assert made(model, days=60)["store"] == pytest.approx(2 * one["store"], abs=1)
    assert made(model, step_s=30.0)["sync share of an engine"] == pytest.approx(2 * one["sync share of an engine"])
    assert made(model, rank=32)["host memory of an engine"] > 1.9 * one["host memory of an engine"]
    assert made(model, rollouts=2560)["control server"] > one["control server"]
    assert made(model, rollouts=2560)["ledger in the store"] > 2 * one["ledger in the store"]
    assert made(model, days=60)["ledger in the store"] == pytest.approx(2 * one["ledger in the store"], rel=0.1)
    assert made(model, replicas=8)["publication to promotion"] > one["publication to promotion"]
    assert one["device memory for slots"] < GIB


def test_every_number_is_explained(model: Path) -> None:
    for number in made(model).numbers:
        assert len(number.why) > 20
        assert number.value > 0


def test_what_is_above_the_lane_travels_by_the_store(model: Path) -> None:
    plans = made(model, rank=1), made(model, rank=64)
    why = [number.why for each in plans for number in each.numbers if number.name == "cache server"]
    assert "bytes on their way" in why[0]
    assert "they take the store" in why[1]


def test_what_versions_take_in_a_real_redis(redis_url: str, cache_url: str, tmp_path: Path) -> None:
    """Manifest, record, events: what is planned for so many, against what the server says it took."""
    base = base_model(build_sizes(tmp_path))
    sizes: dict[str, Any] = {"hidden": base.hidden, "intermediate": base.intermediate, "layers": base.layers}
    shapes = tensors(base, rank=8, targets=("q_proj",))
    config = Config(
        redis=RedisSection(control_url=redis_url, cache_url=cache_url), store=StoreSection(path=str(tmp_path / "store"))
    )
    with AdapterPublisher(config, run="run") as trainer:

        def publish(seed: int) -> str:
            directory = make_adapter(tmp_path / f"a{seed}", rank=8, targets=("q_proj",), seed=seed, **sizes)
            return trainer.publish(directory).adapter_id

        names = [publish(seed) for seed in range(20)]
        taken = sum(asked(redis_url, "MEMORY", "USAGE", key) for key in asked(redis_url, "KEYS", "*")) / len(names)
    manifest = len(said(redis_url, names[-1]))
    assert manifest == pytest.approx(manifest_size(shapes, ("q_proj",)), rel=0.3)
    planned = manifest_size(shapes, ("q_proj",)) + RECORD_BYTES + EVENT_BYTES  # its record is still to come
    assert planned / 2 < taken < planned


def test_the_control_server_keeps_what_workers_leave_there(model: Path) -> None:
    """An hour of rows and a bound of events, however long versions are kept; what stays as long is in the store."""
    day, month = made(model, step_s=1.0, days=1.0), made(model, step_s=1.0, days=30.0)
    remembered = manifest_size(tensors(base_model(model), rank=16, targets=LINEAR), LINEAR) + RECORD_BYTES
    more = month["control server"] - day["control server"]
    assert more == pytest.approx(SPARE * 29 * 86400 * remembered, rel=0.001)
    kept = made(model, rollouts=100_000, ledger_kept_s=7200.0)["control server"]
    assert kept == pytest.approx(2 * made(model, rollouts=100_000)["control server"], rel=0.1)


def test_what_the_ledger_takes_in_the_store(tmp_path: Path) -> None:
    """Rows as routers write them, drained an hour long, then merged: what is planned for them, against the files."""
    pytest.importorskip("pyarrow")
    rollouts, fates, events = (Archive(tmp_path, "g", table) for table in ("rollouts", "fates", "events"))
    chance, drains, each = random.Random(1), 60, 256
    heads: dict[Archive, Head | None] = {}

    def write(archive: Archive, drained: int, entries: list[dict[str, str]]) -> None:
        at = [f"{1_700_000_000_000 + drained * 60_000}-{place}" for place in range(len(entries))]
        records = [
            record for entry, fields in zip(at, entries, strict=True) for record in archive.table.records(entry, fields)
        ]
        heads[archive] = archive.write(records, heads.get(archive), cursor=at[-1], incarnation="term")

    for drained in range(drains):
        rows = [rollout(drained, place, chance) for place in range(each)]
        write(rollouts, drained, [{FIELD: msgspec.json.encode(row).decode()} for row in rows])
        told = Fates(
            run="my-run", epoch=1, step=drained, fate="trained", requests=tuple(row.request_id for row in rows)
        )
        write(fates, drained, [pairs(write_fates(told))])
        write(events, drained, [pairs(to_fields(acked(drained, place, chance))) for place in range(EVENTS + 2)])

    def taken() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))

    content = drains * (each * STORED_ROW_BYTES + (EVENTS + 2) * STORED_EVENT_BYTES)
    assert content < taken() < content + drains * FILE_BYTES * 1.5
    assert max(path.stat().st_size for path in tmp_path.rglob("link.json")) < LINK_BYTES / 2
    for archive in (rollouts, fates, events):
        head = heads[archive]
        assert head is not None
        files = [file for _, file in sorted(archive.files().items())]
        assert archive.merge(files, [archive.checked(file) for file in files], head)
    assert content / 2 < taken() < content


def rollout(drained: int, place: int, chance: random.Random) -> Row:
    def some(most: float) -> float:
        return round(chance.random() * most, 6)

    return Row(
        request_id=f"9f2c6a1b-{drained * 256 + place:x}", router="router-0-0a1b2c", path="/v1/completions",
        asked="my-run", outcome="ok", started_at=1.7e9 + 60 * drained + some(60.0), status=200, total_s=some(20.0),
        run="my-run", version=f"my-run-v{drained}-{drained:012x}", digest=f"{drained:064x}",
        replica=f"replica-{chance.randrange(4)}", engine_epoch="life-0123456789abcdef", routing="prefix",
        owned_blocks=chance.randrange(60), attempts=1, hold_s=some(0.001), route_s=some(0.001), first_byte_s=some(1.0),
        prompt_tokens=chance.randrange(50, 2000), completion_tokens=chance.randrange(10, 2000),
        cached_tokens=chance.randrange(1000), generation=drained, predicted_tokens=chance.randrange(1000),
        blocks=chance.randrange(100), boilerplate=3, chain=f"{chance.getrandbits(64):016x}", block_size=16, alike=8,
        session=f"{chance.getrandbits(64):016x}", prompt=f"{chance.getrandbits(64):016x}",
    )  # fmt: skip


def acked(drained: int, place: int, chance: random.Random) -> ReplicaAcked:
    phases: dict[str, Any] = {name: chance.random() for name in PHASES}
    version = f"my-run-v{drained}-{drained:012x}"
    return ReplicaAcked(
        version=version, replica=f"replica-{place}", engine_epoch="life-0123456789abcdef", accepted=True, **phases
    )


def pairs(flat: list[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def said(url: str, name: str) -> str:
    return str(asked(url, "GET", Keys("default").manifest(name)))


def asked(url: str, *command: str) -> Any:
    async def ask() -> Any:
        client = RedisClient(url, name="test")
        try:
            return await client.command(*command)
        finally:
            await client.close()

    return asyncio.run(ask())


def build_sizes(tmp_path: Path) -> Path:
    directory = tmp_path / "sizes"
    directory.mkdir()
    sizes = {"hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 32, "num_hidden_layers": 12}
    (directory / "config.json").write_text(json.dumps({**sizes, "vocab_size": 100}))
    return directory


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_experts": 8}, "mixture of experts"),
        ({"hidden_size": None}, "cannot be read"),
        ({"num_attention_heads": "many"}, "cannot be read"),
        ({"num_attention_heads": 0}, "cannot be read"),
        ({"num_hidden_layers": 99_999_999_999}, "layers cannot be"),
        ({"hidden_size": -1}, "hidden cannot be"),
        ({"vocab_size": 1.5}, "vocab cannot be"),
    ],
)
def test_models_that_are_not_understood_are_refused(model: Path, change: dict[str, Any], what: str) -> None:
    (model / "config.json").write_text(json.dumps(SEVEN | change))
    with pytest.raises(ConfigError, match=what):
        base_model(model)


def test_what_cannot_be_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="no such rank"):
        made(model, rank=513)
    with pytest.raises(ConfigError, match="no such module"):
        made(model, targets=("lm_head",))
    for days in (math.inf, math.nan):
        with pytest.raises(ConfigError, match="option must be a number"):
            made(model, days=days)


def test_the_command(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["plan", str(model), "--rank", "32", "--runs", "2"]) == 0
    text = capsys.readouterr().out
    assert "--enable-lora --max-loras 9 --max-cpu-loras 12 --max-lora-rank 32" in text
    assert main(["plan", str(model), "--json", "--targets", "q_proj, v_proj"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out, type=Plan)
    assert told == made(model, targets=("q_proj", "v_proj"))
    assert replace(told.wanted, targets=LINEAR) == Wanted()
    assert main(["plan", str(model), "--rank", "1000"]) == 78
