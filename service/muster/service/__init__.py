"""The coordinator of Muster: decides barriers, stores the decisions, and tells every rank the same."""
