"""Settings: defaults, then a TOML file, then the environment; checked before anything starts.

A setting `[router] port` is `ADAPTERSYNC_ROUTER__PORT` in the environment, which wins over the file; there a list is
written with commas. The file is named by `--config`, else by `ADAPTERSYNC_CONFIG`, else there is none. A wrong or
unknown key is an error that names it.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from adaptersync_core.address import HIDDEN, complete, discreet
from adaptersync_core.config_check import check
from adaptersync_core.errors import ConfigError
from adaptersync_core.keys import SESSION_TTL_S
from adaptersync_core.proof import Verdict

ENVIRONMENT = "ADAPTERSYNC_"
CONFIG = f"{ENVIRONMENT}CONFIG"  # names the file
SECRETS = ("router.gate_token",)


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
    user: str = ""
    """Who this is to both servers, as `adaptersync acl` names it, where an address does not say it."""
    password_file: str = ""
    """A file with that user's password, read for each connection. So no address, no environment and no process
    argument needs one."""
    ca_file: str = ""
    """Who vouches for the servers of rediss:// addresses. Empty: whom this host trusts."""
    cert_file: str = ""
    """What this shows to servers that want to know their clients."""
    key_file: str = ""
    """The private key of it."""
    lane_bytes: int = 64 << 20
    """The largest version whose bytes travel through the cache server, ahead of the mounted store. 0: none do."""


class StoreSection(Section, frozen=True, kw_only=True):
    path: str = "/var/lib/adaptersync/store"
    """Where trainers publish; replicas mount it, read-only if they can."""
    keep_last: int = 0
    """How many versions of a run stay in the store, the latest, beside those that the table names; older ones are
    removed by its trainer about once a minute, and by workers at jobs.retention_cron. 0: this removes none."""
    keep_every: int = 0
    """Of those that would go, each whose number this divides stays: 100 keeps v100, v200, and so on. 0: none does."""
    keep_for_s: float = 0.0
    """Versions that were stored so lately stay, and with keep_last 0 all that are older go. 0: age is no reason."""


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
    gate_function: str = ""
    """A function of yours that a worker asks about each version at the gate, as module:function (deploy/JOBS.md): it
    admits or refuses in an operator's place. There is a gate where there is one. Empty: operators alone answer."""
    gate_timeout_s: float = 600.0
    """How long it may take, from when the version waits at the gate, also where no worker runs or all are busy."""
    gate_inconclusive: Literal["hold", "admit", "refuse"] = "hold"
    """What becomes of a version of which it cannot say, fails, or does not say in time. `hold`: an operator decides."""
    metrics_port: int = 0
    """Where Prometheus reads its figures, at /metrics; each service of a host needs its own. 0: nowhere."""


class PageSection(Section, frozen=True, kw_only=True):
    """The page that each coordinator serves."""

    host: str = "127.0.0.1"
    """Whoever reaches this address may look at the fleet."""
    port: int = 0
    """0: no page is served."""
    hosts: tuple[str, ...] = ()
    """Names by which browsers ask for it, beside localhost and addresses. Others are refused: a foreign site could make
    its own name lead here, and read along."""
    clients: int = 32
    """Browsers that may follow events at once; who does not read along is dropped."""
    keys_file: str = ""
    """Keys, as `adaptersync api-key` writes them; those with the scope admin may ask for rollbacks, and answer at the
    gate. It is read for each such request. Empty: the page is read-only."""


class AgentSection(Section, frozen=True, kw_only=True):
    name: str = "replica-0"
    """The replica this agent stands beside."""
    engine_url: str = "http://127.0.0.1:8000"
    """The vLLM server, on this host's loopback."""
    public_url: str = ""
    """Where routers reach the engine. Empty: engine_url."""
    token_file: str = ""
    """Where the agent leaves the token for the engine's door. Empty: the engine has no door of ours."""
    engine_key_file: str = ""
    """A file with the bearer token that the engine wants (vLLM's --api-key). Empty: it wants none."""
    engine_ca_file: str = ""
    """Who vouches for an engine with an https:// address. Empty: whom this host trusts."""
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
    metrics_port: int = 0
    """Where Prometheus reads its figures, at /metrics; each service of a host needs its own. 0: nowhere."""


