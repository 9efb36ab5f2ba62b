"""Where the durable state lives: one protocol, and an engine for each place.

An engine keeps bytes under keys and knows nothing of barriers; :mod:`muster.service.storage.codec`
turns the core's records into keys and values.
"""
