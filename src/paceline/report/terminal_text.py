"""Text on terminals that cannot show every character, such as those with LC_ALL=C.

Symbols are replaced by ASCII before a table is laid out; an error handler of the output streams
replaces whatever remains, so that no text can end a command.
"""

import codecs
import io
import sys

HANDLER = "paceline.ascii"
SYMBOLS = {
    "±": "+/-", "×": "x", "−": "-", "–": "-", "—": "-", "·": "|", "→": "->", "…": "...",  # noqa: RUF001
    "µ": "u", "‘": "'", "’": "'", "“": '"', "”": '"', "\N{NO-BREAK SPACE}": " ",  # noqa: RUF001
    "─": "-", "━": "-", "│": "|", "•": "*", "✓": "ok", "✗": "x",
}  # fmt: skip
_TABLE = str.maketrans(SYMBOLS)


def fit_terminal(text: str) -> str:
    """Returns the text with its symbols in ASCII if standard output cannot encode them."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return text.translate(_TABLE)
    return text


def never_fail_on_characters() -> None:
    """Makes the output streams of this process accept every character."""
    codecs.register_error(HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encodes a symbol as ASCII, a byte of an undecodable file name as itself, others as `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return SYMBOLS.get(character, "?"), error.start + 1
