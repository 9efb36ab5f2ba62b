"""How the ranks agree on which rank writes what."""
