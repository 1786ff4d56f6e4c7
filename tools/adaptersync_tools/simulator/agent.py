"""An agent on a host whose mount of the store is simulated: `python -m adaptersync_tools.simulator.agent`.

Everything but the mount is the agent of production.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from adaptersync.agent.app import run_agent
from adaptersync_core.config import load_config
from adaptersync_tools.simulator.store import Mount


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m adaptersync_tools.simulator.agent", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--mount", required=True, help="JSON, as the simulator takes it")
    options = parser.parse_args(arguments)
    mount = msgspec.json.decode(options.mount, type=Mount)
    config = load_config(options.config, overrides={"agent.name": options.name, "agent.engine_url": options.engine_url})
    run_agent(config, mount.view())
    return 0


if __name__ == "__main__":
    sys.exit(main())
