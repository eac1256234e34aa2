"""Election of the leading manager, its lock and its epochs."""
