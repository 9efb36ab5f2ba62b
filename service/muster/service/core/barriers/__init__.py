"""The barriers of a run: groups, sequences and the decision of each barrier."""
