"""Promote or roll back, all or nothing.

`protocol` decides: a pure function of everything read from Redis. `app` reads, decides and writes, while it leads.
"""
