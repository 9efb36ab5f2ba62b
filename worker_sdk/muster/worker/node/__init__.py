"""What torchrun's agent holds for its node: its membership in the rendezvous, and its relay."""
