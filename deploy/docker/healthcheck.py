"""Whether the worker of this container answers on its metrics port: exit code 0 or 1.

It only connects. To ask for the metrics would ask the store as well, and a database that is away is
no reason to restart workers. Without a metrics port there is nothing to ask, and the answer is yes.
"""

from __future__ import annotations

import os
import socket
import sys


def main() -> int:
    port = int(os.environ.get("SPECBATCH_METRICS_PORT") or 0)
    if not port:
        return 0
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=3):
            return 0
    except OSError as error:
        sys.stderr.write(f"nobody answers on port {port}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
