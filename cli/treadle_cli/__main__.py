"""`treadle`, and `python -m treadle_cli`."""

from treadle_cli.app import app


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="treadle")


if __name__ == "__main__":
    main()
