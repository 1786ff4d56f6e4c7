"""Settings: defaults, then a TOML file, then the environment; checked before anything starts.

A setting `[router] port` is `ADAPTERSYNC_ROUTER__PORT` in the environment, which wins over the file; there a list is
written with commas. The file is named by `--config`, else by `ADAPTERSYNC_CONFIG`, else there is none. A wrong or
unknown key is an error that names it.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from adaptersync_core.errors import ConfigError, NameInvalid
from adaptersync_core.identity import check_name
from adaptersync_core.keys import ROUTER_SERVES_S, SESSION_TTL_S
from adaptersync_core.proof import Verdict

ENVIRONMENT = "ADAPTERSYNC_"
REDIS_SCHEMES = ("redis", "rediss", "unix")
WORKERS = 64  # processes of one router
SPOOL_MIN_BYTES = 16_384  # a few rows
BLOCKS = 4096  # of one prompt: one script call takes them all, and meanwhile the cache server serves nobody else
# with 0, nothing would be served
AT_LEAST_ONE = (
    "coordinator.min_ready",
    "router.max_inflight",
    "relay.max_inflight",
    "router.connections",
    "router.head_bytes",
    "router.body_bytes",
)


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections. The text under a field says what it is, in which unit, and why it has that default."""


class GroupSection(Section, frozen=True, kw_only=True):
    """What all services of a group must have alike."""

    name: str = "default"
    """Replicas, services and trainers that belong together: they share a base model, a store and these servers."""
    base_model: str = "base"
    """The name under which replicas serve the base model."""
    policy: Literal["promise", "threshold", "expected"] = "promise"
    """How routers choose a replica. `promise`: a new prompt goes to where, with the groups that are expected, there is
    least to do, and owners may be `router.spill` ahead of the mean. `threshold`: to the least loaded, and as much ahead
    of that one. `expected`: as `promise`, but where the first token is expected soonest by what agents measure of their
    engines: better for long prompts and for replicas of unequal speed, at the price of more prefills.
    `adaptersync bench policy` compares them."""
    blocks_per_version: int = 500_000
    """Owned prefix blocks kept for one version, about 100 bytes each; they go with the version, so a group keeps as
    many times this as it has live versions."""
    blocks_per_request: int = 512
    """Blocks of one prompt that are looked up; the rest of a long prompt follows the head. Prompts that share a request
    share them. At most 4096: one call takes them all, and meanwhile the cache server serves nobody else."""


class RedisSection(Section, frozen=True, kw_only=True):
    control_url: str = "redis://127.0.0.1:6379/0"
    """Durable and small: events, versions, acks, ledger."""
    cache_url: str = ""
    """Prefix ownership, in-flight counts and bytes on their way; may forget. Empty: the control server."""
    lane_bytes: int = 64 << 20
    """The largest version whose bytes travel through the cache server, ahead of the mounted store. 0: none do."""


class StoreSection(Section, frozen=True, kw_only=True):
    path: str = "/var/lib/adaptersync/store"
    """Where trainers publish; replicas mount it, read-only if they can."""
    keep_last: int = 0
    """How many versions of a run its trainer leaves in the store, the latest, beside those that the table names; older
    ones it removes about once a minute. 0: it removes none."""


class CoordinatorSection(Section, frozen=True, kw_only=True):
    name: str = "coordinator-0"
    min_ready: int = 1
    """Never promote on fewer ready replicas, and never eject below."""
    lease_s: float = 5.0
    """How long a coordinator leads without renewing; another takes over after it."""
    tick_s: float = 0.25
    """How often to look when no event wakes it."""
    alive_s: float = 5.0
    """How old a replica's heartbeat may be before it counts as silent."""
    deadline_s: float = 120.0
    """How long a version may take from staging to the last ack."""
    drain_s: float = 600.0
    """How long a retired version waits for requests in flight."""
    unload_s: float = 60.0
    """How long a replica may take to unload a version that nobody uses any more before it is taken out of routing."""
    eject_s: float = 10.0
    """How long an ejected replica stays out before it may join again."""
    gate: bool = False
    """Promote a version only when an operator admits it, after every replica proved it: adaptersync gate."""


