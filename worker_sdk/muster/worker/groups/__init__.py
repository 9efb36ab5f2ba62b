"""A group as one of its processes sees it: arrivals, and what a rank reports with one."""
