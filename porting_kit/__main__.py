"""`python -m porting_kit`: the command line, for torchrun and where the console script is not on the path."""

from porting_kit.cli import main

if __name__ == "__main__":
    main()
