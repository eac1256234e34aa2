"""Dashboards for Grafana."""
