"""The services of adaptersync: trainer, agent, coordinator, router and jobs.

Each service knows `adaptersync_core` and nothing of the other services.
"""

__version__ = "0.1.0"
