"""The debugger in a notebook: the front end's, the prompt in a cell, and the notices of stopped and hanging ranks."""
