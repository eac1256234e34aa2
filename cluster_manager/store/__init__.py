"""The manager's store on SQLite or PostgreSQL."""
