"""What the services share: identity, manifests, events, keys, scripts, stores and clients.

Imports no service, and none of torch, trl, peft or vllm.
"""
