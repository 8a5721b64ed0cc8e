"""Entry of every worker and server process."""

from paceline.worker.main import main

if __name__ == "__main__":
    main()
