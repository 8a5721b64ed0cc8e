"""Reader of the old blueprint format: connections with IP, username, Password, GPUS, ...

Blueprints were written by hand and printed in a paper: commas are missing, `yes` is unquoted,
quotes are typographic, user names are absent. Unambiguous mistakes are repaired, and each repair is
reported. Passwords are skipped and never stored; errors and repair messages never quote a value
that could be a password.
"""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from paceline.errors import UsageError

KEYS = {
    "ip": "host",
    "host": "host",
    "username": "user",
    "user": "user",
    "port": "port",
    "password": "password",
    "gpus": "gpus",
    "gpu": "gpus",
    "energy efficient": "energy_efficient",
}
"""Blueprint keys (lower case, with spaces) and the pool keys that they correspond to."""

MISSING_COMMAS = "missing commas inserted"
EXTRA_COMMAS = "extra commas removed"
CURLY_QUOTES = "typographic quotes read as plain ones"
YES_NO = {"yes": True, "no": False, "true": True, "false": False}

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<mark>[{}\[\]:,])
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<curly>[\u201c\u201d](?:[^\u201c\u201d\n])*[\u201c\u201d])
      | (?P<bare>[^\s{}\[\]:,"\u201c\u201d]+)
      | (?P<unterminated>.)""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_INTEGER = re.compile(r"[+-]?\d+\Z")

Node = dict[str, Any]
"""A mapping in a blueprint file; its values are checked when they are used."""


def is_blueprint(text: str) -> bool:
    """Returns whether the text begins with the only top-level key of a blueprint."""
    return re.match(r"\s*\{\s*[\"\u201c\u201d]?connections[\"\u201c\u201d]?\s*:", text) is not None


def read_blueprint(text: str, where: str) -> tuple[Node, list[str]]:
    """Returns the pool that a blueprint describes, as plain data, and the repairs made.

    Raises UsageError with the line number if the text is ambiguous.
    """
    reader = _BlueprintParser(text, where)
    top = reader.value()
    reader.expect_end()
    machines = top.get("connections") if isinstance(top, dict) else None
    if not isinstance(machines, list) or not machines:
        raise UsageError(f"blueprint {where}: 'connections' must be a list of machines")
    repairs = reader.repairs()
    hosts: list[Node] = []
    passwords = 0
    for number, machine in enumerate(machines, start=1):
        if not isinstance(machine, dict):
            raise UsageError(f"blueprint {where}: connection {number} must be a mapping with 'IP'")
        host, had_password = _read_machine(machine, number, where, repairs)
        passwords += had_password
        hosts.append(host)
    if passwords:
        repairs.append(
            f"{passwords} password{'s were' if passwords > 1 else ' was'} dropped: "
            "run `paceline pool keys` to install a key instead"
        )
    return {"hosts": hosts}, repairs


def _read_machine(machine: Node, number: int, where: str, repairs: list[str]) -> tuple[Node, bool]:
    found: Node = {}
    for key, value in machine.items():
        name = KEYS.get(" ".join(key.lower().replace("_", " ").replace("-", " ").split()))
        if name is None:
            repairs.append(f"connection {number}: unknown key {key!r} was ignored")
        elif name in found:
            raise UsageError(f"blueprint {where}: connection {number} contains {key!r} twice")
        else:
            found[name] = value
    had_password = found.pop("password", None) is not None
    address = found.get("host")
    if not isinstance(address, str) or not address:
        raise UsageError(f"blueprint {where}: connection {number} has no 'IP'; add its address")
    label = f"connection {number} ({address})"
    host: Node = {"host": address}
    if found.get("user"):
        host["user"] = str(found["user"])
    else:
        repairs.append(f"{label} has no username: the name of the current user is used")
    if "port" in found:
        host["port"] = _count(found["port"], "port", label, where, repairs)
    gpus = _count(found.get("gpus", 0), "GPUS", label, where, repairs)
    if gpus:
        host["gpus"] = [{"count": gpus}]
    if _yes_or_no(found.get("energy_efficient", False), label, where, repairs):
        host["energy_efficient"] = True
    return host, had_password


def _count(value: Any, name: str, label: str, where: str, repairs: list[str]) -> int:
    if isinstance(value, bool):
        repairs.append(f"{label}: {name} yes/no read as {int(value)}")
        return int(value)
    if isinstance(value, str) and _INTEGER.match(value.strip()):
        repairs.append(f"{label}: quoted {name} read as a number")
        value = int(value)
    if not isinstance(value, int) or value < 0:
        raise UsageError(f"blueprint {where}: {label}: {name} must be a non-negative integer")
    return value


def _yes_or_no(value: Any, label: str, where: str, repairs: list[str]) -> bool:
    if isinstance(value, str) and value.strip().lower() in YES_NO:
        repairs.append(f"{label}: {value.strip().lower()!r} in quotes read as a boolean")
        return YES_NO[value.strip().lower()]
    if value in (0, 1):  # including booleans
        return bool(value)
    raise UsageError(f"blueprint {where}: {label}: energy efficient must be yes or no")


class _BlueprintToken(NamedTuple):
    kind: str
    text: str
    line: int


@dataclass
class _BlueprintParser:
    """Parser of JSON with missing commas and unquoted words."""

    text: str
    where: str
    _tokens: list[_BlueprintToken] = field(default_factory=list)
    _at: int = 0
    _repaired: dict[str, list[int]] = field(
        default_factory=lambda: {MISSING_COMMAS: [], EXTRA_COMMAS: [], CURLY_QUOTES: []}
    )
    """Lines of each kind of repair."""

    def __post_init__(self) -> None:
        line = 1
        for match in _TOKEN.finditer(self.text):
            if match.lastgroup == "unterminated":
                self._fail(line, "unterminated quote")
            if match.lastgroup != "space":
                self._tokens.append(_BlueprintToken(match.lastgroup or "", match.group(), line))
            line += match.group().count("\n")

    def repairs(self) -> list[str]:
        return [f"{what} {_lines(lines)}" for what, lines in self._repaired.items() if lines]

    def expect_end(self) -> None:
        if self._at < len(self._tokens):
            self._fail(self._tokens[self._at].line, "unexpected text after the closing brace")

    def value(self) -> Any:
        token = self._next("a value")
        if token.text == "{":
            return self._mapping(token.line)
        if token.text == "[":
            return self._list(token.line)
        if token.kind in ("string", "curly"):
            return self._string(token)
        if token.kind == "bare":
            return self._word(token)
        self._fail(token.line, f"expected a value, found {token.text!r}")

    def _mapping(self, opened: int) -> Node:
        found: Node = {}
        while not self._closes("}", opened, bool(found)):
            token = self._next("a key")
            if token.kind == "mark":
                self._fail(token.line, f"expected a key, found {token.text!r}")
            key = token.text if token.kind == "bare" else self._string(token)
            if self._next("':'").text != ":":
                self._fail(token.line, "expected ':' after the key")
            if key in found:
                self._fail(token.line, f"duplicate key {key!r}")
            found[key] = self.value()
        return found

    def _list(self, opened: int) -> list[Any]:
        found: list[Any] = []
        while not self._closes("]", opened, bool(found)):
            found.append(self.value())
        return found

    def _closes(self, end: str, opened: int, has_items: bool) -> bool:
        """Skips the separators between two items; returns True at the closing mark."""
        commas = 0
        last = self._tokens[self._at - 1].line
        while self._at < len(self._tokens) and self._tokens[self._at].text == ",":
            commas, self._at = commas + 1, self._at + 1
        if self._at >= len(self._tokens):
            self._fail(opened, f"missing closing {end!r}")
        closing = self._tokens[self._at].text == end
        if commas > (0 if closing or not has_items else 1):
            self._repaired[EXTRA_COMMAS].append(last)
        elif has_items and not closing and not commas:
            self._repaired[MISSING_COMMAS].append(last)
        self._at += closing
        return closing

    def _string(self, token: _BlueprintToken) -> str:
        if token.kind == "curly":
            self._repaired[CURLY_QUOTES].append(token.line)
            return token.text[1:-1].strip()
        return _ESCAPE.sub(_unescape, token.text[1:-1])

    def _word(self, token: _BlueprintToken) -> Any:
        word, lower = token.text, token.text.lower()
        if lower in ("yes", "no"):
            what = f"unquoted {lower} read as {str(YES_NO[lower]).lower()}"
            self._repaired.setdefault(what, []).append(token.line)
        if lower in YES_NO:
            return YES_NO[lower]
        if word == "null":
            return None
        return int(word) if _INTEGER.match(word) else word

    def _next(self, wanted: str) -> _BlueprintToken:
        if self._at >= len(self._tokens):
            last = self._tokens[-1].line if self._tokens else 1
            self._fail(last, f"expected {wanted}, found the end")
        self._at += 1
        return self._tokens[self._at - 1]

    def _fail(self, line: int, why: str) -> NoReturn:
        raise UsageError(f"blueprint {self.where}, line {line}: {why}")


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    if code[0] == "u" and len(code) == 5:
        return chr(int(code[1:], 16))
    return _ESCAPES.get(code, code)


def _lines(lines: list[int]) -> str:
    unique = sorted(set(lines))
    return f"(line{'s' if len(unique) > 1 else ''} {', '.join(map(str, unique))})"
