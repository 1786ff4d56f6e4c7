"""A trainer that only publishes: `python -m adaptersync_tools.demo.publishing --run NAME`.

Random adapters, one after another, each when what became of the one before is known, or has been waited for long
enough: until it is killed, or so many times, evenly. With `--submit` the publisher's own thread publishes them.
"""

from __future__ import annotations

import argparse
import itertools
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
    parser = argparse.ArgumentParser(prog="python -m adaptersync_tools.demo.publishing", description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--versions", type=int, default=0, help="how many; 0: until it is killed")
    parser.add_argument("--every", type=float, default=0.0, help="seconds from one to the next, if that is longer")
    parser.add_argument("--submit", action="store_true", help="hand each over, and do not even wait for the store")
    options = parser.parse_args(arguments)
    config = load_config()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with tempfile.TemporaryDirectory() as scratch, AdapterPublisher(config, run=options.run) as publisher:
            began = time.monotonic()
            for number in range(1, options.versions + 1) if options.versions else itertools.count(1):
                place = Path(scratch, str(number) if options.submit else "")  # what is submitted is read later
                source = write_adapter(place, base=config.group.base_model, seed=time.time_ns())
                given = publisher.submit(source, remove=True) if options.submit else publisher.publish(source)
                try:
                    given.wait(OUTCOME_S)
                except PublicationFailed as error:
                    print(error, file=sys.stderr)
                time.sleep(max(REST_S, began + number * options.every - time.monotonic()))
    except AdapterSyncError as error:
        print(f"training failed: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
