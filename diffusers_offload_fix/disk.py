"""Files that hold weights, and that nobody else can meet.

A file never has a name: it is created nameless (`O_TMPFILE`), or loses its name before its first byte is written, inside a folder of
mode 0700 that is gone again at once. So nobody can open another component's or an older run's weights, nobody can delete, truncate or
alter them by name between two forwards, a write that is interrupted leaves nothing behind, and the space comes back when the model
goes or the process ends, whatever ended it (SIGKILL too). A temporary name that is renamed when the file is whole would give less: a
name that a cleaner of old files, another run or a symbolic link can meet.

What keeps the bytes is the open descriptor, and every mapping of the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy

from . import pages

#: One thread alone does not reach the rate of the page cache. Smaller parts are not worth a thread.
THREADS = max(2, min(8, (os.cpu_count() or 2) // 2))
PART = 4 * 2**20
#: Bytes that are written by one call.
PIECE = 32 * 2**20
#: Where a mapping may begin.
PAGE = mmap.ALLOCATIONGRANULARITY

Result = TypeVar("Result")

_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)


class DiskError(OSError):
    """Weights could not be written to a folder, or not be read back. The message names the folder and says what to do."""


def failure(folder: str, what: str, error: BaseException, needed: int = 0) -> DiskError:
    """The error for a folder: what was tried, why it failed, how many bytes it needs, and the way out."""
    number = getattr(error, "errno", None) or errno.EIO
    text = f"offload_to_disk_path={folder!r}: {what}: {getattr(error, 'strerror', None) or error}"
    if needed:
        text += f" ({needed} bytes are needed, {_free(folder)} are free there)"
    if number in _FULL:
        return _error(number, f"{text}. Free some space, lift the limit, or choose a folder on another drive.")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return _error(number, f"{text}. Choose a folder that this process may write to.")
    return _error(number, f"{text}. Choose another folder, or leave offload_to_disk_path out.")


def _error(number: int, text: str) -> DiskError:
    # With two arguments OSError would print "[Errno …]" first; the number is there for whoever asks.
    error = DiskError(text)
    error.errno = number
    return error


def _free(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def prepare(folder: str) -> None:
    """Makes the folder if it is missing, and sees whether files can be made in it.

    Raises:
        DiskError: it cannot be made or written to, or somebody else decides where it leads.
    """
    _check_links(folder)
    try:
        os.makedirs(folder, exist_ok=True)
        os.close(_nameless(folder))
    except OSError as error:
        raise failure(folder, "no file can be made there", error) from error


def _check_links(folder: str) -> None:
    """Refuses a path through a symbolic link of another user, who could point it elsewhere at any time."""
    user = user_id()
    path = os.path.abspath(folder)
    while user is not None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.lstat(path)
            if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, user):
                raise _error(
                    errno.EPERM,
                    f"offload_to_disk_path={folder!r}: {path} is a symbolic link of another user (id {found.st_uid}), who decides "
                    "where it leads. Choose a folder whose path is your own.",
                )
        if path == os.path.dirname(path):
            return
        path = os.path.dirname(path)


def user_id() -> int | None:
    """The user that this process acts for, where there are users."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def _nameless(folder: str) -> int:
    private = tempfile.mkdtemp(prefix="diffusers-offload-", dir=folder)
    try:
        with tempfile.TemporaryFile(dir=private, buffering=0) as file:
            return os.dup(file.fileno())
    finally:
        # A network file system may keep a name of its own in it while the file is open.
        with contextlib.suppress(OSError):
            os.rmdir(private)


