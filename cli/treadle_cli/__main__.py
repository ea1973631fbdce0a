"""Run the command line: `treadle`, and `python -m treadle_cli`."""

from treadle_cli.app import app


def main() -> None:
    """Run the command line; the console script calls this."""
    app(prog_name="treadle")


if __name__ == "__main__":
    main()
