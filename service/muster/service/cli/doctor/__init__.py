"""``muster doctor``: checks that show why a job cannot use a coordinator."""
