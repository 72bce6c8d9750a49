"""What prepared ranks cost until somebody joins, and how long joining takes (docs/join.md)."""
