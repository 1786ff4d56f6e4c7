"""A vLLM replica without a model: the same HTTP and KV-event surface, the same ways to fail.

`python -m adaptersync_tools.simulator --help` starts one. What it claims about vLLM is held against the real
server by `tests/conformance`.
"""
