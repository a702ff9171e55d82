"""``python -m kvcatch.cli`` is the same as ``kvcatch``."""

from kvcatch.cli import main

if __name__ == "__main__":
    main()
