"""The sections of docs/research/interval-aware.md, by what they are about."""
