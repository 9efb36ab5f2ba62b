"""Where people train: each module lets one framework's own saves be committed by all ranks, or by none.

A module imports its framework, and nothing else of the SDK imports these.
"""
