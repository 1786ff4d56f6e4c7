"""Commands that say who may do what: users of Redis, keys of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
from rich.text import Text

from adaptersync_core.access import RedisUser, parse
from adaptersync_core.api_keys import SCOPES
from adaptersync_core.config import Config
from adaptersync_core.errors import ConfigError, NameInvalid
from adaptersync_tools.cli.common import config_option, settings
from adaptersync_tools.output import console
from adaptersync_tools.secrets import Passwords, add_key, revoke_key, write_private

_file = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("instances", nargs=-1, metavar="[ROLE:NAME]...")
@config_option
@click.option("--out", type=_file, required=True, help="The file that Redis loads: aclfile in its configuration.")
@click.option(
    "--passwords", type=click.Path(file_okay=False, path_type=Path), required=True,
    help="Directory of a file for each user; those that are there are used, the others are made.",
)  # fmt: skip
@click.option("--server", type=click.Choice(["control", "cache"]), help="Only what is on this one.  [default: both]")
def acl(
    instances: tuple[str, ...],
    config_path: Path | None,
    out: Path,
    passwords: Path,
    server: Literal["control", "cache"] | None,
) -> None:
    """Write the users of Redis: one for each instance, with what it needs and no more.

    Roles are trainer (by its run), agent (by its replica), coordinator, router, worker, operator and reader; without
    any ROLE:NAME, one of each as the settings call it. The file has hashes of the passwords. Give all instances each
    time: who is not named is nobody any more.

    \b
    Example:
      adaptersync acl --out users.acl --passwords /etc/adaptersync/passwords \\
        agent:replica-0 agent:replica-1 router:router-0 coordinator:coordinator-0 \\
        trainer:my-run worker:worker-0 operator:ops reader:grafana
      # and in each service's settings: [redis] user = "default:agent:replica-0", password_file = "..."
    """
    config = settings(config_path)
    named = [parse(text) for text in instances] or _of_settings(config)
    known = Passwords(passwords, config.group.name)
    known.write_acl(out, named, server)
    for instance in sorted(named):
        console().print(f"{instance.user(config.group.name)}  {known.path(instance)}", soft_wrap=True)
    console().print(f"admin  {known.path()}", soft_wrap=True)
    console(stderr=True).print(Text("a server that runs takes it with ACL LOAD", "dim"))


def _of_settings(config: Config) -> list[RedisUser]:
    trainers = [RedisUser("trainer", config.trainer.run)] if config.trainer.run else []
    return [
        *trainers,
        RedisUser("agent", config.agent.name),
        RedisUser("coordinator", config.coordinator.name),
        RedisUser("router", config.router.name),
        RedisUser("worker", "worker-0"),
        RedisUser("operator", "operator-0"),
        RedisUser("reader", "reader-0"),
    ]


@click.command("api-key")
@click.argument("name")
@click.option("--file", "file", type=_file, required=True, help="The router's router.keys_file; it gets a hash.")
@click.option("--scope", "scopes", type=click.Choice(SCOPES), multiple=True, help="What the key may do; repeat it.")
@click.option("--out", type=_file, help="Where the key itself goes.  [default: it is printed]")
@click.option("--revoke", is_flag=True, help="Take the key of this name away instead.")
def api_key(name: str, file: Path, scopes: tuple[str, ...], out: Path | None, revoke: bool) -> None:
    """Make a key for the router, in place of the one of that name; routers know it within a second.

    rollout: generate, and list models. publish: calls that change engines, which a router refuses all the same. admin:
    all of it, and versions that wait at the gate.

    \b
    Example:
      adaptersync api-key my-run --scope rollout --file /etc/adaptersync/api-keys --out my-run.key
    """
    if revoke:
        if not revoke_key(file, name):
            raise NameInvalid("no key of that name", name=name, file=str(file))
        console().print(f"revoked {name}")
        return
    if not scopes:
        raise ConfigError("key may do nothing", next_step=f"give --scope, one of {' '.join(SCOPES)}")
    key = add_key(file, name, scopes)
    if out is None:
        click.echo(key)
    else:
        write_private(out, f"{key}\n")
        console().print(f"key of {name} is in {out}")


COMMANDS = (acl, api_key)
