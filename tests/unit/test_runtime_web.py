"""HTTPS beside a service: its certificate may change while it serves."""

import asyncio
import shutil
import ssl
from pathlib import Path

import aiohttp
from starlette.applications import Starlette
from treadle.certificates import AUTHORITY, CERTIFICATE, KEY
from treadle_cli.certs import make_certificates
from treadle_cli.mesh.services import GATEWAY_FOLDER
from treadle_runtime.http.web import RENEW_S, bind_http, serve_http


async def test_while_one_of_two_new_files_is_written_the_old_certificate_serves(
    tmp_path: Path,
) -> None:
    old = make_certificates(tmp_path / "old") / GATEWAY_FOLDER
    new = make_certificates(tmp_path / "new") / GATEWAY_FOLDER
    stopping, listener = asyncio.Event(), bind_http("LISTEN", "127.0.0.1:0")
    folder = Path(shutil.copytree(old, tmp_path / "used"))
    url = f"https://127.0.0.1:{listener.getsockname()[1]}/"

    async def connect(authority: Path) -> None:
        """Raises ClientError where this authority has not signed the certificate, or where there is
        none."""
        trust = ssl.create_default_context(cafile=str(authority / AUTHORITY))
        async with (
            aiohttp.ClientSession() as http,
            http.get(url, ssl=trust, server_hostname="gateway.treadle") as response,
        ):
            assert response.status == 404

    async with asyncio.TaskGroup() as group:
        group.create_task(serve_http(Starlette(), listener, stopping, tls_folder=str(folder))())
        await connect(old)
        shutil.copy(new / CERTIFICATE, folder / CERTIFICATE)
        await asyncio.sleep(2 * RENEW_S)
        await connect(old)
        shutil.copy(new / KEY, folder / KEY)
        await asyncio.sleep(2 * RENEW_S)
        await connect(new)
        stopping.set()
