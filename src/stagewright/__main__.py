"""`python -m stagewright` is `stagewright`."""

from stagewright.cli import main

if __name__ == "__main__":
    main()
