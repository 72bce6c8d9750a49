"""What tools ask of the tensor engine: costs by line, memory, layouts, what runs, and where the first NaN was made.

`running` and `engines` import no torch, so a debugger may ask them in any process.
"""
