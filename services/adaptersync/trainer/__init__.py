"""The trainer's side: publish adapters, and learn what became of them.

`publisher` works with any trainer; `trl` makes TRL's one that publishes, of what `seams` finds in the TRL that is
installed; `relay` speaks vLLM's language to an unmodified TRL.
"""

from adaptersync.trainer.publication import Outcome, Publication
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync.trainer.submissions import Submission
from adaptersync_core.proof import Probe

__all__ = ["AdapterPublisher", "Outcome", "Probe", "Publication", "Submission"]