class EngineSection(Section, frozen=True, kw_only=True):
    """Engines that `adaptersync replica N` runs on a host, one an instance number. Agents are told with --number N."""

    model: str = ""
    """Directory of the base model, the same on each host. Empty: engines are started by something else."""
    kind: Literal["vllm", "simulated"] = "vllm"
    """`simulated` answers without a model, for rehearsals."""
    host: str = "127.0.0.1"
    """Address that engines listen on. Another than the loopback needs engine.peers."""
    public_host: str = ""
    """Where routers reach this host. Empty: its name, or the loopback where engines listen on that."""
    port: int = 8000
    """Of replica 0; N listens on this plus N. So it is with the next two."""
    events_port: int = 5557
    """Where an agent hears what its engine says of its cache, on the loopback."""
    replay_port: int = 5657
    """Where it asks for what it missed of that."""
    peers: tuple[str, ...] = ()
    """Addresses or networks (10.0.0.0/24) of the hosts that may reach engines: those of routers. Whatever else there is
    in the network is refused by systemd; an engine answers whoever reaches it."""
    run_path: str = "/run/adaptersync"
    """Where agents leave their engines' tokens, by number."""
    max_loras: int = 5
    """Versions served at once: the window, a candidate, and one to spare for a rollback target."""
    max_cpu_loras: int = 8
    """Versions kept in memory, for vLLM to load from."""
    max_lora_rank: int = 16
    """The largest rank of an adapter."""
    max_num_seqs: int = 64
    """Sequences that an engine runs at once."""
    arguments: str = ""
    """More of the engine's own, as in a shell; they win over ours."""
    drain_s: float = 60.0
    """How long a stop waits for requests in flight."""


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
    """How long after its arrival a request may be held, for a version that is about to be promoted, or was lost, or
    may be so after Redis was set back."""
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
    keys_file: str = ""
    """Who may ask this router, and for what: a file that `adaptersync api-key` writes. Empty: everybody who reaches
    it."""
    replica_keys_path: str = ""
    """A directory with a bearer token for each replica that wants one, in a file called as the replica. Empty: replicas
    are shown what clients show the router, but for keys of `keys_file`."""
    replica_ca_file: str = ""
    """Who vouches for replicas with https:// addresses. Empty: whom this host trusts."""
    gate_token: str = ""
    """Whoever sends it as x-adaptersync-gate may ask for versions that wait at the gate. Empty: nobody may, but for
    admins of keys_file."""
    gate_token_file: str = ""
    """A file with it, rather."""


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
    router_key_file: str = ""
    """A file with the key that the router wants; the relay shows it as well. Empty: the router has no keys."""
    promotion_timeout_s: float = 120.0
    """How long training waits for a promotion before it gives up."""
    max_staleness: int = 2
    """How many promotions old a version may be and still serve."""


class JobsSection(Section, frozen=True, kw_only=True):
    verify: bool = True
    """Read every promoted version again, off the critical path."""
    verify_cron: str = "30 3 * * *"
    """When workers read again all that is served, as crontab has it: minute, hour, day of the month, month, day of the
    week, by the worker's own time zone. What came due while none ran is made up for. Empty: never; so it is with the
    next two."""
    retention_cron: str = "0 4 * * *"
    """When they remove what store.keep_last, store.keep_every and store.keep_for_s let go, of all runs."""
    tidy_cron: str = "0 5 * * 0"
    """When they remove what killed publishers and exports left."""
    export_path: str = ""
    """A directory that versions are exported to, each in one called as it is. Empty: none are."""
    hub_namespace: str = ""
    """A user or organization of the Hub that versions are exported to, each run in a private repository of its name.
    Needs the extra `hub`. Empty: none are."""
    hub_url: str = "https://huggingface.co"
    """The Hub."""
    hub_token_file: str = ""
    """A file with a token that may write there."""
    metrics_port: int = 0
    """Where Prometheus reads its figures, at /metrics; each service of a host needs its own. 0: nowhere."""
    ledger_s: float = 60.0
    """How often what the ledger has in Redis is archived in the store, by a worker, which needs the extra `ledger`.
    0: never, and nothing is trimmed."""
    ledger_kept_s: float = 3600.0
    """How long rows, fates and events stay in Redis, too, once they are archived: commands that count rollouts see no
    more. At least 60: meanwhile routers look whether Redis has lost any."""


