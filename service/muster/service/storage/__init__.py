"""The durable state: one protocol, and an engine for each kind of storage.

An engine stores bytes under keys and knows nothing of barriers. :mod:`muster.service.storage.codec`
converts the core's records to keys and values.
"""
