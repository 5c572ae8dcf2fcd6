"""Source code and configuration, as it is."""

from __future__ import annotations

from kvtool.core.corpus.readers.document import Document
from kvtool.core.corpus.readers.encoding import of_text

ENDINGS = (
    *(".py", ".pyi", ".pyx", ".ipy", ".rb", ".pl", ".pm", ".php", ".lua", ".tcl", ".r", ".jl"),
    *(".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx", ".inl", ".cu", ".cuh", ".m", ".mm"),
    *(".java", ".kt", ".kts", ".scala", ".groovy", ".gradle", ".clj", ".cljs", ".edn"),
    *(".js", ".mjs", ".cjs", ".jsx", ".ts", ".mts", ".cts", ".tsx", ".vue", ".svelte", ".astro"),
    *(".go", ".rs", ".swift", ".zig", ".nim", ".d", ".dart", ".cs", ".fs", ".fsx", ".vb", ".pas"),
    *(".hs", ".lhs", ".ml", ".mli", ".elm", ".ex", ".exs", ".erl", ".hrl", ".lisp", ".el", ".scm"),
    *(".rkt", ".v", ".sv", ".vhd", ".vhdl", ".f", ".f90", ".f95", ".for", ".asm", ".s", ".sol"),
    *(".sh", ".bash", ".zsh", ".fish", ".ps1", ".bat", ".cmd", ".awk", ".sed", ".vim", ".sql"),
    *(".css", ".scss", ".sass", ".less", ".xml", ".xsd", ".xsl", ".json", ".json5", ".yaml"),
    *(".yml", ".toml", ".ini", ".cfg", ".conf", ".properties", ".proto", ".thrift", ".graphql"),
    *(".tf", ".hcl", ".nix", ".cmake", ".mk", ".bzl", ".dockerfile", ".diff", ".patch"),
    *("makefile", "dockerfile", "rakefile", "gemfile", "justfile", "vagrantfile", "jenkinsfile"),
)


@of_text()
def read(source: str, text: str) -> list[Document]:
    """Return one document, the text as it is."""
    return [Document(source, text, "code")]
