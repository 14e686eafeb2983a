"""``python -m kdgen``: the command line, where the ``kdgen`` script is not on PATH."""

from kdgen.cli import main

if __name__ == "__main__":
    main(prog_name="kdgen")
