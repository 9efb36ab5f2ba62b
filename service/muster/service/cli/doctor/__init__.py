"""``muster doctor``: checks that find out why a job cannot use a coordinator."""
