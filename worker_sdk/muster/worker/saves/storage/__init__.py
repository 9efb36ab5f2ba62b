"""Where checkpoints are stored, and how they are written, digested and read."""
