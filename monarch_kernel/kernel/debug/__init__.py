"""The debugger in a notebook: the front end's debugger, the prompt in a cell, and notices about ranks."""
