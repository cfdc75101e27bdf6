"""`python -m loraserve.cli`."""

from loraserve.cli import main

if __name__ == "__main__":
    main()
