"""The rendezvous of a run: its nodes, and the rounds that they form."""