class File:
    """A file without a name.

    Attributes:
        folder: where the user wants it.
        fd: its descriptor, or None if descriptors are scarce: then its bytes are read through their mappings only.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        _check_links(folder)
        try:
            os.makedirs(folder, exist_ok=True)
            self.fd: int | None = _nameless(folder)
        except OSError as error:
            raise failure(folder, "no file can be made there", error) from error
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._close = weakref.finalize(self, _close, self.fd)
        self._close.atexit = False

    def reserve(self, offset: int, nbytes: int) -> None:
        """Makes sure that the disk has room for these bytes, and that the file is long enough for them."""
        assert self.fd is not None
        if not nbytes:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, offset, nbytes)
                return
        except OSError as error:
            # Some file systems cannot promise space; writing tells then.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise failure(self.folder, "there is no room for the weights", error, nbytes) from error
        self.resize(max(offset + nbytes, os.fstat(self.fd).st_size))

    def resize(self, nbytes: int) -> None:
        """Makes the file `nbytes` bytes long."""
        assert self.fd is not None
        try:
            os.ftruncate(self.fd, nbytes)
        except OSError as error:
            raise failure(self.folder, "there is no room for the weights", error, nbytes) from error

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of `data` (bytes) at `offset`."""
        assert self.fd is not None
        try:
            while len(data):
                done = os.pwrite(self.fd, data[:PIECE], offset)
                data, offset = data[done:], offset + done
        except OSError as error:
            raise failure(self.folder, "the weights could not be written", error) from error

    def flush(self) -> None:
        """Waits until everything is on the disk: what cannot be written is an error now, and not lost later."""
        assert self.fd is not None
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise failure(self.folder, "the weights could not be written", error) from error

    def spare(self) -> None:
        """Gives the descriptor back if there are few left; the mappings keep the bytes."""
        _files.add(self)
        if sum(file.fd is not None for file in _files) > _descriptors():
            self._close()
            self.fd = None

    def read(self, offset: int, target: memoryview) -> None:
        """Fills `target` (bytes) from `offset` on.

        Raises:
            DiskError: the disk does not give the bytes back.
        """
        assert self.fd is not None
        try:
            while len(target):
                done = os.preadv(self.fd, [target], offset)
                if not done:
                    raise OSError(errno.EIO, f"the file ends at byte {offset}, {len(target)} bytes too early")
                target, offset = target[done:], offset + done
        except OSError as error:
            raise failure(self.folder, "the weights could not be read back", error) from error

    def forget(self) -> None:
        """Takes what is on the disk out of the page cache, as far as nobody uses it."""
        if self.fd is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def map(self, offset: int, nbytes: int) -> numpy.ndarray[Any, Any]:
        """The bytes as private memory: what is read comes from the file, what is written stays with this process."""
        assert self.fd is not None
        try:
            return _mapping(self.fd, offset, nbytes)
        except (OSError, ValueError) as error:
            raise failure(self.folder, "the weights could not be mapped", error) from error


_files: weakref.WeakSet[File] = weakref.WeakSet()


def files() -> list[File]:
    """The files whose bytes are in use now."""
    return list(_files)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
    if not _files:
        _shut()


def _descriptors() -> int:
    """How many files may stay open: an eighth of what the process may have open at all."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        return 64
    return 1024 if limit < 0 or limit > 8192 else limit // 8


def parts(start: int, end: int) -> list[tuple[int, int]]:
    """A range, cut into pieces that are worth a thread each; cuts are at multiples of a page from its start."""
    step = max(PART, -(-(end - start) // (THREADS * PAGE)) * PAGE)
    return [(at, min(at + step, end)) for at in range(start, end, step)]


def spread(work: Callable[[int, int], Result], pieces: list[tuple[int, int]]) -> list[Result]:
    """What `work(start, end)` returns for each piece, in order; several run at a time."""
    jobs = [_submit(work, *piece) for piece in pieces[1:]]
    try:
        return [work(*pieces[0]), *(work(*piece) if job is None else job.result() for piece, job in zip(pieces[1:], jobs))]
    finally:
        # After an error, nothing goes on filling a buffer that somebody else is given next.
        wait([job for job in jobs if job is not None])


_pool: tuple[int, ThreadPoolExecutor] | None = None
_pool_lock = threading.RLock()


def _submit(work: Callable[[int, int], Any], *arguments: int) -> Any:
    """The future of some work on a reading thread, or None if there is none to be had."""
    global _pool
    with _pool_lock:
        # Threads do not survive a fork.
        if _pool is None or _pool[0] != os.getpid():
            _pool = os.getpid(), ThreadPoolExecutor(THREADS, "offload-reading")
        try:
            return _pool[1].submit(work, *arguments)
        except RuntimeError:
            # The interpreter is on its way out, or no thread can be started.
            return None


def _shut() -> None:
    """Ends the reading threads: no thread outlives the models."""
    global _pool
    with _pool_lock:
        pool, _pool = _pool, None
    if pool is not None and pool[0] == os.getpid():
        pool[1].shutdown(wait=False)


def _mapping(fd: int, offset: int, nbytes: int) -> numpy.ndarray[Any, Any]:
    system = pages.system("mmap", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_int64])
    if system is None:
        return numpy.frombuffer(mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY, offset=offset), dtype=numpy.uint8)
    # Python's own mapping of a file keeps a descriptor of it; this one lies over memory that Python gives back when it is done.
    memory = mmap.mmap(-1, nbytes)
    block = numpy.frombuffer(memory, dtype=numpy.uint8)
    # Without a promise of memory for every page: nearly none of them is ever written.
    flags = mmap.MAP_PRIVATE | _FIXED | _NORESERVE
    if system(block.ctypes.data, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset) != block.ctypes.data:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return block


_FIXED = 0x10
_NORESERVE = 0x4000
