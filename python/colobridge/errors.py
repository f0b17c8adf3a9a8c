# SPDX-License-Identifier: Apache-2.0
"""Statuses of the C library as exceptions.

Each carries the library's error message as its text and the status as .status. Catch the built-in type
(ValueError, KeyError, RuntimeError, TimeoutError) or Error for all of them.
"""
OK = 0
PENDING = 1
# Values of colo_status_t; python/tests/test_abi.py compares them with the header.
STATUS = {
    'ERR_ARG': -1, 'ERR_SHAPE': -2, 'ERR_LAYOUT': -3, 'ERR_NOMEM': -4, 'ERR_TIMEOUT': -5,
    'ERR_PEER': -6, 'ERR_MISMATCH': -7, 'ERR_MODIFIED': -8, 'ERR_STATE': -9, 'ERR_UNBUILT': -10,
    'ERR_CONTRACT': -11, 'ERR_EXISTS': -12, 'ERR_MISSING': -13, 'ERR_IO': -14, 'ERR_ABORTED': -15,
    'ERR_CUDA': -16, 'ERR_NCCL': -17, 'ERR_MPI': -18,
}
NAMES = {value: name for name, value in STATUS.items()}


class Error(Exception):
    """What the library refused or could not do.

    Attributes:
        status: of STATUS; 0 when Python found it.
    """

    status = 0

    def __init__(self, text: str, status: int = 0):
        super().__init__(text)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self):
        return type(self), (self.args[0], self.status)


class ArgumentError(Error, ValueError):
    """An argument, a shape, a pair of layouts, or data that are not as declared."""


class NamingError(Error, KeyError):
    """A name that is taken, or that nothing has."""


class FailedError(Error, RuntimeError):
    """What cannot go on: another rank, a backend, a state, memory."""


class DeadlineError(Error, TimeoutError):
    """Another rank did not arrive before the deadline."""


class MismatchError(Error, RuntimeError):
    """Ranks disagree about what they are doing together; raised on all of them."""


_KINDS = {
    'ERR_ARG': ArgumentError, 'ERR_SHAPE': ArgumentError, 'ERR_LAYOUT': ArgumentError,
    'ERR_CONTRACT': ArgumentError, 'ERR_EXISTS': NamingError, 'ERR_MISSING': NamingError,
    'ERR_TIMEOUT': DeadlineError, 'ERR_MISMATCH': MismatchError,
}


def exception(status: int, message: str) -> Error:
    """The exception of a status.

    Args:
        status: below 0.
        message: its text.

    Returns:
        An exception of the kind of that status.
    """
    name = NAMES.get(status, 'status %d' % status)
    return _KINDS.get(name, FailedError)(message or name, status)
