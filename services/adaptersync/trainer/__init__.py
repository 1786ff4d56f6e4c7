"""The trainer's side: publish adapters, and learn what became of them.

`publisher` works with any trainer; `trl` is the only module that touches TRL; `relay` speaks vLLM's language to an
unmodified TRL.
"""

from adaptersync.trainer.publisher import AdapterPublisher, Outcome, Publication
from adaptersync_core.proof import Probe

__all__ = ["AdapterPublisher", "Outcome", "Probe", "Publication"]
