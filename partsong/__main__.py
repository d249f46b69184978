"""``python -m partsong``: the command line, also what ``torchrun -m partsong`` starts on every rank."""

from partsong.cli import main

if __name__ == "__main__":
    main()
