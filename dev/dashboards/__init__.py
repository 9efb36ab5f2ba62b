"""Muster's Grafana dashboards: ``python -m dev.dashboards`` makes the chart's files."""
