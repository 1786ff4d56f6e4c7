"""Search the model's worlds as far as told, and say how far it went: `tools/model [world ...] [--depth N]`."""

from __future__ import annotations

import argparse
import sys

from model.search import search
from model.state import Broken
from model.worlds import WORLDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/model", description=__doc__)
    parser.add_argument("worlds", nargs="*", metavar="world", help=f"one of: {', '.join(WORLDS)}; all by default")
    parser.add_argument("--depth", type=int, default=0, help="steps; each world has a bound of its own")
    asked = parser.parse_args()
    broken = 0
    for name in asked.worlds or WORLDS:
        world = WORLDS[name]
        depth = asked.depth or world.deep
        print(f"{name}: {world.about}; at most {depth} steps", flush=True)
        try:
            found = search(world.make(), depth=depth, progress=_progress)
        except Broken as error:
            broken += 1
            print(f"\r  BROKEN: {error}")
            continue
        whole = "all there is" if found.complete else "up to the bound"
        print(
            f"\r  {found.states} states, {found.steps} steps between them, {found.rests} on the way to rest,"
            f" depth {found.depth} ({whole}), {found.seconds:.1f} s"
        )
    print("promises: see check, check_routers and the other places that raise Broken in tests/model/machine.py")
    return 1 if broken else 0


def _progress(depth: int, states: int, seconds: float) -> None:
    print(f"\r  depth {depth}, {states} states, {seconds:.0f} s ", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
