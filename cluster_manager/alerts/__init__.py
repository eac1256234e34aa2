"""Alerts to people: chosen events of the log, sent to webhooks of the operator's while this manager leads."""
