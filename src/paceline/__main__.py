"""`python -m paceline`: the same as the `paceline` program."""

from paceline.cli.main import main

if __name__ == "__main__":
    main()
