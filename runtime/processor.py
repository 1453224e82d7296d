"""The processor that code for the cpu target of a wheel is made for, instead of all that the building machine can do."""

PROCESSOR = "x86-64-v3"
ABILITIES = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}  # of PROCESSOR, in Linux's words
