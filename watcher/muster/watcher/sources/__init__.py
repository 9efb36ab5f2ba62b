"""The sources of notices: one module for each scheduler or cloud."""
