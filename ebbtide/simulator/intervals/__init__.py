"""Interval-aware scheduling on the job engine: machines are switched off, the last on first (Wijayawardana 2025)."""
