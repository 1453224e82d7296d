"""`python -m fixed_shape_kernels`: the command `fsk` where it is not installed, as in a clone."""

from fixed_shape_kernels.cli import main

if __name__ == "__main__":
    main()
