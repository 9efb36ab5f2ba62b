"""Which replica leads, and for how long it certainly does. Knows nothing of barriers."""
