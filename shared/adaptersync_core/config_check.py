"""What settings must be beyond their types: bounds, and what goes together. Pure."""

from __future__ import annotations

import math
import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from adaptersync_core.address import HIDDEN
from adaptersync_core.errors import ConfigError, NameInvalid
from adaptersync_core.identity import check_name
from adaptersync_core.keys import ROUTER_SERVES_S

if TYPE_CHECKING:
    from adaptersync_core.config import Config

REDIS_SCHEMES = ("redis", "rediss", "unix")
WORKERS = 64  # processes of one router
SPOOL_MIN_BYTES = 16_384  # a few rows
BLOCKS = 4096  # of one prompt: one script call takes them all, and meanwhile the cache server serves nobody else
NEVER = ("session_s", "ledger_s", "keep_for_s")  # durations that may be 0
LEDGER_KEPT_MIN_S = 60  # routers look every second whether Redis lost what it took; some are stopped for a moment
_HOST = re.compile(r"\w(?:[\w.-]{0,251}[\w.])?")
_ZONE = re.compile(r"[\w.-]{1,64}")
NO_SECRET = f"setting has {HIDDEN} where adaptersync config left out a secret"
# with 0, nothing would be served
AT_LEAST_ONE = (
    "coordinator.min_ready",
    "page.clients",
    "router.max_inflight",
    "relay.max_inflight",
    "router.connections",
    "router.head_bytes",
    "router.body_bytes",
)


def check(config: Config) -> None:
    """ConfigError names the setting that may not be as it is."""
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
            if not math.isfinite(value) or value < 0 or (value == 0 and key.endswith("_s") and key not in NEVER):
                raise ConfigError("setting must be positive and finite", key=f"{section}.{key}", value=value)
            if key.endswith("port") and value > 65535:
                raise ConfigError("setting must be a port, 0 to 65535", key=f"{section}.{key}", value=value)
    for key, url in (("redis.control_url", config.redis.control_url), ("redis.cache_url", config.redis.cache_url)):
        if not _is_redis(url) and (url or key == "redis.control_url"):
            raise ConfigError("setting must be an address as redis://host:port/0", key=key)
        if HIDDEN in url:
            raise ConfigError(NO_SECRET, next_step="put it in, or name its file in redis.password_file", key=key)
    if config.router.gate_token == HIDDEN:
        next_step = "put it in, or name its file in router.gate_token_file"
        raise ConfigError(NO_SECRET, next_step=next_step, key="router.gate_token")
    tls = [name for name in ("ca_file", "cert_file", "key_file") if getattr(config.redis, name)]
    for url in (config.redis.control_url, config.redis.cache_url):
        if tls and url and urlsplit(url).scheme != "rediss":
            raise ConfigError("setting is for rediss:// addresses, and one is none", key=f"redis.{tls[0]}")
    if config.telemetry.traces_url and not config.telemetry.traces_url.startswith(("http://", "https://")):
        raise ConfigError("setting must be an address as http://host:4318/v1/traces", key="telemetry.traces_url")
    if not Path(config.agent.stage_path).is_absolute() or not Path(config.store.path).is_absolute():
        raise ConfigError(
            "store.path and agent.stage_path must be absolute: vLLM would look a relative one up on a hub"
        )
    if config.engine.model and not Path(config.engine.model).is_absolute():
        raise ConfigError("setting must be an absolute path", key="engine.model", value=config.engine.model)
    if not config.engine.peers and not is_loopback(config.engine.host):
        raise ConfigError(
            "engines would answer the whole network",
            next_step="name the hosts of routers in engine.peers",
            key="engine.host",
            value=config.engine.host,
        )
    for peer in config.engine.peers:
        try:
            ip_network(peer.replace("%", " "))  # a zone is a specifier, in a unit
        except ValueError as error:
            raise ConfigError(f"setting is no address or network: {error}", key="engine.peers") from error
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
    if config.jobs.ledger_kept_s < LEDGER_KEPT_MIN_S:
        raise ConfigError(
            f"setting must be at least {LEDGER_KEPT_MIN_S}: routers take what is trimmed before they look for lost",
            key="jobs.ledger_kept_s",
            value=config.jobs.ledger_kept_s,
        )
    _check_jobs(config)
    if config.group.blocks_per_request > BLOCKS:
        raise ConfigError(
            f"setting must be at most {BLOCKS}: the cache server serves nobody else while it looks them up",
            key="group.blocks_per_request",
            value=config.group.blocks_per_request,
        )
    if not 1 <= config.router.workers <= WORKERS:
        raise ConfigError(f"setting must be 1 to {WORKERS}", key="router.workers", value=config.router.workers)


def _check_jobs(config: Config) -> None:
    gate, jobs = config.coordinator, config.jobs
    if gate.gate_function and not re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", gate.gate_function):
        raise ConfigError("setting must be module:function", key="coordinator.gate_function", value=gate.gate_function)
    for key in ("verify_cron", "retention_cron", "tidy_cron"):
        value = getattr(jobs, key)
        if value and not re.fullmatch(r"\S+( +\S+){4}", value):
            raise ConfigError('setting must be five fields, as "30 3 * * *"', key=f"jobs.{key}", value=value)
    if jobs.export_path and not Path(jobs.export_path).is_absolute():
        raise ConfigError("setting must be an absolute path", key="jobs.export_path", value=jobs.export_path)
    if jobs.hub_namespace and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", jobs.hub_namespace):
        raise ConfigError("setting must be a user or organization", key="jobs.hub_namespace", value=jobs.hub_namespace)
    if not jobs.hub_url.startswith(("http://", "https://")):
        raise ConfigError("setting must be an address as https://host", key="jobs.hub_url", value=jobs.hub_url)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_redis(url: str) -> bool:
    """The value is not shown: it may hold a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in REDIS_SCHEMES and "://" in url and is_host(parts.hostname or "localhost")


def is_host(text: str) -> bool:
    """A name or an address, which may have a zone."""
    name, _, zone = text.partition("%")
    if zone:
        return bool(_ZONE.fullmatch(zone)) and ":" in name and is_host(name)
    try:
        return bool(ip_address(text))
    except ValueError:
        return bool(_HOST.fullmatch(text))
