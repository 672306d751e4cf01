"""The end of a process that used Gluon, of which libtriton would otherwise print dozens of lines."""

from __future__ import annotations


def end_quietly() -> None:
    """Let Python, when it ends, free what Gluon's layouts lead to.

    libtriton asks Gluon for its classes of layouts and never gives them back (Triton 3.9). At the end Python empties
    the modules that something still holds. But the module of one class is gone by then, and only its names live on in
    the class's functions, with types of libtriton that it reports as leaked. So the class holds its module.
    """
    from triton.experimental.gluon.language.nvidia import blackwell

    if (layout := getattr(blackwell, "TensorMemoryLayout", None)) is not None:
        layout.held_module = blackwell
