"""Election: which replica leads, and for how long that is certain. Knows nothing of barriers."""
