"""The debugger in a notebook: the front end's, the prompt in a cell, and notices of ranks that are stopped or hang."""
