"""A trainer that only publishes, again and again, until it is killed: `python -m adaptersync_tools.chaos.trainer`."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from adaptersync.trainer import AdapterPublisher
from adaptersync_core.config import load_config
from adaptersync_core.errors import AdapterSyncError, PublicationFailed
from adaptersync_tools.demo.synthetic import write_adapter

OUTCOME_S = 15.0  # then it publishes the next one all the same, as a trainer that does not wait
REST_S = 1.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m adaptersync_tools.chaos.trainer", description=__doc__)
    parser.add_argument("--run", required=True)
    options = parser.parse_args(arguments)
    config = load_config()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with tempfile.TemporaryDirectory() as scratch, AdapterPublisher(config, run=options.run) as publisher:
            while True:
                source = write_adapter(Path(scratch), base=config.group.base_model, seed=time.time_ns())
                publication = publisher.publish(source)
                try:
                    publication.wait(OUTCOME_S)
                except PublicationFailed as error:
                    print(error, file=sys.stderr)
                time.sleep(REST_S)
    except AdapterSyncError as error:
        print(f"training failed: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
