"""`python -m longrnn.cli`, which `longrnn launch` starts in each process."""

from longrnn.cli import main

if __name__ == "__main__":
    main()