class AgentSection(Section, frozen=True, kw_only=True):
    name: str = "replica-0"
    """The replica this agent stands beside."""
    engine_url: str = "http://127.0.0.1:8000"
    """The vLLM server, on this host's loopback."""
    public_url: str = ""
    """Where routers reach the engine. Empty: engine_url."""
    token_file: str = ""
    """Where the agent leaves the token for the engine's door. Empty: the engine has no door of ours."""
    stage_path: str = "/var/lib/adaptersync/staged"
    """Local disk, the same path on every replica: vLLM's block hashes contain it."""
    heartbeat_s: float = 1.0
    """How often to look at the engine and say so."""
    probe_timeout_s: float = 3.0
    """How long the engine may take to answer a liveness probe."""
    load_timeout_s: float = 60.0
    """How long a load may take."""
    visible_timeout_s: float = 60.0
    """How long an announced version may be invisible on this host's mount."""
    keep_s: float = 600.0
    """How long staged files stay after their version has left the table: at least router.request_timeout_s, since a
    router that lost Redis may still wait for an answer, and the engine read them again for it."""
    kv_events: Literal["auto", "off"] = "auto"
    """Follow what the engine says of its cache, if it does (vLLM's --kv-events-config), so that routers know what is
    warm where. Off, or where it says nothing: what a replica was sent counts as warm there."""


class ProofSection(Section, frozen=True, kw_only=True):
    promote_on: tuple[Verdict, ...] = ("proved",)
    """Verdicts with which a replica accepts a version. Add "below noise" or "not probed" for engines without our door
    and worker extension; a version that is refuted is never accepted."""
    timeout_s: float = 30.0
    """How long one experiment on the engine may take."""


class RouterSection(Section, frozen=True, kw_only=True):
    name: str = "router-0"
    host: str = "127.0.0.1"
    port: int = 8080
    workers: int = 1
    """Processes that share this port, which no other router can; limits below hold for each. One serves some thousand
    requests a second."""
    hold_s: float = 30.0
    """How long after its arrival a request may be held, for a version that is about to be promoted or was lost."""
    held_requests: int = 4096
    """How many requests may be held at once. 0: none are."""
    body_bytes: int = 16 << 20
    """The largest request body."""
    arriving_bytes: int = 256 << 20
    """Of all request bodies that have not yet arrived whole, or wait for an earlier request of their client; at least
    body_bytes."""
    head_bytes: int = 64 << 10
    """The largest request line with its headers."""
    connections: int = 8192
    """Clients' connections that may be open; the limit of open files must allow for twice as many, and is raised as far
    as the hard one."""
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 600.0
    """From a request's arrival to the last byte of its answer, however long it is held and whoever is asked."""
    max_inflight: int = 4096
    """Requests in flight in this router; more are answered 503."""
    inflight_bytes: int = 1 << 30
    """Of the bodies of requests in flight; more are answered 503."""
    table_max_age_s: float = 60.0
    """How long to serve without Redis; at most 60, for which retirement waits."""
    tokenizer: str = ""
    """The directory of the model that vLLM serves, or its name: text and chat are then routed by the tokens that vLLM
    makes of them, so that they meet the same prompt in token ids and what engines tell of their caches. Needs the extra
    `tokenize`, and a vLLM that is given no chat template of its own; a router that cannot load it does not start.
    Empty: by their bytes, which keeps equal beginnings together as well."""
    spill: int = 8
    """How many sequences in flight an owner may be ahead; but for `threshold` at least an eighth of the mean. A request
    for several completions, or with several prompts, is so many sequences."""
    session_s: float = SESSION_TTL_S
    """How long after its last turn a session, named in x-session-id, keeps its version and its replica. Each takes some
    300 bytes of the cache server so long; past its bound that forgets those that were silent longest. 0: none do."""
    spool_path: str = "/var/lib/adaptersync/spool"
    """A directory on this host's disk where ledger rows wait for Redis, across restarts of the router; its group has a
    directory of its own in it. Who wipes a group on purpose removes that, too: it holds rows that would come back."""
    spool_bytes: int = 64 << 20
    """Disk taken for it by each router process; room for about 60 thousand rollouts."""
    kept_bytes: int = 32 << 20
    """Disk taken by each router process for the latest rows that Redis has, about 40 thousand: they are written again
    to one that was emptied or set back. 0: none are kept."""
    when_spool_full: Literal["refuse", "serve"] = "refuse"
    """Refuse requests that cannot be recorded, or serve them and count the rows that are lost."""
    prompt_logprobs: bool = False
    """Pass on requests for log-probabilities of prompts. They end a vLLM that has LoRA on its model's head."""
    gate_token: str = ""
    """Whoever sends it as x-adaptersync-gate may ask for versions that wait at the gate. Empty: nobody may."""


