"""What holds in every test: fixed seeds, one thread, no network, no trace outside the test."""

import os
import tempfile

# Before any library reads them, and inherited by every process that a test starts.
_home = tempfile.TemporaryDirectory(prefix="sdpo-scale-tests-", ignore_cleanup_errors=True)
os.environ.update(
    HF_HOME=_home.name,  # caches of one run, not of the user
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="disabled",
)

import ipaddress  # noqa: E402
import random  # noqa: E402
import socket  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch):
    """A connection that leaves the machine fails the test (Python's sockets; gloo has its own)."""

    def guarded(name: str):
        connect = getattr(socket.socket, name)

        def connect_to_loopback(self: socket.socket, address):
            if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
                pytest.fail(f"a test tried to reach {address}")
            return connect(self, address)

        return connect_to_loopback

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, guarded(name))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
