import os

class Reader:
    native: int
    python_version: int
    main_thread: int
    skipped: int
    codes: dict[int, tuple[str, str, int, bytes]]
    images: list[list[tuple[str, int, list[tuple[int, int]]]]]

    def __new__(cls, path: str | os.PathLike[str], /) -> Reader: ...
    def take(self, count: int, smallest: int, /) -> bytes: ...
    def stack(self, number: int, /) -> tuple[list[tuple[int, int, bool]], list[int], int, int]: ...
