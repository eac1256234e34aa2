"""What managers and operators ask of the host agent: each an operation, idempotent by request id."""
