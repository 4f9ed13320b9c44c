"""`python -m hatch_aoti` is the command `hatch-aoti`."""

from hatch_aoti.cli import main

if __name__ == "__main__":
    main()
