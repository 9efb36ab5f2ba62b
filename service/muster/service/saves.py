"""The barrier groups of saves, as docs/saves.md names them."""

SAVES = {
    "save": "save: writes",
    "save/commit": "save: commit",
    "save/plan": "save: plan",
    "save/agreement": "save: agreement",
    "save/sync": "save: at once",
}
"""The description of each group for people, by prefix."""
