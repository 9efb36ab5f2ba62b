"""Checkpoints on the nodes' own disks, which keepers replicate, and from which a job resumes."""
