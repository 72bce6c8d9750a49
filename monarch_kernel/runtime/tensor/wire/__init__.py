"""What crosses between the controller and the ranks of the tensor engine.

Operations cross as *records*, runs of 64-bit integers: ``[definition, inputs..., floats..., outputs...]``. Inputs and
outputs are ids of values on the ranks, floats are positions in the floats that come with the message. What a
definition means (`Definition`) crosses once, ahead of the first record that names it.
"""
