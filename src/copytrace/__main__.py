"""``python -m copytrace`` is the ``copytrace`` command."""

from copytrace.cli import main

if __name__ == "__main__":
    main()
