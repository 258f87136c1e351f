"""Random small programs, trained by a Trainer and by plain Keras.

`case_of(seed, backend)` draws a program, whole and as a user would write it;
`run` runs it, and tells what differs.
"""
