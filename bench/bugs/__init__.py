"""Six seeded bugs, found with this debugger and others: commands typed, seconds to the guilty rank and line."""
