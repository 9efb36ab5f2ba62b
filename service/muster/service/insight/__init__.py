"""What processes are doing: asks them, and puts it in words. It informs people, and never a decision."""
