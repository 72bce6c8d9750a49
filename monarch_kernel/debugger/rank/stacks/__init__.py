"""Read the stacks of this process: its threads and its asyncio tasks."""
