"""The processes that write a save: forked children and spawned workers."""
