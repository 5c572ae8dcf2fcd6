"""Endings of files that hold something other than text, whatever their first bytes look like."""

from __future__ import annotations

IMAGE_ENDINGS = frozenset(
    (
        *(".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".avif", ".heic", ".ico"),
        *(".psd", ".xcf", ".cr2", ".nef", ".dng", ".jp2", ".jxl"),
    )
)
ARCHIVE_ENDINGS = frozenset(
    (
        *(".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".lz4", ".lzma", ".7z", ".rar", ".cab", ".iso", ".dmg"),
        *(".jar", ".war", ".whl", ".egg", ".deb", ".rpm", ".apk", ".msi", ".pkg", ".snap", ".crx", ".xpi"),
    )
)
FOREIGN_ENDINGS = (
    IMAGE_ENDINGS
    | ARCHIVE_ENDINGS
    | frozenset(
        (
            *(".ps", ".eps", ".djvu", ".xps", ".mobi", ".azw", ".azw3", ".chm"),
            *(".doc", ".pages", ".wpd", ".hwp", ".hwpx"),
            *(".xls", ".xlsb", ".ods", ".numbers", ".ppt", ".odp", ".vsd"),
            *(".msg", ".pst", ".ost"),
            *(".mp3", ".wav", ".flac", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".wma", ".mid", ".midi", ".aiff"),
            *(".mp4", ".m4v", ".mkv", ".webm", ".avi", ".mov", ".wmv", ".flv", ".mpg", ".mpeg", ".3gp"),
            *(".exe", ".dll", ".so", ".dylib", ".class", ".pyc", ".pyo", ".wasm"),
            *(".ttf", ".otf", ".woff", ".woff2", ".eot"),
            *(".db", ".sqlite", ".sqlite3", ".mdb", ".accdb", ".parquet", ".feather", ".arrow", ".orc", ".avro", ".h5"),
            *(".npy", ".npz", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".safetensors", ".gguf", ".onnx"),
        )
    )
)
