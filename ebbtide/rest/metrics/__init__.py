"""Metrics of the daemons, as Prometheus reads them: declared, counted, written."""
