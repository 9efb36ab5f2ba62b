"""What this process is doing, for people: its threads, what it uses, and the saves under way."""
