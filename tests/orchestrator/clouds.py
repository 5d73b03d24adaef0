"""Servers of the three object storages on this machine."""

import base64
import hashlib
import hmac
import http.client
import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate

from moto.server import ThreadedMotoServer

from tests.orchestrator.faulty_proxy import FaultyProxy
from tests.orchestrator.google_front import SIGNED, GoogleFront
from tests.orchestrator.tracking.stores import wait_until
from tests.parts import free_port, system_program

ACCOUNT, KEY = "testing", base64.b64encode(b"of the test").decode()
Make = Callable[[str], None]


@contextmanager
def amazon() -> Iterator[tuple[FaultyProxy, Make]]:
    """Yields a proxy before the server, and what makes a bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    place = server.get_host_and_port()
    proxy = FaultyProxy(*place)
    yield proxy, lambda bucket: _put(place, f"/{bucket}", {"Authorization": SIGNED})
    proxy.close()
    server.stop()


@contextmanager
def google() -> Iterator[tuple[FaultyProxy, Make]]:
    with amazon() as (s3, make):
        front = GoogleFront(s3.upstream)
        proxy = FaultyProxy("127.0.0.1", front.server_port)
        yield proxy, make
        proxy.close()
        front.shutdown()


@contextmanager
def azure() -> Iterator[tuple[FaultyProxy, Make]]:
    program = system_program("azurite-blob", "azurite@3.37.0 of npm")
    port = free_port()
    place = "127.0.0.1", port

    def make(container: str) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        listed = "\n".join(f"{name}:{value}" for name, value in headers.items())
        signed = f"PUT{12 * chr(10)}{listed}\n/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
        mac = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}"
        _put(place, f"/{ACCOUNT}/{container}?restype=container", headers)

    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", folder]
        server = subprocess.Popen(
            [*command, "--disableTelemetry", "--skipApiVersionCheck", "--silent"],
            stdout=subprocess.DEVNULL,
            env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
        )
        try:
            wait_until(lambda: _answers(place), 60)
            proxy = FaultyProxy(*place)
            yield proxy, make
            proxy.close()
        finally:
            server.terminate()
            server.wait()


def environment(scheme: str, url: str) -> dict[str, str]:
    """The variables by which a process finds the server at `url`."""
    if scheme == "az":
        endpoint = {"AZURE_STORAGE_ENDPOINT": f"{url}/{ACCOUNT}"}
        return endpoint | {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
    if scheme == "gs":
        account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": ""}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({**account, "private_key_id": ""})}
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def _answers(place: tuple[str, int]) -> bool:
    try:
        http.client.HTTPConnection(*place, timeout=5).connect()
    except OSError:
        return False
    return True


def _put(place: tuple[str, int], path: str, headers: dict[str, str]) -> None:
    connection = http.client.HTTPConnection(*place, timeout=30)
    connection.request("PUT", path, headers=headers)
    answer = connection.getresponse()
    assert answer.status < 300, answer.read()
    connection.close()
