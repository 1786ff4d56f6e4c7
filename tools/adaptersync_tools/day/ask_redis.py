"""One command to a Redis server, on the host where this runs: `python -m adaptersync_tools.day.ask_redis URL WORD...`

Stands for `redis-cli`, which not every machine has. The reply is JSON on standard output.
"""

from __future__ import annotations

import sys

import click
import orjson

from adaptersync_core.redis import rq_connection, translated
from adaptersync_tools.cli.common import run_command


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("url")
@click.argument("words", nargs=-1, required=True)
def ask_redis(url: str, words: tuple[str, ...]) -> None:
    with translated(url), rq_connection(url) as connection:
        reply = connection.execute_command(*words)
    click.echo(orjson.dumps(reply, default=lambda raw: raw.decode()))


if __name__ == "__main__":
    sys.exit(run_command(ask_redis, None, "ask-redis"))
