"""Costs of prepared ranks before a join, and the duration of a join (docs/join.md)."""
