"""Saves that all ranks of a run are asked for, and runs that were stopped after one."""
