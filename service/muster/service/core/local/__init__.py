"""Local checkpoints: where their parts are, how safe they are, and which one a job resumes from."""
