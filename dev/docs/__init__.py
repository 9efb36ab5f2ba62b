"""What ``make docs`` adds to MkDocs, and what the tests check of the same pages without it."""
