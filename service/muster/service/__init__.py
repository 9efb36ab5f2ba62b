"""The coordinator of Muster: decides barriers, keeps the decisions, and tells every rank the same."""
