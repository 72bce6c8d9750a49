"""Six seeded bugs, found with this and other debuggers: commands, and seconds to the guilty rank and line."""
