"""Serialisation of values for a worker, with large buffers kept out of the pickle."""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

Parcel = tuple[bytes, list[npt.NDArray[np.uint8]]]
"""Pickled values, and their memoryviews' buffers as arrays: Ray gives those to a machine's processes uncopied."""


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {memoryview: lambda view: (memoryview, (pickle.PickleBuffer(view),))}


def packed(value: Any) -> Parcel:
    """Pack a value; memoryviews in it are left where they are."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _Pickler(pickled, 5, buffer_callback=buffers.append).dump(value)
    return pickled.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def opened(parcel: Parcel) -> Any:
    """The value again; its memoryviews are the parcel's, and may not be written to."""
    pickled, buffers = parcel
    return pickle.loads(pickled, buffers=buffers)
