"""Which adapter a training checkpoint holds, and whether what was loaded from it is that one.

`adaptersync.json` beside the trainer's own files. It is compared by what changes answers: the tensors' bytes and the
settings that scale them; the whole digest also changes with the version of PEFT and the place of the base model.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from adaptersync.trainer.submissions import Submission
from adaptersync_core.errors import AdapterInvalid, ConfigError
from adaptersync_core.manifest import CONFIG_FILE, FILES, WEIGHTS_FILE, content_digest, hash_file

logger = logging.getLogger(__name__)

STATE_FILE = "adaptersync.json"
SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")  # of adapter_config.json
SETS = ("target_modules", "exclude_modules")  # PEFT writes them in another order in each process


class Checkpoint(Struct, frozen=True, kw_only=True):
    """`seq` is the version that has these very bytes, 0 while none has been published.

    `digest` is that of a version with these bytes, `weights` the SHA-256 of its tensors' file.
    """

    run: str
    epoch: int
    seq: int
    digest: str
    weights: str = ""
    scaling: dict[str, Any] = {}

    def write(self, directory: Path) -> None:
        """Whole or not at all: half of it would make a good checkpoint one that cannot be read."""
        directory.mkdir(parents=True, exist_ok=True)
        half = directory / f".{STATE_FILE}.half"
        with half.open("wb") as file:
            file.write(msgspec.json.encode(self))
            file.flush()
            os.fsync(file.fileno())
        half.replace(directory / STATE_FILE)

    def check(self, adapter: Path) -> None:
        """AdapterInvalid unless the adapter in this directory is the checkpoint's."""
        found = adapter_in(adapter)
        if self.weights and found.weights != self.weights:
            what = f"other tensors, {found.weights[:12]} and not {self.weights[:12]}"
        elif self.scaling and found.scaling != self.scaling:
            changed = [name for name in SCALING if found.scaling.get(name) != self.scaling.get(name)]
            what = ", ".join(
                f"{name} is {found.scaling.get(name)} and was {self.scaling.get(name)}" for name in changed
            )
        else:
            return
        raise AdapterInvalid(
            f"what was loaded is not the checkpoint's adapter: {what}",
            next_step=f"give the LoraConfig and files it was saved with, or remove {STATE_FILE} to go on with these",
            run=self.run,
            digest=self.digest[:12],
        )


class Numbers:
    """Puts the number into checkpoints that were written before their version had one; waits for nothing.

    A checkpoint is good without it, so where it cannot be written that is only logged.
    """

    def __init__(self) -> None:
        self._wanted: list[tuple[Path, Checkpoint, Submission]] = []  # as few as are on their way at a time

    def want(self, directory: Path, held: Checkpoint, submission: Submission) -> None:
        """`submission` is the adapter that the checkpoint in `directory` holds."""
        self._wanted.append((directory, held, submission))

    def look(self) -> None:
        wanted, self._wanted = self._wanted, []
        for directory, held, submission in wanted:
            published = submission.publication
            if published is None:
                if submission.outcome is None:
                    self._wanted.append((directory, held, submission))
            elif published.digest == held.digest and (directory / STATE_FILE).exists():  # TRL keeps some of them only
                try:
                    replace(held, seq=published.seq).write(directory)
                except OSError as error:
                    logger.warning("%s does not say that it holds version %d: %s", directory, published.seq, error)


def read(directory: Path) -> Checkpoint | None:
    """None for a checkpoint that another trainer wrote; ConfigError when it cannot be read."""
    path = directory / STATE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Checkpoint)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"checkpoint cannot be read: {error}", next_step="resume from another checkpoint", file=str(path)
        ) from error


def adapter_in(directory: Path, *, run: str = "", epoch: int = 0, seq: int = 0) -> Checkpoint:
    """What a checkpoint would say of the adapter saved here."""
    files = tuple(hash_file(directory / name) for name in FILES)
    weights = next(file.sha256 for file in files if file.name == WEIGHTS_FILE)
    settings = msgspec.json.decode((directory / CONFIG_FILE).read_bytes())
    scaling = {name: settings[name] for name in SCALING if name in settings}
    return Checkpoint(run=run, epoch=epoch, seq=seq, digest=content_digest(files), weights=weights, scaling=scaling)


def settle_order(directory: Path) -> None:
    """Sort what PEFT keeps as sets, so that the same adapter is the same bytes in every process."""
    path = directory / CONFIG_FILE
    settings = msgspec.json.decode(path.read_bytes())
    for name in SETS:
        if isinstance(settings.get(name), list):
            settings[name].sort()
    path.write_bytes(msgspec.json.format(msgspec.json.encode(settings, order="sorted"), indent=2))