class RelaySection(Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8070
    router_url: str = "http://127.0.0.1:8080"
    allowed_root: str = ""
    """Adapters are taken only from below this directory. Empty: the working directory of the relay."""
    promotion_timeout_s: float = 120.0
    """How long a load call waits for its version to become current, and what else TRL asks only once for a fleet that
    can answer it."""
    max_inflight: int = 4096
    """Requests at the router at once; what is beyond waits here for its turn."""
    request_timeout_s: float = 630.0
    """From a request's arrival to the last byte of its answer: longer than the router's, which says why it gives up."""


class TrainerSection(Section, frozen=True, kw_only=True):
    run: str = ""
    """The run's name; no default, since two runs must not share one."""
    router_url: str = "http://127.0.0.1:8080"
    promotion_timeout_s: float = 120.0
    """How long training waits for a promotion before it gives up."""
    max_staleness: int = 2
    """How many promotions old a version may be and still serve."""


class JobsSection(Section, frozen=True, kw_only=True):
    verify: bool = True
    """Read every promoted version again, off the critical path."""


class Config(Section, frozen=True, kw_only=True):
    group: GroupSection = GroupSection()
    redis: RedisSection = RedisSection()
    store: StoreSection = StoreSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    agent: AgentSection = AgentSection()
    proof: ProofSection = ProofSection()
    router: RouterSection = RouterSection()
    relay: RelaySection = RelaySection()
    trainer: TrainerSection = TrainerSection()
    jobs: JobsSection = JobsSection()


def load_config(
    path: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Settings from defaults, file, environment and `overrides` ("router.port": 8080), in that order."""
    environment = os.environ if environment is None else environment
    named = path or (Path(environment["ADAPTERSYNC_CONFIG"]) if environment.get("ADAPTERSYNC_CONFIG") else None)
    settings = _read(named) if named else {}
    given: dict[str, str] = {}  # by the environment
    misspelt = {variable(name).replace("__", "_"): name for name in names()}
    for name, value in environment.items():
        section, separator, key = name.removeprefix(ENVIRONMENT).lower().partition("__")
        if name in misspelt:
            raise ConfigError(
                "variable would be ignored", next_step=f"call it {variable(misspelt[name])}", variable=name
            )
        if name.startswith(ENVIRONMENT) and separator:
            _set(settings, section, key, value)
            given[f"{section}.{key}"] = name
    for dotted, value in (overrides or {}).items():
        section, _, key = dotted.partition(".")
        if value is not None:
            _set(settings, section, key, value)
            given.pop(dotted, None)
    _split_lists(settings)
    try:
        config = msgspec.convert(settings, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"setting is wrong: {error}".replace("$.", ""),
            next_step="see adaptersync config --explain",
            **_source(str(error), given, named),
        ) from error
    _check(config)
    return config


def names() -> list[str]:
    """Every setting, as "section.key"."""
    sections = {field.name: field.type for field in msgspec.structs.fields(Config)}
    return [f"{section}.{key}" for section, kind in sections.items() for key in kind.__struct_fields__]


def variable(name: str) -> str:
    """What a setting ("router.port") is called in the environment."""
    return f"{ENVIRONMENT}{name.replace('.', '__')}".upper()


def _set(settings: dict[str, Any], section: str, key: str, value: Any) -> None:
    values = settings.setdefault(section, {})
    if not isinstance(values, dict):
        raise ConfigError("setting is wrong: a section is a table of settings", key=section)
    values[key] = value


def _source(complaint: str, given: Mapping[str, str], file: Path | None) -> dict[str, str]:
    """Where the setting that msgspec complains of was made: the variable, or else the file."""
    place, unknown = re.search(r"`\$\.([\w.]+)", complaint), re.search(r"unknown field `([^`]*)`", complaint)
    name = ".".join(part[1] for part in (place, unknown) if part)
    for dotted, variable_name in given.items():
        if f"{dotted}.".startswith(f"{name}."):
            return {"variable": variable_name}
    return {"file": str(file)} if file else {}


def as_text(value: str | float | tuple[str, ...]) -> str:
    """A setting's value as the environment has it."""
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _split_lists(settings: dict[str, Any]) -> None:
    """A list from the environment or an option is text."""
    for section in msgspec.structs.fields(Config):
        values = settings.get(section.name)
        for field in msgspec.structs.fields(section.type):
            text = values.get(field.name) if isinstance(values, dict) else None
            if isinstance(field.default, tuple) and isinstance(text, str):
                _set(settings, section.name, field.name, [part.strip() for part in text.split(",") if part.strip()])


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"settings cannot be read: {error.strerror}", next_step="check --config", file=str(path)
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings are not TOML: {error}", file=str(path)) from error


def _check(config: Config) -> None:
    names = {
        "group.name": config.group.name,
        "coordinator.name": config.coordinator.name,
        "agent.name": config.agent.name,
        "router.name": config.router.name,
        "trainer.run": config.trainer.run or "none",
    }
    for key, name in names.items():
        try:
            check_name(key, name)
        except NameInvalid as error:
            raise ConfigError(error.reason, key=key, value=name[:96]) from error
    for section in config.__struct_fields__:
        values = getattr(config, section)
        for key in values.__struct_fields__:
            value = getattr(values, key)
            if type(value) not in (int, float):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and key.endswith("_s") and key != "session_s"):
                raise ConfigError("setting must be positive and finite", key=f"{section}.{key}", value=value)
            if key == "port" and value > 65535:
                raise ConfigError("setting must be a port, 0 to 65535", key=f"{section}.{key}", value=value)
    for key, url in (("redis.control_url", config.redis.control_url), ("redis.cache_url", config.redis.cache_url)):
        if not _is_redis(url) and (url or key == "redis.control_url"):
            raise ConfigError("setting must be an address as redis://host:port/0", key=key)
    if not Path(config.agent.stage_path).is_absolute() or not Path(config.store.path).is_absolute():
        raise ConfigError(
            "store.path and agent.stage_path must be absolute: vLLM would look a relative one up on a hub"
        )
    if not Path(config.router.spool_path).is_absolute():
        raise ConfigError("setting must be an absolute path", key="router.spool_path", value=config.router.spool_path)
    if config.router.spool_bytes < SPOOL_MIN_BYTES:
        raise ConfigError(
            f"setting must be at least {SPOOL_MIN_BYTES}", key="router.spool_bytes", value=config.router.spool_bytes
        )
    if 0 < config.router.kept_bytes < SPOOL_MIN_BYTES:
        raise ConfigError(
            f"setting must be 0 or at least {SPOOL_MIN_BYTES}",
            key="router.kept_bytes",
            value=config.router.kept_bytes,
        )
    if config.router.table_max_age_s > ROUTER_SERVES_S:
        raise ConfigError(
            f"setting must be at most {ROUTER_SERVES_S}: retirement waits no longer for a router that is cut off",
            key="router.table_max_age_s",
            value=config.router.table_max_age_s,
        )
    for name in AT_LEAST_ONE:
        section, _, key = name.partition(".")
        if getattr(getattr(config, section), key) < 1:
            raise ConfigError("setting must be at least 1", key=name, value=0)
    if config.router.arriving_bytes < config.router.body_bytes:
        raise ConfigError(
            f"setting must be at least router.body_bytes, {config.router.body_bytes}",
            key="router.arriving_bytes",
            value=config.router.arriving_bytes,
        )
    if config.group.blocks_per_request > BLOCKS:
        raise ConfigError(
            f"setting must be at most {BLOCKS}: the cache server serves nobody else while it looks them up",
            key="group.blocks_per_request",
            value=config.group.blocks_per_request,
        )
    if not 1 <= config.router.workers <= WORKERS:
        raise ConfigError(f"setting must be 1 to {WORKERS}", key="router.workers", value=config.router.workers)


def _is_redis(url: str) -> bool:
    """The value is not shown: it may hold a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in REDIS_SCHEMES and "://" in url
