"""The groups of a job's saves, as docs/saves.md names them."""

SAVES = {
    "save": "save: writes",
    "save/commit": "save: commit",
    "save/plan": "save: plan",
    "save/agreement": "save: agreement",
    "save/sync": "save: at once",
}
"""What each of them is for people, by prefix."""
