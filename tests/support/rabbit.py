"""A private RabbitMQ: its own node name, folders, ports and port mapper (epmd).

It takes some seconds to start, so tests that use it are integrations.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from support.servers import PrivateServer, find_binary, free_port

SERVERS = "/usr/lib/rabbitmq/lib"  # Debian's; the wrapper in /usr/sbin insists on a user of its own


class _PortMapper(PrivateServer):
    """Erlang's epmd, which would otherwise be started by the node and outlive it."""

    name = "epmd"

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        binary = find_binary("epmd", package="rabbitmq-server")
        return [binary, "-address", "127.0.0.1", "-port", str(self.port)]

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5):
            return True


class PrivateRabbit(PrivateServer):
    """RabbitMQ for user guest. Durable queues keep their confirmed messages over a `kill()`."""

    name = "rabbit"
    start_cap_sec = 120.0

    def __init__(self) -> None:
        super().__init__()
        self._mapper = _PortMapper()
        self._resources = contextlib.ExitStack()
        self._dist_port = 0
        self._vhosts = 0

    @property
    def url(self) -> str:
        return self.url_of("/")

    def url_of(self, vhost: str) -> str:
        """The URL of one virtual host."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{'' if vhost == '/' else vhost}"

    def command(self) -> list[str]:
        return [_script("rabbitmq-server")]

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_"))}
        folder = str(self.folder)
        return kept | {
            "HOME": folder,  # the node's cookie
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper.port),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/none.conf",
            "RABBITMQ_CONFIG_FILE": f"{folder}/none",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/none.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
            "RABBITMQ_MNESIA_BASE": f"{folder}/data",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_LOGS": "-",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the node instead of its parent
        }

    def prepare(self) -> None:
        self._dist_port = free_port()
        (self.folder / "plugins").write_text("[].\n")
        self._resources.enter_context(self._mapper)

    def answers(self) -> bool:
        import amqp

        try:
            with amqp.Connection(f"127.0.0.1:{self.port}", connect_timeout=5) as connection:
                return bool(connection.connected)
        except amqp.AMQPError:
            return False

    def create_vhost(self) -> str:
        """Make a fresh virtual host; its URL."""
        self._vhosts += 1
        name = f"test-{self._vhosts}"
        self.control("add_vhost", name)
        self.control("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
        return self.url_of(name)

    def control(self, *arguments: str) -> None:
        """Run rabbitmqctl on this node."""
        self.run_tool([_script("rabbitmqctl"), "--quiet", "--node", self._node, *arguments])

    @property
    def _node(self) -> str:
        return f"specbatch-{self._mapper.port}@localhost"

    def _clean_up(self) -> None:
        super()._clean_up()
        self._resources.close()


def _script(name: str) -> str:
    found = sorted(Path(SERVERS).glob(f"rabbitmq_server-*/sbin/{name}"))
    return str(found[-1]) if found else find_binary(name, package="rabbitmq-server")