class TelemetrySection(Section, frozen=True, kw_only=True):
    metrics_host: str = "127.0.0.1"
    """Where agents, coordinators and workers that have a metrics_port listen for Prometheus, which needs no password.
    A router has /metrics at its own address."""
    traces_url: str = ""
    """Where spans from publication to first token are sent, as OTLP over HTTP: http://collector:4318/v1/traces. Needs
    the extra `otel`. Empty: none are made."""


class Config(Section, frozen=True, kw_only=True):
    group: GroupSection = GroupSection()
    redis: RedisSection = RedisSection()
    store: StoreSection = StoreSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    page: PageSection = PageSection()
    agent: AgentSection = AgentSection()
    engine: EngineSection = EngineSection()
    proof: ProofSection = ProofSection()
    router: RouterSection = RouterSection()
    relay: RelaySection = RelaySection()
    trainer: TrainerSection = TrainerSection()
    jobs: JobsSection = JobsSection()
    telemetry: TelemetrySection = TelemetrySection()


def load_config(
    path: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Settings from defaults, file, environment and `overrides` ("router.port": 8080), in that order."""
    environment = os.environ if environment is None else environment
    named = path or (Path(environment[CONFIG]) if environment.get(CONFIG) else None)
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
            next_step=_instead(str(error)),
            **_source(str(error), given, named),
        ) from error
    check(config)
    return _completed(config)


def _completed(config: Config) -> Config:
    """With addresses of servers that say all that is needed to be let in, and a gate where a function answers at it."""
    ours, gate = config.redis, config.coordinator
    user_and_files = {
        "user": ours.user,
        "password_file": ours.password_file,
        "ca_file": ours.ca_file,
        "cert_file": ours.cert_file,
        "key_file": ours.key_file,
    }
    urls = {
        name: complete(url, **user_and_files)
        for name, url in (("control_url", ours.control_url), ("cache_url", ours.cache_url))
        if url
    }
    gate = replace(gate, gate=gate.gate or bool(gate.gate_function))
    return replace(config, redis=replace(ours, **urls), coordinator=gate)


def names() -> list[str]:
    """Every setting, as "section.key"."""
    sections = {field.name: field.type for field in msgspec.structs.fields(Config)}
    return [f"{section}.{key}" for section, kind in sections.items() for key in kind.__struct_fields__]


def variable(name: str) -> str:
    """What a setting ("router.port") is called in the environment."""
    return f"{ENVIRONMENT}{name.replace('.', '__')}".upper()


def shown(name: str, value: Any) -> Any:
    """A setting's value without the secret that it is, or has within."""
    if not value or not isinstance(value, str):
        return value
    return HIDDEN if name in SECRETS else discreet(value)


def _set(settings: dict[str, Any], section: str, key: str, value: Any) -> None:
    values = settings.setdefault(section, {})
    if not isinstance(values, dict):
        raise ConfigError("setting is wrong: a section is a table of settings", key=section)
    values[key] = value


def _instead(complaint: str) -> str:
    """What to do about it; a key or a section that is none may be meant for another."""
    place, unknown = _where(complaint)
    known = names() if place else [field.name for field in msgspec.structs.fields(Config)]
    near = difflib.get_close_matches(".".join(filter(None, (place, unknown))), known, n=1) if unknown else []
    return (
        f"did you mean {near[0]}? All are in adaptersync config --explain"
        if near
        else "see adaptersync config --explain"
    )


def _where(complaint: str) -> tuple[str, str]:
    """The place that msgspec complains of, and the field that it does not know there."""
    place, unknown = re.search(r"`\$\.([\w.]+)", complaint), re.search(r"unknown field `([^`]*)`", complaint)
    return place[1] if place else "", unknown[1] if unknown else ""


def _source(complaint: str, given: Mapping[str, str], file: Path | None) -> dict[str, str]:
    """Where the setting that msgspec complains of was made: the variable, or else the file."""
    name = ".".join(filter(None, _where(complaint)))
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
        raise ConfigError(f"settings are not TOML: {error}", next_step="mend that line", file=str(path)) from error
