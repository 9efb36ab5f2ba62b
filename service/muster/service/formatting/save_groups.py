"""The barrier groups that saves use; docs/saves.md describes them."""

SAVE_GROUPS = {
    "save": "save: writes",
    "save/commit": "save: commit",
    "save/plan": "save: plan",
    "save/agreement": "save: agreement",
    "save/sync": "save: at once",
}
"""The label of each group for people, by its prefix."""
