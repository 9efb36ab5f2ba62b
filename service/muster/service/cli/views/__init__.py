"""Commands that show something, and the tables that they print."""
