"""`python -m longrnn.cli`, which `accelerate launch -m longrnn.cli` starts in each process."""

from longrnn.cli import main

if __name__ == "__main__":
    main()
