"""The terms of the core: events, effects, decisions, refusals, limits and views."""
