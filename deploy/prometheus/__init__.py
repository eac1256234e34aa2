"""Configuration, recording rules and alerts for Prometheus."""
