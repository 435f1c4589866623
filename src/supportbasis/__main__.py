"""``python -m supportbasis`` is the command ``supportbasis``."""

from .cli import main

if __name__ == "__main__":
    main()
