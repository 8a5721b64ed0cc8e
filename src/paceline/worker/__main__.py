"""Entry point of worker and server processes."""

from paceline.worker.main import main

if __name__ == "__main__":
    main()
