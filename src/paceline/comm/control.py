"""Control connection of a worker or server to the coordinator."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from paceline.comm.wire import Channel
from paceline.errors import WireError
from paceline.protocol.messages import Message, message_from_wire, message_to_wire


class CoordinatorLink(Protocol):
    """Messages to and from the coordinator."""

    def send(self, message: Message) -> None: ...

    def receive(self) -> Message: ...


class ControlConnection:
    """Messages to and from the coordinator; sending is thread-safe."""

    def __init__(
        self, host: str, port: int, *, token: str, who: str, pid: int, timeout_s: float
    ) -> None:
        self._channel = Channel.connect(
            host, port, token=token, peer="the coordinator", timeout_s=timeout_s
        )
        self._send_lock = threading.Lock()
        self._channel.send({"who": who, "pid": pid, "role": "member"})

    @property
    def local_address(self) -> str:
        """Local address of the route to the coordinator."""
        return self._channel.local_address

    def send(self, message: Message) -> None:
        with self._send_lock:
            self._channel.send(message_to_wire(message))

    def receive(self) -> Message:
        """Waits for the next message. Raises PeerLost if the coordinator is gone.

        There is no deadline here, because the supervisor detects workers without progress.
        """
        head, _ = self._channel.receive(patient=True)
        return message_from_wire(head)

    def close(self) -> None:
        self._channel.close()


class StoreClient:
    """Keys and values kept by the coordinator, for rendezvous; on a separate connection.

    torch's own TCPStore listens on all interfaces and knows no token.
    """

    def __init__(self, host: str, port: int, *, token: str, who: str, timeout_s: float) -> None:
        self._channel = Channel.connect(
            host, port, token=token, peer="the coordinator's store", timeout_s=timeout_s
        )
        self._lock = threading.Lock()
        self._channel.send({"who": who, "pid": 0, "role": "store"})

    def call(self, operation: str, *args: Any) -> Any:
        with self._lock:
            self._channel.send([operation, *args])
            (status, value), _ = self._channel.receive()
        if status != "ok":
            raise WireError(f"store: {operation}{args!r}: {value}")
        return value

    def close(self) -> None:
        self._channel.close()
