"""Every error a user can meet. Each says what is wrong, the value, what is legal and what to do."""

import sys
from collections.abc import Callable
from functools import wraps


class HiSpecError(Exception):
    """Base of all errors that hispec raises on purpose."""


class ConfigError(HiSpecError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class UnsupportedModelError(HiSpecError, TypeError):
    """The trunk cannot be run span by span."""


class CheckpointError(HiSpecError, ValueError):
    """A heads folder is incomplete, damaged or of an unknown format."""


class BaseMismatchError(CheckpointError):
    """The heads were trained on another trunk."""


class DataError(HiSpecError, ValueError):
    """Training or prompt data cannot be used."""


class RequestError(HiSpecError, ValueError):
    """A generation request cannot be served as asked."""


class CapacityError(HiSpecError, MemoryError):
    """The KV pool or the memory does not hold what was asked."""


class FileError(HiSpecError, OSError):
    """A file or folder cannot be read or written."""


class DivergedError(HiSpecError, ArithmeticError):
    """Training or decoding produced numbers that are not finite."""


def first_line(error: BaseException) -> str:
    """What a library's error says first: a message of ours quotes no more than that."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def command(main: Callable[[list[str]], None]) -> Callable[[], None]:
    """Turn `main(argv)` into a console entry point: a HiSpecError is one line on stderr and exit code 2, Ctrl-C 130."""

    @wraps(main)
    def entry() -> None:
        try:
            main(sys.argv[1:])
        except HiSpecError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except BrokenPipeError:
            # The reader of our output has left (`hispec-decode ... | head`): nobody to tell.
            sys.stderr.close()
            sys.exit(141)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return entry
