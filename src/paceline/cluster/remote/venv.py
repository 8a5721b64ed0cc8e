"""Creates a virtual environment from a requirements file, once. Arguments: both paths."""

import os
import shutil
import subprocess
import sys


def main() -> None:
    folder, requirements = (os.path.expanduser(path) for path in sys.argv[1:3])
    mark = os.path.join(folder, "complete")
    if os.path.exists(mark):
        print("the environment already exists", flush=True)
        return
    shutil.rmtree(folder, ignore_errors=True)
    python = os.path.join(folder, "bin", "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    for command in ([sys.executable, "-m", "venv", folder], [*pip, "-r", requirements]):
        print("+", " ".join(command), flush=True)
        status = subprocess.call(command)
        if status:
            sys.exit(status)
    with open(mark, "w"):
        pass


if __name__ == "__main__":
    main()
