"""Real processes for tests, benchmarks, examples and development: servers, jobs and networks.

The product imports nothing from here.
"""
