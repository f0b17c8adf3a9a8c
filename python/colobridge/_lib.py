# SPDX-License-Identifier: Apache-2.0
"""Finds and loads libcolobridge.so, declares its functions, turns statuses into exceptions.

Where it looks, the first that is there: COLOBRIDGE_LIBRARY (a file, or a folder that has it); next to
this package; where `meson install` put it (_installed.py, written then); pkg-config; the loader's own
search. A library of another version is refused, because structs may differ. Nothing is loaded
before the first call that needs it, so importing never fails for want of a library.

Calls release the GIL (ctypes.CDLL), so ranks that are threads can wait for each other.
"""
import atexit
import ctypes as c
import importlib.resources
import os
import subprocess
import threading
from collections.abc import Generator
from typing import Any

from . import _structs as s
from .errors import STATUS, Error, FailedError, exception

SONAME = 'libcolobridge.so.0'


def _named(path: str) -> str | None:
    """The library's file in a folder, or the file itself."""
    if os.path.isdir(path):
        for name in (SONAME, 'libcolobridge.so'):
            if os.path.exists(os.path.join(path, name)):
                return os.path.join(path, name)
        return None
    return path if os.path.exists(path) else None


def _pkg_config() -> str | None:
    try:
        done = subprocess.run(['pkg-config', '--variable=libdir', 'colobridge'], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return None
    return _named(done.stdout.strip()) if done.returncode == 0 and done.stdout.strip() else None


def _installed() -> str | None:
    try:
        from ._installed import LIBDIR  # type: ignore[import-not-found]
    except ImportError:
        return None
    return _named(os.path.join(os.path.dirname(__file__), LIBDIR))  # pyright: ignore[reportUnknownArgumentType]


def find() -> str:
    """Path of the library, or its name when only the loader may know. FailedError: none where
    COLOBRIDGE_LIBRARY points."""
    said = os.environ.get('COLOBRIDGE_LIBRARY')
    if said:
        path = _named(said)
        if path is None:
            raise FailedError("COLOBRIDGE_LIBRARY is '%s', where there is no %s" % (said, SONAME))
        return path
    there = importlib.resources.files('colobridge') / SONAME  # an editable install has it elsewhere, and its loader knows where
    return str(there) if there.is_file() else _installed() or _pkg_config() or SONAME


def load(path: str) -> c.CDLL:
    """The library at @path with its functions declared. FailedError: not loadable, or of another
    version."""
    try:
        library = c.CDLL(path)
        number = library.colo_version_number
    except (OSError, AttributeError) as why:
        raise FailedError(
            "libcolobridge cannot be loaded (%s). Build and install it, or set COLOBRIDGE_LIBRARY to "
            "%s or its folder" % (why, SONAME)) from None
    number.restype, number.argtypes = c.c_uint32, []
    found = number()
    found = '%d.%d.%d' % (found >> 16, found >> 8 & 255, found & 255)
    if found != s.VERSION:
        raise FailedError("%s is version %s, this package is %s; install both from one source, or set "
                          "COLOBRIDGE_LIBRARY" % (path, found, s.VERSION))
    for name, (returns, arguments) in s.FUNCTIONS.items():
        try:
            fn = getattr(library, name)
        except AttributeError:
            raise FailedError("%s is version %s and has no %s; it is another build, install both from "
                              "one source" % (path, found, name)) from None
        fn.restype, fn.argtypes = returns, arguments
    return library


_library: c.CDLL | None = None
_lock = threading.Lock()


def lib() -> c.CDLL:
    """The library, loaded on first use."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = load(find())
    return _library


def error_message() -> str:
    """The last error message on this thread."""
    return lib().colo_last_error().decode('utf-8', 'replace')


_caught: list[BaseException] = []  # what handlers of signals raised in the main thread while it waited in the library
_asked = threading.local()


def _asking() -> Generator[bool, Any, None]:
    """Is the main thread to wait no longer? Python runs handlers of signals where this goes on, in the try; of a function
    it would run them at its first line, and what they raise would be lost in C."""
    ends = False
    while True:
        try:
            yield ends
            c.pythonapi.PyErr_CheckSignals()
            ends = False
        except GeneratorExit:
            return
        except BaseException as why:
            _caught.append(why)
            ends = True


def hear_signals() -> None:
    """From now on the main thread hears signals while it waits for other ranks; what their handlers raise ends the wait.
    Other threads run no handlers."""
    if hasattr(_asked, 'fn') or threading.current_thread() is not threading.main_thread():
        return
    asking = _asking()
    next(asking)
    _asked.fn = s.InterruptedFn(asking.send)
    lib().colo_interrupt_set(_asked.fn, None)
    atexit.register(lib().colo_interrupt_set, s.InterruptedFn(), None)


def check(status: int) -> int:
    """@status when it is >= 0, else its exception. Call it on the thread of the call."""
    if status < 0:
        if _caught and threading.current_thread() is threading.main_thread():
            why = _caught[0]
            _caught.clear()
            raise why
        raise exception(status, error_message())
    return status


def call(name: str, *arguments: Any) -> int:
    """Calls a function that returns a status. Raises: the exception of a status < 0."""
    return check(getattr(lib(), name)(*arguments))


def result(kind: Any, name: str, *arguments: Any) -> Any:
    """What a function writes to its last argument, which is of a C type."""
    out = kind()
    call(name, *arguments, c.byref(out))
    return out


def size_of(name: str, *arguments: Any) -> int:
    """The number of bytes that a size function of C writes."""
    return result(c.c_size_t, name, *arguments).value


def text(value: str) -> bytes:
    """A name or spec as C takes it."""
    if '\0' in value:
        raise ValueError("%r has a NUL byte" % value)
    return value.encode()


class Unique:
    """An object of the library that has no copy: a copy of what holds it holds the same one."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, _memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("%s: found one to pickle, expected none: it belongs to this process; make one in each process"
                        % type(self).__name__)


class Handle(Unique):
    """What is behind a pointer of the library, which destroy() makes NULL. _gone: what is said of it then."""
    _handle: c.c_void_p
    _gone: str

    @property
    def handle(self) -> c.c_void_p:
        """The pointer. RuntimeError after destroy()."""
        if not self._handle:
            raise FailedError(self._gone, STATUS['ERR_STATE'])
        return self._handle

    def destroy(self) -> None:
        """Local; the second time does nothing."""
        raise NotImplementedError

    def __del__(self) -> None:
        if getattr(self, '_handle', None):
            self.destroy()


def version() -> str:
    """Version of the loaded library."""
    return lib().colo_version().decode()


__all__ = ['Error', 'call', 'check', 'find', 'lib', 'load', 'error_message', 'result', 'size_of', 'text', 'version']
