"""The commands of `ebb`, by what they are about."""
