"""The decisions, as pure state machines.

Nothing here knows of sockets, storage, clocks or logs. The way in is
:class:`muster.service.core.coordinator.Coordinator`: events and the time go in, effects come out.
"""
