"""`fsk from-module problem.py`: from a PyTorch file in the KernelBench convention to a spec.

    command.py   the command; runs worker.py in a child process, writes the spec, generates
    worker.py    imports the file, constructs and traces Model, turns what it found into a spec and checks that spec
    graph.py     the traced forward -> chain entries, with calls.py's table of PyTorch spellings
    creation.py  the constructor: where arguments go, in which order parameters are created, how they are filled
    text.py      chain entries and arguments -> the spec's YAML
    equality.py  are the spec's own Model and the original the same layer?

Only the child process imports torch and the file.
"""
