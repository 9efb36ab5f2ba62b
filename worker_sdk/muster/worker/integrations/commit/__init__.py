"""The commit protocol that the frameworks' adapters share."""
