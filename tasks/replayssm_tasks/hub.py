"""Whether the Hugging Face hub can be reached, so that a machine without network learns it in seconds, not retries."""

import socket
import urllib.request
from urllib.parse import urlparse

_TIMEOUT = 5.0  # seconds


def hub_reachable() -> bool:
    """False when the user asked for offline mode or the hub's address does not answer; honours HF_ENDPOINT.

    Behind a proxy only the proxy can tell, so the answer is True.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    url = urlparse(constants.ENDPOINT)
    if urllib.request.getproxies().get(url.scheme):
        return True
    try:
        socket.create_connection(
            (url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=_TIMEOUT
        ).close()
    except OSError:
        return False
    return True
