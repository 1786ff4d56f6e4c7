"""HTTP headers of ours, which the router and those who speak to it have to agree on."""

from __future__ import annotations

REQUEST_ID = "x-adaptersync-request-id"
VERSION = "x-adaptersync-version"  # adapter id that wrote an answer, or the base model's name
REPLICA = "x-adaptersync-replica"
SESSION = "x-session-id"  # a client's name for one conversation; replicas are told, too
EXPLAIN = "x-adaptersync-explain"  # asks for the decision's reasons; the answer has them under the same name
SUBSTITUTED = "x-adaptersync-substituted"  # a name that the version asked for stands in for; a relay says so
VOIDED = "x-adaptersync-voided"  # the version was found bad while it wrote this answer
RANK = "x-data-parallel-rank"  # vLLM's: which of the engines behind its address answers; routers alone say so
GATE = "x-adaptersync-gate"  # credentials for versions that wait at the gate; the router keeps them to itself
