"""Waiting policies on the job engine: who waits for machines that are paid for, and who gets one on demand (002)."""
